import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import converted
from torch.distributed.fsdp import fully_shard

from timm_odevit import OdeConfig, convert_
from timm_odevit.ode.fields import FIELDS, PiecewiseField
from timm_odevit.ode.methods import METHODS


def test_phases_own_their_layers(vit, images):
    model = vit(depth=5)
    layers = [block.mlp.fc1.weight for block in model.blocks]
    convert_(model, phases=3)
    shared = model.blocks.shared
    assert isinstance(shared, PiecewiseField) and shared.which == (0, 0, 1, 2, 2)
    for phase, own in zip(shared.phases, (layers[:2], layers[2:3], layers[3:]), strict=True):
        torch.testing.assert_close(phase.block.mlp.fc1.weight, torch.stack(own).mean(0))
    assert [list(shared.fields).index(step.field) for step in model.blocks] == [0, 0, 1, 2, 2]
    model.blocks.steps = 10
    assert [list(shared.fields).index(step.field) for step in model.blocks] == [0] * 4 + [1] * 2 + [2] * 4
    assert model(images).shape == (2, 5)


def test_from_one_border_to_the_next_one_block_is_at_work(vit):
    field = converted(vit, OdeConfig(phases=2), depth=4).blocks.shared
    x = torch.randn(1, 17, 32)
    for t, phase in ((-1., 0), (0., 0), (1.9, 0), (2. - 1e-9, 1), (torch.tensor(2.), 1), (3.5, 1), (9., 1)):
        assert field.select(t) is field.fields[phase] and torch.equal(field(t, x), field.fields[phase](t, x))


@pytest.mark.parametrize('kind', FIELDS)
@pytest.mark.parametrize('method', [*METHODS, 'dopri5'])
def test_every_method_and_number_of_steps_runs_and_gets_gradients(vit, images, kind, method):
    model = converted(vit, OdeConfig(field=kind, method=method, phases=2))
    for steps in (2, 3, 5):
        model.blocks.steps = steps
        model.zero_grad()
        model(images).square().sum().backward()
        assert all(p.grad is not None for p in model.blocks.parameters())


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
    dict(phases=2), dict(phases=2, method='dopri5'), dict(field='lipschitz', phases=2),
    dict(field='lipschitz', method='dopri5')], ids=str)
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
    convert_(model, OdeConfig(phases=2, method='dopri5', rtol=1e-8, atol=1e-8))
    adaptive = model.blocks(x)
    model.blocks.method = 'rk4'
    model.blocks.steps = 160
    torch.testing.assert_close(model.blocks(x), adaptive, rtol=1e-4, atol=1e-4)


def test_partial_conversion_keeps_the_other_blocks(vit, images):
    model = vit(depth=6)
    blocks = list(model.blocks)
    assert 'blocks 1-3 -> 2 shared blocks' in str(convert_(model, OdeConfig(blocks=(1, 3), phases=2)))
    assert len(model.blocks) == 6 and model.blocks[0] is blocks[0] and model.blocks[5] is blocks[5]
    model.blocks.steps = 5
    assert len(model.blocks) == 8 and model.blocks[6] is blocks[4]
    assert len(model.forward_intermediates(images)[1]) == 8
    head = model.blocks[:4]
    assert len(head) == 4 and head[0] is blocks[0]
    assert len(model.blocks[6:]) == len(model.blocks[1:3]) == 2


@pytest.mark.parametrize('change', [dict(phases=2), dict(phases=1), dict(field='lipschitz'), dict(blocks=(0, 1)), dict(init='spectral')], ids=str)
def test_what_the_blocks_were_made_for_cannot_be_set(vit, images, change):
    model = converted(vit, OdeConfig(phases=3))
    before, config = model(images), model.blocks.config
    with pytest.raises(ValueError, match='is fixed at conversion; got .*Convert the original model again'):
        model.blocks.config = replace(config, **change)
    assert model.blocks.config == config and torch.equal(model(images), before)
