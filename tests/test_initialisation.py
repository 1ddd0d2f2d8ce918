import pytest
import torch

from timm_odevit import OdeConfig, convert_
from timm_odevit.convert.initialisation import build_field
from timm_odevit.ode.fields import FIELDS


def norm(weight):
    return torch.linalg.matrix_norm(weight.double(), ord=2).item()


@pytest.mark.parametrize('field', FIELDS)
def test_spectral_field(vit, field):
    shared = build_field(OdeConfig(field=field, init='spectral'), dict(enumerate(vit().blocks)))
    linears = {name: m for name, m in shared.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(linears) == 4
    for name, linear in linears.items():
        for part in linear.weight.chunk(3 if name.endswith('qkv') else 1):
            assert norm(part) == pytest.approx(1, abs=1e-5)
        assert linear.bias is None or not linear.bias.any()


def test_mean_is_the_mean_of_each_parameter(vit):
    for model, exact in ((vit(init_values=0.1), {}), (vit(init_values=0.1).double(), dict(rtol=1e-14, atol=1e-15))):
        shared = build_field(OdeConfig(field='native', init='mean'), dict(enumerate(model.blocks)))
        for name, parameter in shared.block.named_parameters():
            torch.testing.assert_close(parameter, torch.stack([b.get_parameter(name) for b in model.blocks]).mean(0), **exact)


def test_lipschitz_takes_the_layer_scale_into_the_projections(vit):
    model = vit(init_values=0.1)
    shared = build_field(OdeConfig(field='lipschitz'), {2: model.blocks[2]})
    block = model.blocks[2]
    assert torch.equal(shared.qkv.weight, block.attn.qkv.weight)
    assert torch.equal(shared.proj.weight, block.ls1.gamma[:, None] * block.attn.proj.weight)
    assert torch.equal(shared.fc2.weight, block.ls2.gamma[:, None] * block.mlp.fc2.weight)
    assert torch.equal(shared.norm2.bias, block.norm2.bias)


@pytest.mark.parametrize('field', FIELDS)
def test_stochastic_depth_is_the_mean_over_depth(vit, field):
    model = convert_(vit(drop_path_rate=0.2), OdeConfig(field=field, init='mean')).model
    rates = [m.drop_prob for m in model.modules() if type(m).__name__ == 'DropPath']
    assert rates and rates == pytest.approx([0.1] * len(rates))


@pytest.mark.parametrize('field', FIELDS)
def test_dtype_mode_and_requires_grad_carry_over(vit, field):
    model = convert_(vit().to(torch.bfloat16).requires_grad_(False), OdeConfig(field=field)).model
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules())
    model = vit().train()
    model.blocks[0].requires_grad_(False)
    convert_(model, OdeConfig(field=field))
    assert all(p.requires_grad for p in model.parameters()) and all(m.training for m in model.modules())
