import json
from collections import OrderedDict

import numpy as np
import pytest
import timm
import torch
import torchvision
from conftest import reloaded, snapshot
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models import vision_transformer as tv
from torchvision.models.vision_transformer import ConvStemConfig

from timm_odevit import from_torchvision

TINY = dict(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)
# float32: both compute the same sums, in another order
CLOSE = dict(rtol=0, atol=1e-5)
WEIGHTS = [tv.ViT_B_16_Weights, tv.ViT_B_32_Weights, tv.ViT_L_16_Weights, tv.ViT_L_32_Weights, tv.ViT_H_14_Weights]
BUILDERS = [name for name in torchvision.models.list_models() if name.startswith('vit_')]


@pytest.fixture
def build():
    """Builds a small torchvision ViT: 3 blocks, 17 tokens of 32 channels, 5 classes, no parameter left at zero or one."""
    def build(changes=None, **kwargs):
        vit = torchvision.models.VisionTransformer(**{**TINY, **kwargs}).eval()
        for name, make in (changes or {}).items():
            owner, _, key = name.rpartition('.')
            setattr(vit.get_submodule(owner), key, make())
        with torch.no_grad():
            for parameter in vit.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return vit
    return build


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32)


def on_meta(name, **kwargs):
    with torch.device('meta'):
        return torchvision.models.get_model(name, weights=None, **kwargs)


NEW_HEAD = {'heads.head': lambda: nn.Linear(32, 7)}  # torchvision's num_classes still says 5
DROPOUT_HEADS = {'heads': lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 7))}
IDENTITY_HEADS = {'heads': nn.Identity}
GRAY = {'conv_proj': lambda: nn.Conv2d(1, 32, 8, 8)}
FEWER_LAYERS = {'encoder.layers': lambda: nn.Sequential(OrderedDict((f'encoder_layer_{i}', tv.EncoderBlock(2, 32, 64, 0., 0.)) for i in (1, 2)))}


@pytest.mark.parametrize('changes, kwargs', [
    ({}, {}),
    ({}, dict(image_size=48, patch_size=16, num_layers=1, num_heads=4, mlp_dim=50, num_classes=1)),
    ({}, dict(hidden_dim=30, mlp_dim=77)),
    (NEW_HEAD, {}), ({'heads': lambda: nn.Linear(32, 7)}, {}), (DROPOUT_HEADS, {}), (IDENTITY_HEADS, {}), (GRAY, {}),
    ({'heads.head': lambda: nn.Linear(32, 5, bias=False)}, {}), (FEWER_LAYERS, {}),
], ids=lambda x: '-'.join(x) or 'plain')
def test_same_logits_and_gradients_in_both_modes(build, changes, kwargs):
    vit = build(changes, **kwargs)
    for module in vit.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.  # train mode is compared without the draws
    before = snapshot(vit)
    model = from_torchvision(vit)
    assert snapshot(vit) == before
    assert type(model) is VisionTransformer
    for training in (False, True):
        x = torch.randn(2, vit.conv_proj.in_channels, vit.image_size, vit.image_size)
        a, b = x.clone().requires_grad_(), x.requires_grad_()
        theirs, ours = vit.train(training)(a), model.train(training)(b)
        assert theirs.std() > 0.1 or theirs.shape[1] == 1
        torch.testing.assert_close(ours, theirs, **CLOSE)
        theirs.square().sum().backward()
        ours.square().sum().backward()
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', BUILDERS)
def test_every_builder_of_torchvision_has_a_timm_name_of_its_own(name):
    vit = on_meta(name, image_size=448)  # a multiple of 14, 16 and 32
    model = from_torchvision(vit)
    expected = name.replace('vit_b_', 'vit_base_patch').replace('vit_l_', 'vit_large_patch')
    expected = expected.replace('vit_h_', 'vit_huge_patch') + '_224'
    assert model.pretrained_cfg['architecture'] == expected
    assert all(p.is_meta for p in model.parameters())
    with torch.device('meta'):
        plain = timm.create_model(expected, img_size=448, num_classes=1000)
    assert [(k, v.shape) for k, v in model.state_dict().items()] == [(k, v.shape) for k, v in plain.state_dict().items()]
    assert repr(model) == repr(plain)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in vit.parameters())


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
def test_mode_dtype_and_requires_grad_carry_over(build, dtype, training):
    vit = build().to(dtype).train(training)
    vit.requires_grad_(False)
    vit.heads.requires_grad_(True)
    vit.encoder.layers[1].self_attention.in_proj_bias.requires_grad_(True)
    model = from_torchvision(vit)
    assert all(m.training is training for m in model.modules())
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ['blocks.1.attn.qkv.bias', 'head.weight', 'head.bias']


def test_rates_of_dropout_carry_over(build):
    vit = build(DROPOUT_HEADS, dropout=0.1, attention_dropout=0.2).train()
    vit.encoder.dropout.p = 0.4
    model = from_torchvision(vit)
    rates = {(name.rpartition('.')[2], m.p) for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert rates == {('pos_drop', 0.4), ('head_drop', 0.3), ('attn_drop', 0.2), ('proj_drop', 0.1), ('drop1', 0.1), ('drop2', 0.1)}
    assert model._model_args['proj_drop_rate'] == 0.1 and model._model_args['attn_drop_rate'] == 0.2


def test_a_compiled_model_is_taken_without_its_wrapper(build, images):
    vit = build()
    torch.testing.assert_close(from_torchvision(torch.compile(vit, backend='eager'))(images), vit(images), **CLOSE)


@pytest.mark.parametrize('weights', [member for kind in WEIGHTS for member in kind], ids=str)
def test_weights_give_their_own_preprocessing(weights):
    name = type(weights).__name__.removesuffix('_Weights').lower()
    vit = on_meta(name, image_size=weights.meta['min_size'][0])
    data = resolve_data_config({}, model=from_torchvision(vit, weights=weights))
    assert data['input_size'] == (3, *weights.meta['min_size'])
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (600, 700, 3), dtype=np.uint8))
    # timm and torchvision resize by the same filter of PIL, so pixel for pixel
    torch.testing.assert_close(create_transform(**data)(image), weights.transforms()(image), rtol=0, atol=1e-6)


def test_without_weights_the_preprocessing_is_that_of_imagenet1k_v1(build):
    model = from_torchvision(build())
    assert resolve_data_config({}, model=model) == dict(
        input_size=(3, 32, 32), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation='bilinear',
        crop_pct=0.875, crop_mode='center')
    assert not {'hf_hub_id', 'tag', 'license'} & model.pretrained_cfg.keys() and not model.pretrained_cfg.get('url')
    assert json.loads(json.dumps(model._model_args)) == model._model_args


@pytest.mark.parametrize('changes', [{}, NEW_HEAD, IDENTITY_HEADS, GRAY, FEWER_LAYERS], ids=lambda x: '-'.join(x) or 'plain')
def test_saved_and_reloaded_bit_for_bit(build, tmp_path, changes):
    model = from_torchvision(build(changes, dropout=0.1), weights=WEIGHTS[0].IMAGENET1K_SWAG_E2E_V1)
    again = reloaded(model, tmp_path / 'a')
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    x = torch.randn(2, model.in_chans, 32, 32)
    assert torch.equal(again(x), model(x))
    ours, theirs = (resolve_data_config({}, model=m) for m in (model, again))
    assert theirs['interpolation'] == 'bicubic' and theirs['crop_pct'] == 1.
    if model.in_chans == 3:  # timm averages the three channels when it saves any other number
        assert ours == {**theirs, 'mean': tuple(theirs['mean']), 'std': tuple(theirs['std']), 'input_size': (3, 32, 32)}


OTHER = "its output for a random image differs from timm's"


@pytest.mark.parametrize('name, make, message', [
    ('encoder.layers.encoder_layer_1.self_attention.add_zero_attn', lambda: True, OTHER),
    ('encoder.layers.encoder_layer_2.self_attention', lambda: nn.MultiheadAttention(32, 4, batch_first=True), OTHER),
    ('encoder.layers.encoder_layer_1.mlp', lambda: nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Dropout(), nn.Linear(16, 32), nn.Dropout()),
     r'size mismatch for blocks.1.mlp.fc1.weight'),
    ('encoder.layers.encoder_layer_1.mlp.1', nn.ReLU, OTHER),
    ('encoder.layers.encoder_layer_1.mlp.1', lambda: nn.GELU('tanh'), OTHER),
    ('encoder.ln', lambda: nn.RMSNorm(32), OTHER),
    ('encoder.ln.eps', lambda: 0.1, OTHER),
    ('encoder.layers.encoder_layer_1.adapter', lambda: nn.Linear(32, 32), 'Unexpected key.*blocks.1.adapter.weight'),
    ('mask', lambda: nn.Buffer(torch.ones(3)), 'Unexpected key.*mask'),
    ('encoder.layers.encoder_layer_1.mlp.0', lambda: parametrizations.weight_norm(nn.Linear(32, 64)),
     'blocks.1.mlp.fc1.parametrizations'),
])
def test_what_timm_lacks_is_refused_and_nothing_is_changed(build, name, make, message):
    vit = build({name: make})
    before = snapshot(vit)
    with pytest.raises(ValueError, match=f'^Cannot build a timm model from this torchvision VisionTransformer: .*{message}'):
        from_torchvision(vit)
    assert snapshot(vit) == before


def test_what_torchvision_itself_builds_and_timm_lacks_is_refused(build):
    with pytest.raises(ValueError, match='its stem and heads are Sequential'):
        from_torchvision(build(conv_stem_configs=[ConvStemConfig(8, 3, 2)] * 3))
    vit = build(representation_size=8)
    with pytest.raises(ValueError, match=r'heads are Conv2d, Linear, Tanh, Linear.*Set vit.heads = torch.nn.Identity\(\)'):
        from_torchvision(vit)
    vit.heads = nn.Identity()  # as the message says
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(from_torchvision(vit)(x), vit(x), **CLOSE)


@pytest.mark.parametrize('model', [
    lambda: timm.create_model('vit_tiny_patch16_224', depth=1), lambda: nn.Linear(2, 2), lambda: type('Other', (tv.VisionTransformer,), {})(**TINY), lambda: None])
def test_what_is_no_torchvision_vit_is_refused(model):
    with pytest.raises(TypeError, match="from_torchvision got a .*; expected torchvision's VisionTransformer"):
        from_torchvision(model())
    with pytest.raises(TypeError, match='expected weights such as torchvision.models.ViT_B_16_Weights.DEFAULT'):
        from_torchvision(tv.VisionTransformer(**TINY), weights='DEFAULT')
