import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn
from torch import nn
from torch.nn.utils import prune

from timm_odevit.ode.fields import CenterNorm, LipschitzField


def lipschitz(**kwargs):
    field = LipschitzField(dim=12, num_heads=3, head_dim=4, hidden=20, act=nn.GELU(), **kwargs).double()
    for parameter in field.parameters():
        nn.init.normal_(parameter)
    return field


def test_center_norm_is_its_formula():
    norm, x = CenterNorm(6), torch.randn(2, 3, 6)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    expected = norm.weight * 6 / 5 * (x - x.mean(-1, keepdim=True)) + norm.bias
    torch.testing.assert_close(norm(x), expected)


def test_timms_start_on_the_meta_device_fills_every_parameter():
    model = timm.create_model('odevit_tiny', img_size=32, device='meta').to_empty(device='cpu')
    _ = [nn.init.constant_(parameter, torch.nan) for parameter in model.parameters()]
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    beit = timm.create_model('odevit_converted', base='beitv2_base_patch16_224', img_size=32, embed_dim=24, depth=3, num_heads=2)
    beit.init_weights()  # which wants blocks with parts of their own
    assert beit.blocks.steps == 3


def test_hooks_that_make_weights_are_used():
    field, x = lipschitz(), torch.randn(2, 5, 12, dtype=torch.float64)
    nn.utils.spectral_norm(field.qkv)
    field(0., x, context(field)).sum().backward()
    assert field.qkv.weight_orig.grad.any() and torch.linalg.matrix_norm(field.qkv.weight, 2) < 2
    for norm, part in ((field.norm1, 'attention'), (field.norm2, 'mlp')):
        prune.random_unstructured(norm, 'weight', 0.5)
        nn.init.zeros_(norm.weight_orig), nn.init.zeros_(norm.bias)
        torch.testing.assert_close(field(0., x, context(field), part), torch.zeros_like(x))
    for layer in ('norm1', 'qkv', 'norm2', 'fc1'):
        (other := lipschitz()).get_submodule(layer).register_forward_hook(lambda *args: args[2] * 0)
        assert not other(0., x, context(other), 'mlp' if layer in ('norm2', 'fc1') else 'attention').any()


def context(field):
    return field.context((), {}, field.fold())


def test_lipschitz_field_is_the_papers_block():
    """MLP(CN2(x)) + MHSA(CN1(x)), written out."""
    field, x = lipschitz(), torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = (part.view(2, 5, 3, 4).transpose(1, 2) for part in field.qkv(field.norm1(x)).chunk(3, dim=-1))
    attention = (q @ k.transpose(-2, -1) / 2).softmax(-1)
    mhsa = field.proj((attention @ v).transpose(1, 2).reshape(2, 5, 12))
    mlp = field.fc2(F.gelu(field.fc1(field.norm2(x))))
    torch.testing.assert_close(field(0., x, None, 'attention'), mhsa)
    torch.testing.assert_close(field(0., x, None, 'mlp'), mlp)
    torch.testing.assert_close(field(0., x), mhsa + mlp)
    torch.testing.assert_close(field(0., x, context(field)), mhsa + mlp)
    torch.testing.assert_close(field.attention_map(0., x), attention.float())
    assert not any(isinstance(m, nn.Linear) and m.bias is not None for m in field.modules())


def test_lipschitz_field_calls_layers_that_were_replaced():
    class Lora(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1.
    field, x = lipschitz(), torch.randn(2, 5, 12, dtype=torch.float64)
    before = field(0., x)
    for name, layer in (('qkv', field.qkv), ('fc1', field.fc1)):
        setattr(field, name, Lora(*reversed(layer.weight.shape), bias=False, dtype=layer.weight.dtype))
        getattr(field, name).load_state_dict(layer.state_dict())
        after = field(0., x)
        assert not torch.allclose(after, before)
        before = after


def test_lipschitz_field_takes_masks_and_an_unfused_attention():
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    mask[..., 3:] = float('-inf')
    fused = lipschitz()
    set_fused_attn(False)
    try:
        plain = LipschitzField(dim=12, num_heads=3, head_dim=4, hidden=20, act=nn.GELU()).double()
    finally:
        set_fused_attn(True)
    plain.load_state_dict(fused.state_dict())
    for options in (dict(), dict(attn_mask=mask), dict(is_causal=True)):
        torch.testing.assert_close(plain(0., x, plain.context((), options), 'attention'), fused(0., x, fused.context((), options), 'attention'))
    assert not torch.allclose(fused(0., x, None, 'attention'), fused(0., x, fused.context((mask,), {}), 'attention'))


def test_gradients_flow_through_the_fold():
    field, x = lipschitz(), torch.randn(1, 4, 12, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *p: field(0., x, context(field)), tuple(field.parameters()))


@pytest.mark.parametrize('rates', [dict(attn_drop=0.5), dict(proj_drop=0.5), dict(drop_path=0.5)])
def test_dropout_acts_in_training_only(rates):
    field, x = lipschitz(**rates), torch.randn(8, 5, 12, dtype=torch.float64)
    assert torch.equal(field.eval()(0., x), field(0., x))
    assert not torch.equal(field.train()(0., x), field(0., x))


@pytest.mark.parametrize('layer', ['qkv', 'fc1'])
def test_a_layer_of_another_kind_or_with_another_forward_is_called(layer):
    field, x = lipschitz(), torch.randn(1, 4, 12, dtype=torch.float64)
    linear, expected = getattr(field, layer), field(0., x)
    setattr(field, layer, nn.Sequential(linear))  # such as LoRA by hand
    torch.testing.assert_close(field(0., x), expected)
    setattr(field, layer, linear)
    original = linear.forward
    linear.forward = lambda y: 2 * original(y)  # accelerate replaces it so
    louder = field(0., x)
    del linear.forward
    linear.weight.data *= 2
    torch.testing.assert_close(louder, field(0., x))
    assert not torch.allclose(louder, expected)
