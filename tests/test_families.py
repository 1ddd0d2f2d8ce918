"""Every family of models that can be converted, at a tiny size."""
import copy
from dataclasses import replace

import pytest
import timm
import torch
from conftest import reloaded

from timm_odevit import OdeConfig, calibrate_, convert_
from timm_odevit.ode.blocks import find_ode_blocks

VIT = dict(img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=4, num_classes=5)
SWIN = dict(img_size=32, patch_size=2, embed_dim=8, depths=(2, 4), num_heads=(2, 4), window_size=4, num_classes=5)
# name: keywords that make the model small, and what is special about it
MODELS = {
    'deit_tiny_distilled_patch16_224': VIT,  # two heads
    'vit_base_patch16_rpn_224': VIT,  # ResPostBlock
    'vit_base_patch16_18x2_224': VIT,  # ParallelThingsBlock
    'vit_base_patch16_xp_224': VIT,  # ParallelScalingBlock
    'vit_dpwee_patch16_reg1_gap_256': VIT,  # DiffParallelScalingBlock
    'vit_dwee_patch16_reg1_gap_256': VIT,  # DiffAttention
    'beit_base_patch16_224': VIT,  # a relative position bias per block
    'beitv2_base_patch16_224': dict(VIT, use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    'eva02_tiny_patch14_224': VIT,  # RoPE, SwiGLU
    'eva02_enormous_patch14_clip_224': VIT,  # EvaBlockPostNorm
    'vit_small_patch16_dinov3': VIT,
    'vit_pe_core_tiny_patch16_384': VIT,
    'vit_small_patch16_rope_mixed_224': VIT,  # RoPE per depth
    'vit_giant_patch16_sapiens2': dict(VIT, num_heads=4, num_kv_heads=(4, 2, 2, 4)),  # grouped queries in the middle
    'vit_relpos_small_patch16_224': VIT,
    'vit_srelpos_small_patch16_224': VIT,  # one relative position MLP for all blocks
    'vit_relpos_base_patch16_rpn_224': VIT,
    'samvit_base_patch16': dict(VIT, window_size=2, global_attn_indexes=(1, 3), neck_chans=8),  # windows and global
    'samvit_base_patch16_224': VIT,
    'naflexvit_base_patch16_gap': {k: v for k, v in VIT.items() if k != 'img_size'},
    'mixer_s32_224': dict(img_size=64),
    'resmlp_12_224': dict(img_size=32),
    'gmlp_ti16_224': dict(img_size=32),
    'cait_xxs24_224': VIT,
    'xcit_nano_12_p16_224': dict(img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=4, num_classes=5),
    'swin_tiny_patch4_window7_224': SWIN,
    'swinv2_tiny_window8_256': SWIN,
    'swinv2_cr_tiny_224': SWIN,
}
WHOLE = ('xp_224', 'dpwee', 'mixer', 'resmlp', 'gmlp', 'cait', 'xcit', '_cr_')
families = pytest.mark.parametrize('name', MODELS)


def build(name, **kwargs):
    model = timm.create_model(name, **{**MODELS[name], **kwargs}).eval()
    with torch.no_grad():  # fresh norms, biases and LayerScales are all alike, and pretrained ones are not
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.)
    return model


def images_for(name):
    return torch.randn(2, 3, *[MODELS[name].get('img_size', 16)] * 2)


def config_for(name, **kwargs):
    return OdeConfig(method='euler' if any(part in name for part in WHOLE) else 'lie_trotter', **kwargs)


def depth(model):
    return len(model.blocks) if hasattr(model, 'blocks') else 4


@families
def test_a_phase_per_layer_is_the_model_itself(name):
    model, x = build(name), images_for(name)
    before, keys = model(x), list(model.state_dict())
    done = convert_(model, config_for(name, phases=depth(model)))
    if done.config.method == 'lie_trotter':
        assert torch.equal(model(x), before)
    else:
        torch.testing.assert_close(model(x), before)  # x + (block(x) - x) rounds
    done.restore()
    assert list(model.state_dict()) == keys and torch.equal(model(x), before)


@families
def test_shares_blocks_and_every_number_of_steps_runs(name):
    model, x = build(name), images_for(name)
    done = convert_(model, config_for(name))
    assert done.parameters_after < done.parameters_before and 'shared block' in str(done)
    whole = model(x)
    for steps in (2, 7):
        for blocks in done.blocks:
            blocks.steps = steps
        assert model(x).shape == whole.shape and torch.isfinite(model(x)).all()


@families
def test_a_part_reloads_bit_for_bit(name, tmp_path):
    if 'depths' in MODELS[name]:
        pytest.skip('a part of the layers is for one sequence of layers')
    model, x = build(name, **(dict(depth=6) if MODELS[name].get('depth') and 'sapiens' not in name else {})), images_for(name)
    before = model(x)
    run = (1, 4) if len(model.blocks) == 6 else (1, 2)
    done = convert_(model, config_for(name, blocks=run, phases=run[1] - run[0] + 1))
    torch.testing.assert_close(model(x), before)
    done.restore()
    convert_(model, config_for(name, blocks=run, phases=2, steps=3))
    again = reloaded(model, tmp_path / 'model')
    assert torch.equal(again(x), model(x))
    assert len({p.data_ptr() for p in again.parameters()}) == len(list(again.parameters()))


@families
def test_calibrates(name):
    teacher, x = build(name), images_for(name).repeat(2, 1, 1, 1)
    history = calibrate_(convert_(copy.deepcopy(teacher), config_for(name)).model, teacher, x, epochs=2, batch_size=2, progress=False)
    assert len(history) == 2 and all(0 < record['loss'] < 10 for record in history)


@families
def test_reloads_bit_for_bit_with_intermediates_and_features(name, tmp_path):
    model, x = build(name), images_for(name)
    expected = [tuple(f.shape) for f in model.forward_intermediates(x)[1]]
    convert_(model, config_for(name, phases=2))
    features, states = model.forward_intermediates(x)
    assert [tuple(state.shape) for state in states] == expected
    torch.testing.assert_close(model.forward_head(features), model(x))
    again = reloaded(model, tmp_path / 'model')
    assert torch.equal(again(x), model(x))
    assert [ode.config for ode in find_ode_blocks(again)] == [ode.config for ode in find_ode_blocks(model)]
    maps = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True, features_only=True, out_indices=[-1]).eval()(x)
    assert maps[-1].shape[1:] == states[-1].shape[1:] or maps[-1].shape[2:] == states[-1].shape[1:-1]


@families
def test_compiles_and_exports(name):
    model, x = convert_(build(name), config_for(name, phases=2, steps=2)).model, images_for(name)  # one step of each shared block
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='eager')(x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


RESIZED = ['beit_base_patch16_224', 'beitv2_base_patch16_224', 'eva02_tiny_patch14_224', 'vit_relpos_small_patch16_224',
           'vit_srelpos_small_patch16_224', 'swin_tiny_patch4_window7_224', 'swinv2_tiny_window8_256']


@pytest.mark.parametrize('name, settings', [
    *((name, {}) for name in RESIZED), *((name, dict(phases=2, steps=3)) for name in RESIZED),
    *((name, dict(phases=2, method='dopri5')) for name in RESIZED if 'swin' not in name)])
def test_the_image_size_may_change_after_conversion(name, settings):
    size = 2 * MODELS[name]['img_size']
    resized = build(name)
    converted = copy.deepcopy(resized)
    kwargs = {'window_size': 8} if 'swin' in name else {}
    resized.set_input_size((size, size), **kwargs)
    config = replace(config_for(name), **settings)
    convert_(resized, config)
    convert_(converted, config)
    converted.set_input_size((size, size), **kwargs)
    for ode in (*find_ode_blocks(converted), *find_ode_blocks(resized)):
        ode.steps = 4  # a step in each phase
    x = torch.randn(1, 3, size, size)
    torch.testing.assert_close(converted(x), resized(x), rtol=1e-3, atol=1e-4)


@families
def test_moves_copies_and_restores(name):
    """deepcopy, dtype and back, requires_grad of each part, training, and restore() on the way out."""
    model, x = build(name), images_for(name)
    expected = model(x)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 2 == 0)
    flags = [p.requires_grad for p in model.parameters()]
    original = {k: v.clone() for k, v in (model.layers if hasattr(model, 'layers') else model).state_dict().items()}
    done = convert_(model, config_for(name, phases=2))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not torch.equal(twin(x), model(x))
    model.bfloat16()
    assert model(x.bfloat16()).dtype == torch.bfloat16
    model.float()
    model.set_grad_checkpointing()
    model.train()(x).square().sum().backward()
    shared = [p for n, p in model.named_parameters() if 'blocks.shared' in n and p.requires_grad]
    assert shared and all(p.grad is not None for p in shared)
    model.set_grad_checkpointing(False)
    done.restore()
    assert [p.requires_grad for p in model.parameters()] == flags
    state = (model.layers if hasattr(model, 'layers') else model).state_dict()
    assert all(torch.equal(v, original[k]) for k, v in state.items() if '.blocks.' in f'.{k}' and 'running' not in k)
    assert model.eval()(x).shape == expected.shape
