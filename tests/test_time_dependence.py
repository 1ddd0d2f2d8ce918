import copy
import json
from dataclasses import replace

import pytest
import timm
import torch
import torch.distributed as dist
from conftest import converted
from torch.distributed.fsdp import fully_shard

from timm_odevit import OdeConfig, Recipe, convert_, integrate, merge_, save_pretrained
from timm_odevit.convert.initialisation import build_field, factors, input_moments
from timm_odevit.convert.merge import _frozen
from timm_odevit.ode.fields import NativeField
from timm_odevit.ode.methods import METHODS
from timm_odevit.ode.time_dependence import PiecewiseField, TimeField


def timed(vit, rank=2, **kwargs):
    model = vit(**kwargs)
    return build_field(OdeConfig(time='low_rank', rank=rank), dict(enumerate(model.blocks))), model


def test_at_a_layer_the_field_has_that_layers_vectors_and_the_best_residual(vit):
    field, model = timed(vit, rank=2)
    for layer, block in enumerate(model.blocks):
        found = field.at(float(layer))
        for name, p in block.named_parameters():
            value = found[f'block.{name}']
            if p.ndim == 1:
                torch.testing.assert_close(value, p)
            else:
                mean = field.base.get_parameter(f'block.{name}')
                residual = p - mean
                s = torch.linalg.svdvals(residual)
                torch.testing.assert_close((value - p).norm(), s[2:].norm(), rtol=1e-3, atol=1e-5)  # Eckart-Young


def test_from_one_layer_to_the_next_the_field_is_constant(vit):
    field, _ = timed(vit)
    for t, layer in ((-1., 0.), (0.9, 0.), (1., 1.), (1.5, 1.), (2.7, 2.), (9., 2.)):
        assert all(torch.equal(v, field.at(layer)[k]) for k, v in field.at(t).items())


@pytest.mark.parametrize('kind', ['native', 'lipschitz'])
@pytest.mark.parametrize('rank', [0, 2])
@pytest.mark.parametrize('method', [*METHODS, 'dopri5'])
def test_every_method_and_number_of_steps_runs_and_gets_gradients(vit, images, kind, rank, method):
    model = converted(vit, OdeConfig(field=kind, time='low_rank', rank=rank, method=method, phases=2))
    for steps in (2, 3, 5):
        model.blocks.steps = steps
        model.zero_grad()
        model(images).square().sum().backward()
    grads = {n: p.grad for n, p in model.blocks.named_parameters()}
    assert all(g is not None for g in grads.values())


@pytest.mark.parametrize('kind', ['native', 'lipschitz'])
def test_the_residual_of_each_layer_learns(vit, images, kind):
    model = converted(vit, OdeConfig(field=kind, method='euler', time='low_rank', rank=2, init='mean'))
    model(images).square().sum().backward()
    field = model.blocks.shared
    for key, up in field.up.items():
        assert not up.any() and (up.grad.flatten(1).norm(dim=1) > 0).all(), key  # starts at 0 and can leave it
    for key, vectors in field.vectors.items():
        if 'qkv' not in key:  # the bias of the keys does nothing
            assert (vectors.grad.flatten(1).norm(dim=1) > 0).all(), key


def test_gradients_of_the_merged_weights(vit):
    field, _ = timed(vit, embed_dim=8, num_heads=2, depth=2)
    field.double()
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    names = [n for n, p in field.named_parameters() if p.numel() < 200]
    values = [dict(field.named_parameters())[n].detach().clone().requires_grad_() for n in names]

    def run(*given):
        return torch.func.functional_call(field, dict(zip(names, given, strict=True)), (0.3, x))
    assert torch.autograd.gradcheck(run, values, fast_mode=True)


def test_zero_residuals_are_the_autonomous_field_and_those_of_spectral_are_zero(vit, images):
    model = converted(vit, OdeConfig(field='lipschitz', method='euler', init='spectral', time='low_rank', rank=2))
    assert not any(p.any() for p in (*model.blocks.shared.vectors.values(), *model.blocks.shared.up.values()))
    model = vit()
    other = copy.deepcopy(model)
    convert_(model, OdeConfig(init='mean'))
    convert_(other, OdeConfig(time='low_rank', rank=2, init='mean'))
    for vectors in other.blocks.shared.vectors.values():
        torch.nn.init.zeros_(vectors)
    torch.testing.assert_close(other(images), model(images))


def test_full_rank_keeps_the_precision_of_the_weights(vit, images):
    model = vit().double()
    before = model(images.double())
    convert_(model, OdeConfig(time='low_rank', rank=32))
    torch.testing.assert_close(model(images.double()), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('rank', [2, 9])  # by a sketch, and whole
def test_data_weighted_residuals_serve_the_inputs_best(rank):
    """No residual of that rank leaves less of R x on the data: sum of the squared tail of the singular values of R C^1/2."""
    torch.manual_seed(1)
    R, x = torch.randn(20, 30), torch.randn(500, 30) @ torch.randn(30, 30)
    moment = x.T @ x / 500
    values, vectors = torch.linalg.eigh(moment)
    tail = torch.linalg.svdvals(R @ (vectors * values.clamp_min(0).sqrt()))[rank:].square().sum()
    up, down = factors(R, rank, moment)
    error = (x @ (R - up @ down).T).square().sum() / 500
    torch.testing.assert_close(error, tail, rtol=2e-2, atol=1e-3)
    plain = (x @ (R - torch.mm(*factors(R, rank, None))).T).square().sum() / 500
    assert error < 0.9 * plain


def test_input_moments_are_what_the_layers_see(vit, images):
    model, seen = vit(), []
    model.blocks[1].mlp.fc1.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    found = input_moments(model, dict(enumerate(model.blocks)), images)[1, 'block.mlp.fc1.weight']
    x = seen[0].flatten(0, 1)
    torch.testing.assert_close(found, x.T @ x / len(x))


def test_phases_own_their_layers(vit, images):
    model = converted(vit, OdeConfig(phases=3, time='low_rank'), depth=5)
    shared = model.blocks.shared
    assert isinstance(shared, PiecewiseField) and shared.which == (0, 0, 1, 2, 2)
    assert [field.layers for field in shared.fields] == [(0, 1), (2,), (3, 4)]
    assert [list(shared.fields).index(step.field) for step in model.blocks] == [0, 0, 1, 2, 2]
    model.blocks.steps = 10
    assert [list(shared.fields).index(step.field) for step in model.blocks] == [0] * 4 + [1] * 2 + [2] * 4
    assert model(images).shape == (2, 5)


@pytest.mark.parametrize('depth, steps, starts', [
    (12, 3, [0, 4, 8]), (12, 4, [0, 2, 4, 8]), (12, 5, [0, 2, 4, 6, 8]), (12, 7, [0, 4 / 3, 8 / 3, 4, 6, 8, 10]),
    (5, 4, [0, 1, 2, 3]), (5, 5, [0, 1, 2, 3, 4])])  # of 5 layers, the spans have 2, 1 and 2
@pytest.mark.parametrize('method', ['lie_trotter', 'dopri5'])
def test_no_step_crosses_the_border_of_two_spans(vit, depth, steps, starts, method):
    model = converted(vit, OdeConfig(phases=3, method=method, steps=steps), depth=depth)
    assert [step.t for step in model.blocks.solver] == pytest.approx(starts)
    assert [step.t + step.h for step in model.blocks.solver] == pytest.approx([*starts[1:], depth])


def test_a_part_of_a_model_has_the_steps_of_the_whole(vit, images):
    model = converted(vit, OdeConfig(phases=3, steps=4), depth=12)
    x = torch.randn(2, 17, 32)
    part = model.blocks[1:3]
    assert [(step.t, step.h) for step in part.solver] == [(2, 2), (4, 4)] and part.end == 8
    torch.testing.assert_close(model.blocks[3:](part(model.blocks[:1](x))), model.blocks(x), rtol=0, atol=0)


def test_fewer_steps_than_shared_blocks_are_refused(vit):
    with pytest.raises(ValueError, match='steps=2 are too few: each of the 3'):
        convert_(vit(), phases=3, steps=2)
    model = converted(vit, OdeConfig(phases=3))
    with pytest.raises(ValueError, match='too few'):
        model.blocks.steps = 2
    assert model.blocks.steps == 3


@pytest.fixture
def one_process():
    """A process group of FSDP2, of this process alone."""
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize('settings', [
    dict(phases=2), dict(phases=2, time='low_rank', rank=2), dict(phases=2, method='dopri5'),
    dict(field='lipschitz', phases=2), dict(field='lipschitz', method='dopri5')], ids=str)
def test_phases_that_are_sharded_have_the_same_gradients(vit, images, one_process, settings):
    model = converted(vit, OdeConfig(**settings))
    sharded = copy.deepcopy(model)
    for phase in sharded.blocks.shared.phases:
        fully_shard(phase)
    fully_shard(sharded)
    for each in (model, sharded):
        each(images).square().sum().backward()
    for expected, found in zip(model.parameters(), sharded.parameters()):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


def test_adaptive_methods_agree_with_many_steps_across_phases(vit):
    model = vit(depth=4).double()
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    convert_(model, OdeConfig(phases=2, time='low_rank', rank=2, method='dopri5', rtol=1e-8, atol=1e-8))
    adaptive = model.blocks(x)
    model.blocks.method = 'rk4'
    model.blocks.steps = 160
    torch.testing.assert_close(model.blocks(x), adaptive, rtol=1e-4, atol=1e-4)


def test_partial_conversion_keeps_the_other_blocks(vit, images):
    model = vit(depth=6)
    blocks = list(model.blocks)
    done = convert_(model, OdeConfig(blocks=(1, 3), time='low_rank', rank=2))
    assert 'blocks 1-3 -> 1 shared block' in str(done)
    assert len(model.blocks) == 6 and model.blocks[0] is blocks[0] and model.blocks[5] is blocks[5]
    model.blocks.steps = 5
    assert len(model.blocks) == 8 and model.blocks[6] is blocks[4]
    states = model.forward_intermediates(images)[1]
    assert len(states) == 8
    head = model.blocks[:4]
    assert len(head) == 4 and head[0] is blocks[0]
    assert len(model.blocks[6:]) == 2


def test_field_is_autonomous_in_integrate_too(vit):
    """The field of a model can be integrated on its own, with any method."""
    field, model = timed(vit)
    x = torch.randn(1, 17, 32)
    convert_(model, OdeConfig(time='low_rank', rank=2))
    torch.testing.assert_close(integrate(field, x, OdeConfig(steps=3, T=3.)), model.blocks(x))
    assert isinstance(field, TimeField) and isinstance(field.base, NativeField)


@pytest.mark.parametrize('change', [dict(phases=2), dict(rank=0), dict(time='autonomous', rank=0, init='mean'), dict(rank=4)])
def test_what_the_blocks_were_made_for_cannot_be_set(vit, images, change):
    model = converted(vit, OdeConfig(time='low_rank', rank=2))
    before, config = model(images), model.blocks.config
    with pytest.raises(ValueError, match='is fixed at conversion; got .*Convert the original model again'):
        model.blocks.config = replace(config, **change)
    assert model.blocks.config == config and torch.equal(model(images), before)


class Wrapped(torch.nn.Module):
    """As peft wraps a layer."""
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x)


def test_a_layer_may_be_wrapped_and_may_not_be_replaced(vit, images):
    model = converted(vit, OdeConfig(time='low_rank', rank=4))
    before = model(images)
    attn = model.blocks.shared.base.block.attn
    attn.qkv = Wrapped(attn.qkv)
    torch.testing.assert_close(model(images), before)
    attn.qkv = torch.nn.Sequential(attn.qkv.base_layer)
    with pytest.raises(RuntimeError, match=r'block.attn.qkv.bias, block.attn.qkv.weight: these parameters have residuals but are no'):
        model(images)


@pytest.mark.parametrize('steps, layers', [(2, [[0, 1], [2, 3]]), (8, [[0], [0], [1], [1], [2], [2], [3], [3]]), (1, [[0, 1, 2, 3]])])
def test_a_step_has_the_mean_over_its_layers(vit, images, steps, layers):
    model = converted(vit, OdeConfig(time='low_rank', rank=2, steps=steps), depth=4)
    field = model.blocks.shared
    for step, of in zip(model.blocks, layers, strict=True):
        found = field.at(step.t, interval=step.interval)
        for name, value in found.items():
            torch.testing.assert_close(value, torch.stack([field.at(float(layer))[name] for layer in of]).mean(0))
    expected = model(images)
    merge_(model)
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


def test_attention_maps_may_be_averaged(vit):
    model = converted(vit, OdeConfig(time='low_rank', rank=2, steps=2), depth=4)
    field, x = model.blocks.shared, torch.randn(1, 17, 32)
    base = _frozen(field, (2., 4.))
    torch.testing.assert_close(field.attention_map(2., x, (2., 4.)), base.attention_map(2., x))
    assert not torch.allclose(field.attention_map(2., x), base.attention_map(2., x), atol=1e-6)


@pytest.mark.parametrize('saved, now', [
    (dict(time='vectors', averaged=True, init='mean'), dict(time='low_rank', rank=0, init='mean')),
    (dict(time='low_rank', rank=2, averaged=False, adjoint=False, boundaries='uniform'), dict(time='low_rank', rank=2))], ids=str)
def test_settings_of_earlier_versions_load_from_folders_and_recipes(vit, images, tmp_path, saved, now):
    model = converted(vit, OdeConfig(**now))
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    config['model_args'].update({f'ode_{name}': value for name, value in saved.items()})
    (tmp_path / 'config.json').write_text(json.dumps(config))
    again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert again.blocks.config == model.blocks.config and torch.equal(again(images), model(images))
    stages = [{'task': 'trajectory', 'fit': {'epochs': 1}}]
    assert Recipe(ode=saved, stages=stages).config == OdeConfig(**now)
    for name, value in (('adjoint', True), ('boundaries', [1, 2])):
        with pytest.raises(ValueError, match=f'{name}=.* is no longer possible'):
            Recipe(ode={name: value}, stages=stages)
