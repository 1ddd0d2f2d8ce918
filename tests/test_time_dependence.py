import copy
import itertools
import json
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from timm_odevit import OdeConfig, StepwiseTask, calibrate_, convert_, integrate
from timm_odevit.convert.initialisation import build_field, factors
from timm_odevit.convert.measure import input_moments, layer_distances, similarity_boundaries, split
from timm_odevit.data.arrays import array_images
from timm_odevit.ode.fields import NativeField
from timm_odevit.ode.steps import METHODS
from timm_odevit.ode.time_dependence import PhasedField, TimeField
from timm_odevit.training import budget
from timm_odevit.training.budget import Stream


def timed(vit, rank=2, **kwargs):
    model = vit(**kwargs)
    return build_field(OdeConfig(time='low_rank', rank=rank), list(model.blocks)), model


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


def test_between_layers_everything_is_linear_in_t_and_constant_outside(vit):
    field, _ = timed(vit)
    a, b = field.at(1.), field.at(2.)
    for share in (0.25, 0.5):
        for name, value in field.at(1. + share).items():
            torch.testing.assert_close(value, torch.lerp(a[name], b[name], share))
    for t, layer in ((-1., 0.), (2.7, 2.), (9., 2.)):
        assert all(torch.equal(v, field.at(layer)[k]) for k, v in field.at(t).items())


@pytest.mark.parametrize('kind', ['native', 'lipschitz'])
@pytest.mark.parametrize('time', ['vectors', 'low_rank'])
@pytest.mark.parametrize('method', [*METHODS, 'dopri5'])
def test_every_method_and_number_of_steps_runs_and_gets_gradients(vit, images, kind, time, method):
    model = vit()
    convert_(model, OdeConfig(field=kind, time=time, rank=2 if time == 'low_rank' else 0, method=method, phases=2))
    for steps in (1, 3, 5):
        model.blocks.steps = steps
        model.zero_grad()
        model(images).square().sum().backward()
    grads = {n: p.grad for n, p in model.blocks.named_parameters()}
    assert all(g is not None for g in grads.values())


@pytest.mark.parametrize('kind', ['native', 'lipschitz'])
def test_the_residual_of_each_layer_learns(vit, images, kind):
    model = vit()
    convert_(model, OdeConfig(field=kind, method='euler', time='low_rank', rank=2, init='mean'))
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


def test_zero_residuals_are_the_autonomous_field(vit, images):
    model, other = vit(), None
    other = copy.deepcopy(model)
    convert_(model, OdeConfig(init='mean'))
    convert_(other, OdeConfig(time='low_rank', rank=2, init='mean'))
    for vectors in other.blocks.shared.vectors.values():
        torch.nn.init.zeros_(vectors)
    torch.testing.assert_close(other(images), model(images))


def test_spectral_has_no_residuals(vit):
    model = vit()
    convert_(model, OdeConfig(field='lipschitz', method='euler', init='spectral', time='low_rank', rank=2))
    field = model.blocks.shared
    assert not any(p.any() for p in (*field.vectors.values(), *field.up.values()))


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
    found = input_moments(model, list(model.blocks), images)[1, 'block.mlp.fc1.weight']
    x = seen[0].flatten(0, 1)
    torch.testing.assert_close(found, x.T @ x / len(x))


def test_phases_own_their_layers(vit, images):
    model = vit(depth=6)
    done = convert_(model, OdeConfig(boundaries=(2, 5), time='vectors'))
    shared = model.blocks.shared
    assert isinstance(shared, PhasedField) and shared.assignment == (0, 0, 1, 1, 1, 2)
    assert [field.layers for field in shared.fields] == [(0, 1), (2, 3, 4), (5,)]
    assert [step.field is shared.fields[i] for step, i in zip(model.blocks, (0, 0, 1, 1, 1, 2), strict=True)] == [True] * 6
    assert '3 shared blocks' in str(done) and 'phases from layers 0, 2, 5' in str(done)
    model.blocks.steps = 12
    assert [shared.fields.index(step.field) if hasattr(shared.fields, 'index') else list(shared.fields).index(step.field)
            for step in model.blocks] == [0] * 4 + [1] * 6 + [2] * 2
    assert model(images).shape == (2, 5)


def test_adaptive_methods_agree_with_many_steps_across_phases(vit):
    model = vit(depth=4).double()
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    convert_(model, OdeConfig(phases=2, time='low_rank', rank=2, method='dopri5', rtol=1e-8, atol=1e-8))
    adaptive = model.blocks(x)
    model.blocks.method = 'rk4'
    model.blocks.steps = 160
    torch.testing.assert_close(model.blocks(x), adaptive, rtol=1e-4, atol=1e-4)


def test_split_is_the_best_split():
    torch.manual_seed(3)
    d = torch.rand(8, 8)
    d = d + d.T

    def cost(cuts):
        bounds = [0, *cuts, 8]
        return sum(float(d[a:b, a:b].triu(1).sum()) for a, b in itertools.pairwise(bounds))
    for spans in range(1, 9):
        best = min(itertools.combinations(range(1, 8), spans - 1), key=cost)
        assert cost(split(d, spans)) == pytest.approx(cost(best))


def test_similarity_finds_the_span_of_equal_layers(vit, images):
    model = vit(depth=6)
    with torch.no_grad():
        for block in model.blocks[:4]:  # hardly moves the state
            for p in (block.attn.proj.weight, block.attn.proj.bias, block.mlp.fc2.weight, block.mlp.fc2.bias):
                p.mul_(1e-3)
        for block in model.blocks[4:]:
            block.mlp.fc2.weight.mul_(20)
    assert layer_distances(model, list(model.blocks), images)[0, 3] < 0.01
    assert similarity_boundaries(model, list(model.blocks), images, 2) == [4]
    done = convert_(model, OdeConfig(phases=2, boundaries='similarity'), images=images)
    assert done.config.boundaries == (4,)


def test_partial_conversion_keeps_the_other_blocks(vit, images, tmp_path):
    model = vit(depth=6)
    before, keys, blocks = model(images), list(model.state_dict()), list(model.blocks)
    done = convert_(model, OdeConfig(blocks=(1, 3), phases=3))
    assert torch.equal(model(images), before)
    assert len(model.blocks) == 6 and model.blocks[0] is blocks[0] and model.blocks[5] is blocks[5]
    assert len(model.forward_intermediates(images)[1]) == 6
    done.restore()
    assert list(model.state_dict()) == keys and torch.equal(model(images), before)
    done = convert_(model, OdeConfig(blocks=(1, 3), time='low_rank', rank=2))
    assert 'blocks 1-3 -> 1 shared block' in str(done)
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


def test_calibration_brings_the_student_to_the_teacher(vit, images):
    teacher = vit(depth=4)
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(time='low_rank', rank=4))
    frozen = {n: p.clone() for n, p in student.named_parameters() if 'blocks' not in n}
    data = torch.randn(32, 3, 16, 16)
    student.train()
    student.head.requires_grad_(False)

    def error():
        with torch.no_grad():
            return (student(data) - teacher(data)).square().mean().item()
    before = error()
    history = calibrate_(student, teacher, data, epochs=(12, 6), batch_size=8, lr=1e-2, unrolled_lr=3e-3, progress=False)
    assert len(history) == 18 and history[11]['loss'] < 0.8 * history[0]['loss']
    assert error() < 0.5 * before
    assert all(torch.equal(p, frozen[n]) for n, p in student.named_parameters() if n in frozen)
    assert student.training and not student.head.weight.requires_grad and student.patch_embed.proj.weight.requires_grad


def test_a_teacher_calibrates_itself_without_error(vit):
    from timm_odevit import StepwiseTask
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(phases=3))
    task = StepwiseTask(student, teacher, verbose=False)
    assert task(torch.randn(2, 3, 16, 16))['loss'].item() < 1e-9
    student.blocks.steps = 6  # half a layer a step: the teacher's state in between is interpolated
    assert 0 < task(torch.randn(2, 3, 16, 16))['loss'].item() < 1


def test_calibration_can_be_interrupted_and_resumed(vit, tmp_path):
    teacher = vit()
    data = torch.randn(16, 3, 16, 16)

    def start():
        student = copy.deepcopy(teacher).requires_grad_(True)
        convert_(student, OdeConfig(time='low_rank', rank=2))
        return student
    options = dict(batch_size=8, lr=1e-3, progress=False, resume=True)
    whole = start()
    calibrate_(whole, teacher, data, epochs=(2, 1), out=tmp_path / 'a', **options)
    again = start()
    calibrate_(again, teacher, data, epochs=(2, 0), out=tmp_path / 'b', **options)
    again = start()  # as after a crash
    calibrate_(again, teacher, data, epochs=(2, 1), out=tmp_path / 'b', **options)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


GOOD = torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize('images, options, message', [
    (GOOD, dict(epochs=(0, 0)), 'epochs must be two whole numbers'),
    (GOOD, dict(epochs=3), 'epochs must be two whole numbers'),
    (GOOD, dict(batch_size=0), 'batch_size must be a whole number of at least 1; got 0'),
    (torch.randn(3, 16, 16), {}, r'got torch.float32 \[3, 16, 16\]'),
    (torch.zeros(4, 3, 16, 16, dtype=torch.uint8), {}, r'got torch.uint8 \[4, 3, 16, 16\]'),
    (torch.empty(0, 3, 16, 16), {}, r'got torch.float32 \[0, 3, 16, 16\]'),
    (torch.full((4, 3, 16, 16), float('nan')), {}, 'images must be finite'),
    (GOOD.numpy(), {}, 'or a loader with a length; got ndarray'),
])
def test_calibration_refuses_and_leaves_both_models_alone(vit, images, options, message):
    teacher = vit().train()
    student = copy.deepcopy(teacher)
    convert_(student)
    with pytest.raises(ValueError, match=message):
        calibrate_(student, teacher, images, progress=False, **options)
    assert teacher.training and student.training
    assert all(p.requires_grad for p in (*teacher.parameters(), *student.parameters()))


def test_calibration_refuses_another_teacher(vit):
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student)
    for other, message in ((vit(embed_dim=64), 'was not converted from this teacher: cls_token is'),
                           (vit(depth=5), 'the teacher has 5 layers'), (copy.deepcopy(student), 'The teacher is itself converted'),
                           (student, 'share parameters'),
                           ('vit_tiny_patch16_224', 'The teacher must be a model; got str')):
        with pytest.raises((TypeError, ValueError), match=message):
            calibrate_(student, other, GOOD, progress=False)
    with pytest.raises(TypeError, match='this VisionTransformer is not one. Call convert_ first'):
        calibrate_(teacher, teacher, GOOD)
    shorter = copy.deepcopy(teacher)
    convert_(shorter, OdeConfig(T=2.))
    with pytest.raises(ValueError, match='the steps do not end at its states. Convert with T=None'):
        calibrate_(shorter, teacher, GOOD, progress=False)


def test_calibration_in_its_second_part_takes_no_more_epochs_of_the_first(vit, tmp_path):
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student)
    options = dict(batch_size=2, progress=False, out=tmp_path)
    calibrate_(student, teacher, GOOD, epochs=(1, 1), **options)
    with pytest.raises(ValueError, match='already holds a run'):
        calibrate_(student, teacher, GOOD, epochs=(1, 1), **options)
    with pytest.raises(ValueError, match='has already started unrolled training after fewer stepwise epochs'):
        calibrate_(student, teacher, GOOD, epochs=(2, 1), resume=True, **options)
    calibrate_(student, teacher, GOOD, epochs=(1, 2), resume=True, **options)


@pytest.mark.parametrize('change', [dict(phases=2), dict(time='vectors', rank=0, init='mean'), dict(rank=4)])
def test_what_the_blocks_were_made_for_cannot_be_set(vit, images, change):
    model = vit()
    convert_(model, OdeConfig(time='low_rank', rank=2))
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
    model = vit()
    convert_(model, OdeConfig(time='low_rank', rank=4))
    before = model(images)
    attn = model.blocks.shared.base.block.attn
    attn.qkv = Wrapped(attn.qkv)
    torch.testing.assert_close(model(images), before)
    attn.qkv = torch.nn.Sequential(attn.qkv.base_layer)
    with pytest.raises(RuntimeError, match=r'block.attn.qkv.bias, block.attn.qkv.weight: these parameters have residuals but are no'):
        model(images)


# --- calibration for some minutes ---

def test_minutes_are_spent_on_both_parts(vit, tmp_path, monkeypatch):
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(time='low_rank', rank=2))
    data = torch.randn(20, 3, 16, 16)
    ticks = itertools.count()  # a clock on which a tenth of a second passes between two looks at it: 23 updates each
    monkeypatch.setattr(budget, 'time', SimpleNamespace(perf_counter=lambda: next(ticks) / 10))
    history = calibrate_(student, teacher, data, minutes=0.1, batch_size=8, progress=False, out=tmp_path)
    plan = json.loads((tmp_path / 'plan.json').read_text())
    assert plan['minutes'] == 0.1 and plan['updates'] == [20, 20] and plan['share'] == 1. and len(history) == 20
    assert history[0]['loss'] > history[9]['loss'] and 'kd_loss' in history[10]
    again = copy.deepcopy(teacher)  # as after a crash
    convert_(again, OdeConfig(time='low_rank', rank=2))
    calibrate_(again, teacher, data, minutes=0.1, batch_size=8, progress=False, out=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), again.parameters()))
    for wrong, message in ((dict(minutes=1.), 'was calibrated with minutes=0.1, but this call has minutes=1'),
                           (dict(epochs=(1, 1)), r'but this call has epochs=\(1, 1\)'), (dict(resume=False), 'already holds')):
        with pytest.raises(ValueError, match=message):
            calibrate_(again, teacher, data, batch_size=8, out=tmp_path, **{**dict(resume=True, minutes=0.1), **wrong} if
                       'epochs' not in wrong else dict(resume=True, **wrong))
    with pytest.raises(ValueError, match='Give minutes or epochs, not both'):
        calibrate_(again, teacher, data, minutes=1., epochs=(1, 1))


def test_a_student_that_has_little_to_learn_learns_slowly(vit, tmp_path):
    teacher, data = vit(), torch.randn(8, 3, 16, 16)
    settings = dict(epochs=(1, 1), batch_size=4, progress=False)

    def rates(name, config, **chosen):
        student = copy.deepcopy(teacher)
        convert_(student, config, images=data if config.rank else None)
        history = calibrate_(student, teacher, data, out=tmp_path / name, **settings, **chosen)
        return json.loads((tmp_path / name / 'plan.json').read_text())['share'], [record['lr'] for record in history]
    whole, first = rates('small', OdeConfig())
    share, second = rates('large', OdeConfig(time='low_rank', rank=15, init='svd_data'))
    assert whole == 1. and 0. < share < 0.5
    assert second == pytest.approx([share * lr for lr in first], rel=0.02)  # the schedule ends at 1e-6
    assert rates('exact', OdeConfig(phases=3))[0] < 1e-9
    assert rates('given', OdeConfig(time='low_rank', rank=15, init='svd_data'), lr=3e-3, unrolled_lr=1e-3) == (1., first)
    (tmp_path / 'large' / 'unrolled' / 'last.pt').unlink()  # as if interrupted: it goes on with the same share
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(time='low_rank', rank=2))
    with pytest.raises(ValueError, match='holds another model'):
        calibrate_(student, teacher, data, out=tmp_path / 'large', resume=True, **settings)
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(time='low_rank', rank=15, init='svd_data'), images=data)
    history = calibrate_(student, teacher, data, out=tmp_path / 'large', resume=True, **settings)
    assert [record['lr'] for record in history] == second


def test_a_run_for_epochs_is_not_resumed_for_minutes(vit, tmp_path):
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student)
    calibrate_(student, teacher, GOOD, epochs=(1, 0), batch_size=2, progress=False, out=tmp_path)
    with pytest.raises(ValueError, match='was calibrated with epochs, but this call has minutes=0.05'):
        calibrate_(student, teacher, GOOD, minutes=0.05, progress=False, out=tmp_path, resume=True)


def test_a_stream_gives_all_batches_before_any_comes_again():
    stream = Stream(list(range(5)), 3)
    assert [list(stream) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert list(Stream([], 3)) == [] and len(stream) == 3


@pytest.mark.parametrize('kind', ['tensor', 'loader', 'augmented'])
def test_a_calibration_in_minutes_that_is_interrupted_goes_on_with_the_batches_that_are_due(vit, tmp_path, monkeypatch, kind):
    teacher = vit()
    start = copy.deepcopy(teacher)
    convert_(start)
    images = torch.randn(28, 3, 16, 16)
    if kind == 'loader':
        images = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=4, shuffle=True)
    if kind == 'augmented':
        np.savez(tmp_path / 'd.npz', x_train=np.random.default_rng(0).integers(0, 255, (32, 16, 16, 3), np.uint8))
        images = array_images(tmp_path / 'd.npz', teacher, batch_size=4)[0]
    monkeypatch.setattr('timm_odevit.training.calibrate.updates_in', lambda *args: [20, 20])  # of 7 batches in each pass
    settings = dict(minutes=1., batch_size=4, progress=False, lr=1e-3, unrolled_lr=1e-3)
    whole, interrupted = copy.deepcopy(start), copy.deepcopy(start)
    calibrate_(whole, teacher, images, **settings)
    calls, forward = [], StepwiseTask.forward

    def stop(task, *args):
        calls.append(None)
        if len(calls) == 12:  # in the middle of the second pass, and of an epoch
            raise KeyboardInterrupt
        return forward(task, *args)
    monkeypatch.setattr(StepwiseTask, 'forward', stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate_(interrupted, teacher, images, out=tmp_path / 'run', **settings)
    torch.rand(7)  # as any other program would
    resumed = copy.deepcopy(start)
    calibrate_(resumed, teacher, images, out=tmp_path / 'run', resume=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True))


def test_no_time_is_one_update_of_each_part_and_what_does_not_fit_is_refused_first(vit):
    teacher = vit(num_classes=0)
    student = copy.deepcopy(teacher)
    convert_(student)
    before = [p.clone() for p in student.parameters()]
    history = calibrate_(student, teacher, GOOD, minutes=1e-9, progress=False)
    assert [sorted(record) for record in history] == [['epoch', 'loss', 'lr', 'seconds'], sorted(history[1])]
    assert not all(torch.equal(a, b) for a, b in zip(before, student.parameters()))
    shorter = copy.deepcopy(teacher)
    convert_(shorter, OdeConfig(T=2.))
    before = [p.clone() for p in shorter.parameters()]
    with pytest.raises(ValueError, match='the steps do not end at its states'):
        calibrate_(shorter, teacher, GOOD, minutes=1., progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, shorter.parameters()))


def test_a_calibration_is_resumed_only_with_the_same_models_and_images(vit, tmp_path):
    def pair(seed):
        torch.manual_seed(seed)
        teacher = vit()
        student = copy.deepcopy(teacher)
        convert_(student)
        return student, teacher
    (student, teacher), (other, others_teacher) = pair(0), pair(1)
    settings = dict(out=tmp_path, batch_size=2, progress=False)
    calibrate_(student, teacher, GOOD, epochs=(2, 1), **settings)
    before = copy.deepcopy(other.state_dict())
    for wrong, name in (((other, others_teacher, GOOD), 'student'), ((student, others_teacher, GOOD), 'teacher'),
                        ((student, teacher, GOOD + 1), 'images'), ((student, teacher, GOOD[:-1]), 'images'),
                        ((student, teacher, [GOOD[:2], GOOD[2:]]), 'images')):
        with pytest.raises(ValueError, match=f'was made with {name} sha256 .*Resume with what the first run had'):
            calibrate_(*wrong, epochs=(2, 2), resume=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), other.state_dict().values(), strict=True))
    assert len(calibrate_(student, teacher, GOOD, epochs=(2, 2), resume=True, **settings)) == 4  # though it has learned
    plan = json.loads((tmp_path / 'plan.json').read_text())
    (tmp_path / 'plan.json').write_text(json.dumps({'minutes': None, 'updates': None}))  # of an earlier version
    assert len(calibrate_(student, teacher, GOOD, epochs=(2, 3), resume=True, **settings)) == 5
    (tmp_path / 'plan.json').write_text(json.dumps(plan))
    shutil.rmtree(tmp_path / 'stepwise')
    shutil.rmtree(tmp_path / 'unrolled')  # as if interrupted in the first epoch
    with pytest.raises(ValueError, match='was calibrated with epochs, but this call has minutes=0.01'):
        calibrate_(student, teacher, GOOD, minutes=0.01, resume=True, **settings)


def test_an_exact_student_takes_no_time(vit, tmp_path):
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(phases=3))
    started = time.perf_counter()
    assert calibrate_(student, teacher, GOOD, minutes=1., batch_size=2, progress=False, out=tmp_path) == []
    assert calibrate_(student, teacher, GOOD, minutes=1., batch_size=2, progress=False, out=tmp_path, resume=True) == []
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize('images, options, error, message', [
    (torch.randn(4, 3, 24, 24), {}, ValueError, r'The first batch of train_loader \(images torch.float32 \[2, 3, 24, 24\]'),
    (torch.randn(4, 1, 16, 16), {}, ValueError, 'does not fit the model'),
    (torch.randn(4, 3, 16, 16).double(), {}, ValueError, 'does not fit the model'),
])
def test_images_that_do_not_fit_are_named(vit, images, options, error, message):
    teacher = vit()
    student = copy.deepcopy(teacher)
    convert_(student)
    with pytest.raises(error, match=message):
        calibrate_(student, teacher, images, epochs=(1, 1), batch_size=2, progress=False, **options)


def test_calibration_moves_images_to_the_device_and_takes_any_seed(vit, monkeypatch):
    teacher = vit().to(torch.bfloat16)
    student = copy.deepcopy(teacher)
    convert_(student)
    settings = dict(epochs=(1, 0), batch_size=2, progress=False)
    calibrate_(student, teacher, GOOD, amp='bfloat16', seed=-1, **settings)  # float32 images
    calibrate_(student, teacher, GOOD, amp='bfloat16', seed=2 ** 40, **settings)
    on_meta, others = copy.deepcopy(student).to('meta'), copy.deepcopy(teacher).to('meta')
    seen = []
    monkeypatch.setattr(StepwiseTask, 'forward', lambda self, images, target=None: seen.append(images.device.type) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate_(on_meta, others, GOOD, **settings)
    assert seen == ['meta']


def test_each_pass_over_an_array_has_an_order_of_its_own(vit, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / 'd.npz', x_train=rng.integers(0, 255, (20, 16, 16, 3), np.uint8))
    teacher, seen = vit(), []

    def orders(seed, **settings):
        student = copy.deepcopy(teacher)
        convert_(student)
        loader = array_images(tmp_path / 'd.npz', teacher, batch_size=8, seed=seed)[0]
        indices = loader.indices
        loader.indices = lambda: [seen.append(index.tolist()) or index for index in indices()]
        seen.clear()
        calibrate_(student, teacher, loader, progress=False, lr=1e-3, unrolled_lr=1e-3, **settings)
        return [tuple(batch) for batch in seen]
    first, other = orders(0, epochs=(3, 1)), orders(1, epochs=(3, 1))
    assert len(set(first)) == 6 and first[6:8] == first[:2] and set(first).isdisjoint(other)
    assert len({i for batch in first for i in batch}) == 18  # all but those that are held out
    stream = Stream(array_images(tmp_path / 'd.npz', teacher, batch_size=8)[0], 3)
    batches = [*stream, *stream]
    assert not torch.equal(batches[0][0], batches[2][0]) and stream.passes == 3
    late = Stream(stream.loader, 3)
    late.set_epoch(4)  # 12 batches before, 2 in each pass
    next(iter(late))
    assert stream.loader.epoch == 6 and late.passes == 7
