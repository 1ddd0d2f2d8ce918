from functools import partial

import pytest
import timm
import torch
from conftest import reloaded, snapshot
from timm.layers import SwiGLUPacked
from timm.models import VisionTransformer
from torch import nn
from torch.nn.utils import prune

from timm_odevit import OdeConfig, check_convertible, convert_, list_convertible
from timm_odevit.ode.blocks import count_parameters

# every kind of VisionTransformer with plain blocks, at a tiny size
FAMILIES = [
    'vit_tiny_patch16_224',
    'deit_tiny_patch16_224',
    'deit3_small_patch16_224',
    'vit_small_patch14_dinov2',
    'vit_small_patch14_reg4_dinov2',
    'vit_base_patch16_clip_224',
    'vit_base_patch32_clip_quickgelu_224',
    'vit_base_patch16_siglip_224',
    'flexivit_small',
]


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize(
    'config', [OdeConfig(), OdeConfig(field='lipschitz', method='euler', init='spectral', steps=2)], ids=lambda c: c.field)
def test_every_family_converts_reloads_bit_for_bit_and_restores(vit, images, tmp_path, name, config):
    model = vit(name)
    before, logits = snapshot(model), model(images)
    done = convert_(model, config)
    assert type(model) is VisionTransformer
    assert model(images).shape == logits.shape
    assert len(model.forward_intermediates(images)[1]) == (config.steps or 3)
    assert done.parameters_after == count_parameters(model) < done.parameters_before
    again = reloaded(model, tmp_path / 'model')
    assert torch.equal(again(images), model(images))
    assert tuple(again.pretrained_cfg['mean']) == tuple(model.pretrained_cfg['mean'])
    assert done.restore() is None  # a notebook would print the model
    assert snapshot(model) == before
    assert torch.equal(model(images), logits)


def test_report(vit):
    model = vit()
    done = convert_(model)
    text, block = str(done), count_parameters(model.blocks[0].field)
    assert done.parameters_after == done.parameters_before - 2 * block
    assert 'blocks 0-2 -> 1 shared block' in text and 'lie_trotter, 3 steps on [0, 3], 3 evaluations' in text
    assert f'{done.parameters_before:,} -> {done.parameters_after:,}' in text
    model.blocks.steps = 6
    assert 'lie_trotter, 6 steps on [0, 3], 6 evaluations' in str(done)


def test_restore_follows_the_mode_of_the_model_and_works_once(vit):
    model = vit()
    done = convert_(model)
    model.train()
    done.restore()
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match='it was restored already'):
        done.restore()
    convert_(model).restore()
    model = vit()
    done = convert_(model, keep_original=False)
    with pytest.raises(ValueError, match='keep_original=True'):
        done.restore()


@pytest.mark.parametrize('blocks', [None, (1, 2)])
def test_restore_keeps_the_mode_and_the_dtype_of_each_block(vit, images, blocks):
    model = vit().train()
    model.blocks[1].eval()
    weight = model.blocks[1].mlp.fc1.weight
    done = convert_(model, OdeConfig(blocks=blocks))
    model.bfloat16()
    done.restore()
    assert model.blocks[0].training and not model.blocks[1].training
    assert model.blocks[1].mlp.fc1.weight is weight and weight.dtype == torch.float32
    model.float()(images)


def meta(name, **kwargs):
    return lambda: timm.create_model(name, device='meta', **kwargs)


def tiny():
    return timm.create_model('vit_tiny_patch16_224')


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):  # as peft's
        return super().__getattr__('model') if name == 'model' else getattr(self.model, name)


REFUSED = [
    (lambda: Wrapper(tiny()), {}, TypeError, 'Cannot convert Wrapper: it has no sequence of transformer blocks'),
    (lambda: timm.create_model('resnet10t'), {}, TypeError,
     'Cannot convert ResNet: it has no sequence of transformer blocks. See timm_odevit.list_convertible().'),
    (meta('efficientnet_b0'), {}, TypeError, 'Cannot convert EfficientNet: its blocks are of 7 kinds'),
    (lambda: timm.create_model('convit_tiny'), {}, TypeError, 'Cannot convert ConVit: its blocks are of 2 kinds'),
    (meta('crossvit_9_240'), {}, TypeError, 'a MultiScaleBlock does not take one state tensor'),
    (meta('tnt_s_patch16_224'), {}, TypeError, 'a Block does not take one state tensor'),
    (meta('twins_svt_small'), {}, TypeError, 'a ModuleList does not take one state tensor'),
    (meta('mixer_s32_224'), {}, ValueError, 'but a MixerBlock of MlpMixer cannot be split. Use a method that does not split it (euler, '),
    (meta('eva02_tiny_patch14_224'), dict(field='lipschitz', init='spectral'), ValueError,
     "field='lipschitz' cannot replace a EvaBlock of Eva: it replaces plain pre-norm ViT blocks. Use field='native'."),
    (meta('swin_tiny_patch4_window7_224'), dict(field='lipschitz', method='euler', blocks=(3, 5)), ValueError, 'blocks=(3, 5) applies only to models with one sequence'),
    (meta('swin_tiny_patch4_window7_224'), dict(T=3.), ValueError, 'T=3.0 applies only to models with one sequence of blocks'),
    (meta('swin_tiny_patch4_window7_224'), dict(steps=(2, 2)), ValueError, '4 sequences of blocks; got 2 step counts'),
    (lambda: nn.Linear(2, 2), {}, TypeError, 'Cannot convert Linear'),
    (lambda: 'vit_tiny_patch16_224', {}, TypeError, "Expected a timm model; got 'vit_tiny_patch16_224'"),
    *((wrap, {}, TypeError, 'convert it before you wrap it in torch.compile or DistributedDataParallel')
      for wrap in (lambda: nn.DataParallel(tiny()), lambda: torch.compile(tiny()))),
    (tiny, dict(phases=13), ValueError, 'phases=13: there are 12 layers. Allowed: 1 to 12.'),
    (tiny, dict(blocks=(3, 12)), ValueError, 'blocks=(3, 12): VisionTransformer has blocks 0 to 11'),
    *((lambda part=part: timm.create_model('vit_tiny_patch16_224', **part), dict(field='lipschitz'), ValueError,
       "cannot replace a Block of VisionTransformer: only with init='spectral' can it") for part in (
           dict(norm_layer='rmsnorm'), dict(norm_layer=partial(nn.LayerNorm, bias=False)), dict(mlp_layer=SwiGLUPacked), dict(qk_norm=True))),
    (tiny, dict(steps=[[3]]), ValueError, 'steps must be a whole number'),
]


@pytest.mark.parametrize('build, settings, error, message', REFUSED, ids=[r[3][:40] for r in REFUSED])
def test_refuses_before_any_change(build, settings, error, message):
    model = build()
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else None
    with pytest.raises(error) as e:
        convert_(model, OdeConfig(**settings))
    assert message in str(e.value)
    assert modules is None or dict(model.named_modules()) == modules


def test_blocks_of_another_class_or_without_a_common_parameter_are_refused(vit):
    model = vit()
    model.blocks[2] = nn.Identity()
    with pytest.raises(TypeError, match='block 2 is a Identity, block 0 is a Block'):
        convert_(model)
    with pytest.raises(TypeError, match='each of its 3 blocks has different parameters or settings, so none can be shared'):
        model.blocks[2] = timm.create_model('vit_tiny_patch16_224', embed_dim=32, num_heads=2, depth=1, qkv_bias=False).blocks[0]
        model.blocks[1] = timm.create_model('vit_tiny_patch16_224', embed_dim=32, num_heads=2, depth=1, mlp_ratio=2).blocks[0]
        convert_(model)


def test_blocks_of_two_kinds_get_a_shared_block_each(vit, images):
    model = vit()
    model.blocks[2] = timm.create_model('vit_tiny_patch16_224', embed_dim=32, num_heads=2, depth=1, qkv_bias=False).blocks[0]
    assert 'blocks 0-2 -> 2 shared blocks' in str(convert_(model)) and model.blocks.shared.which == (0, 0, 1)
    assert model(images).shape == (2, 5)


def test_a_conversion_that_is_undone_leaves_no_trace(vit):
    model = vit().train()
    before, state = snapshot(model), torch.get_rng_state()
    convert_(model, OdeConfig(init='spectral', phases=2)).restore()
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_converting_twice_is_an_error(vit, images):
    model = convert_(vit()).model
    logits = model(images)
    with pytest.raises(ValueError, match=r'already converted \(lie_trotter, 3 steps on'):
        convert_(model)
    assert torch.equal(model(images), logits)


def test_list_convertible_is_what_converts():
    names = list_convertible('*tiny_patch16_224*')
    assert {'vit_tiny_patch16_224', 'deit_tiny_patch16_224'} <= set(names)
    assert not any(name.startswith('odevit') for name in names)
    assert names['vit_tiny_patch16_224'] == 'native, lipschitz; all methods; at least 1 shared block'
    with pytest.raises(ValueError, match="No timm model matches 'vit_tinny"):
        list_convertible('vit_tinny*')
    assert {**names, **list_convertible('test_vit')} == list_convertible(['*tiny_patch16_224*', 'test_vit'])
    refused = list_convertible('*tiny_patch16_224*', refused=True)
    assert set(names) | set(refused) == set(timm.list_models('*tiny_patch16_224*'))
    for name in names:
        check_convertible(timm.create_model(name, device='meta'))
    for name in refused:
        with pytest.raises((TypeError, ValueError)):
            check_convertible(timm.create_model(name, device='meta'))


def test_weights_that_are_not_finite_are_refused(vit):
    broken = vit()
    with torch.no_grad():
        broken.blocks[1].mlp.fc1.weight[0, 0] = float('nan')
    for refuse in (convert_, check_convertible):
        with pytest.raises(ValueError, match='blocks.1.mlp.fc1.weight contains NaN'):
            refuse(broken)
    assert len(broken.blocks) == 3
    prune.random_unstructured((pruned := vit()).blocks[1].attn.proj, 'weight', 0.5)
    with pytest.raises(ValueError, match='blocks.1.attn.proj computes its weight in a hook'):
        convert_(pruned)


def test_kept_blocks_keep_their_modes(vit):
    model = vit(depth=4).train()
    model.blocks[0].eval()
    convert_(model, blocks=(1, 2))
    assert not model.blocks[0].training and model.blocks[3].training and model.blocks.shared.training
