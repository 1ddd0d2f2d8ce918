"""What the dynamics do: known answers, and the same measures on ODE-ViTs and on ordinary ViTs."""
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

from timm_odevit import OdeConfig, convert_
from timm_odevit.dynamics.flow import Flow, follow
from timm_odevit.dynamics.precision import discretisation_errors
from timm_odevit.dynamics.stability import lipschitz_constants, log_softmax_bound, lyapunov_exponents, spectral_norms
from timm_odevit.dynamics.trajectories import (
    attention_maps,
    attention_over_time,
    class_over_time,
    trajectory_geometry,
)


def linear(matrix, steps=40, h=0.1):
    """The flow of dx/dt = A x, exactly."""
    start = torch.randn(3, len(matrix), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    each = torch.matrix_exp(torch.as_tensor(matrix, dtype=torch.float64) * h).T
    return Flow(start, tuple([lambda x: x @ each] * steps), tuple(h * i for i in range(steps + 1)))


def rotated(values, spin=0.):
    """A matrix with these eigenvalues in a rotated basis; with spin, plus a rotation, which changes no exponent of 0."""
    whole = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    turn = torch.linalg.qr(whole)[0]
    return turn @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ turn.T + spin * (whole - whole.T)


def ode(model, **settings):
    return convert_(model, **settings).model


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def teacher_and_twin(vit):
    teacher, twin = vit(), vit()
    twin.load_state_dict(teacher.state_dict())
    return teacher, twin


# --- exponents ---

@pytest.mark.parametrize(('values', 'spin'), [((0.5, 0.2, -0.1, -0.3), 0.), ((-0.2, -0.4, -0.9, -1.5), 0.), ((2., 1.5, 1., 0.5), 0.), ((0., 0., 0., 0.), 0.), ((0., 0., 0., 0.), 1.)])
def test_the_exponents_of_a_linear_field_are_its_spectrum(values, spin):
    found = lyapunov_exponents(linear(rotated(values, spin), steps=100), count=4)
    assert torch.allclose(found.values, torch.tensor(values, dtype=torch.float64).expand(3, 4), atol=1e-3)
    assert found.drift.max() < 1e-3 and found.reasons == (None,) * 3
    assert found.running.shape == (3, 100, 4) and torch.allclose(found.times[-1], torch.tensor(10., dtype=torch.float64))


def test_directions_that_grow_late_are_found_by_the_sweeps():
    # the whole map is diag(8, 1/2): a tangent vector that grows most at first is not the one that grows most in the end
    maps = [lambda x: x * torch.tensor([0.5, 2.])] * 2 + [lambda x: x * torch.tensor([16., 1 / 16])] * 2
    flow = Flow(torch.ones(1, 2), tuple(maps), (0., 1., 2., 3., 4.))
    whole = math.log(0.5 * 0.5 * 16 * 16) / 4
    assert float(lyapunov_exponents(flow).values) == pytest.approx(whole, abs=1e-4)
    assert 'not settled' in str(lyapunov_exponents(flow, sweeps=1)) and 'not settled' not in str(lyapunov_exponents(flow))


def test_the_exponents_of_the_lorenz_system():
    A = torch.tensor([[-10., 10., 0.], [28., -1., 0.], [0., 0., -8 / 3]], dtype=torch.float64)
    B = torch.tensor([[0., 0., 0.], [0., -1., 0.], [0., 0., 1.]], dtype=torch.float64)

    def field(x):
        return x @ A.T + x[:, :1] * x[:, [0, 2, 1]] @ B.T

    def step(x, h=0.05):
        k1 = field(x)
        k2 = field(x + h / 2 * k1)
        k3 = field(x + h / 2 * k2)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + field(x + h * k3))
    x = torch.randn(512, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(300):
        x = step(x)
    found = lyapunov_exponents(Flow(x, (step,) * 500, tuple(0.05 * i for i in range(501))), count=2, sweeps=0)
    first, second = found.values.mean(0).tolist()
    assert first == pytest.approx(0.906, abs=0.05) and second == pytest.approx(0., abs=0.05)
    assert found.drift[:, 0].mean() > 0.01  # of a single path, it has not settled in 25 units of time


def test_a_flow_that_diverges_or_stands_still_has_no_exponents_but_a_reason():
    found = lyapunov_exponents(Flow(torch.tensor([[1.], [0.]]), (lambda x: x * 1e30,) * 3, (0., 1., 2., 3.)), sweeps=0)
    assert found.values.isnan()[0] and 'not finite at t = 2' in found.reasons[0]
    still = lyapunov_exponents(Flow(torch.ones(2, 3), (lambda x: 0 * x,), (0., 1.)))
    assert still.values.isnan().all() and still.reasons == ('the state or its tangent vectors vanish or are not finite at t = 1',) * 2
    assert 'none for 2: the state or its tangent vectors vanish' in repr(still)


@pytest.mark.parametrize('method', ['lie_trotter', 'euler', 'rk4'])
def test_the_largest_exponent_is_that_of_the_deployed_map(vit, images, method):
    model, images = vit(img_size=8).double().eval(), images[..., :8, :8].double()
    convert_(model, phases=2, method=method)
    model.blocks.steps = 4
    with follow(model, images[:1]) as flow:
        def whole(x):
            out = model.blocks(x.view_as(flow.start))
            return (out - out.mean(-1, keepdim=True)).flatten()  # LayerNorm does not see the mean
        sigma = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(whole, flow.start.flatten()), ord=2)
    found = lyapunov_exponents(model, images[:1])
    assert float(found.values) == pytest.approx(math.log(sigma) / 3, abs=1e-3) and found.residual <= 1e-4
    few = lyapunov_exponents(model, images[:1], sweeps=2)
    assert few.residual > 1e-4 and '1 not settled: raise sweeps' in repr(few)


def test_the_class_token_alone(vit, images):
    model = vit().double().eval()
    with follow(model, images[:1].double()) as flow:
        x, total = flow.start, torch.eye(flow.start.shape[-1], dtype=torch.float64)
        for step in flow.maps:
            whole = torch.autograd.functional.jacobian(lambda v, x=x, step=step: step(torch.cat([v[None, None], x[:, 1:]], 1))[0, 0], x[0, 0])
            total, x = whole @ total, step(x)
    total = total - total.mean(dim=0)  # LayerNorm does not see the mean
    found = lyapunov_exponents(model, images[:1].double(), tokens='class', count=2)
    assert torch.allclose(found.values[0], torch.linalg.svdvals(total)[:2].log() / 3, atol=1e-3)
    assert lyapunov_exponents(vit(use_naflex=True, depth=1), images[:1], tokens='class', count=60).values.shape == (1, 32)


@pytest.mark.parametrize('tokens', ['all', 'class'])
def test_what_a_layer_norm_does_not_see_is_left_out(tokens):
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    flow = Flow(x, (lambda x: x - 0.1 * (x - x.mean(-1, keepdim=True)),) * 4, (0., 1., 2., 3., 4.), class_token=True)
    assert lyapunov_exponents(flow, tokens=tokens).values == pytest.approx(math.log(0.9), abs=1e-4)
    seen = replace(flow, maps=(lambda x: x - 0.1 * x + 0.5 * x.mean(-1, keepdim=True),) * 4)  # the mean grows
    assert lyapunov_exponents(seen, tokens=tokens).values == pytest.approx(math.log(1.4), abs=1e-4)


@pytest.mark.parametrize('start', ['constant', 'not finite', 'random'])
def test_a_mean_that_grows_slowly_in_each_step_is_not_left_out(start):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    if start == 'constant':
        x[0] = 1.
    if start == 'not finite':
        x[0, 0, 0] = math.nan
    def step(x):  # the mean grows at a rate of 1, what is left of the channels decays at as much
        return x + 0.01 * (2 * x.mean(-1, keepdim=True) - x)
    found = lyapunov_exponents(Flow(x, (step,) * 100, tuple(i / 100 for i in range(101)))).values[:, 0]
    assert found[1] == pytest.approx(1., abs=0.02) and (start == 'not finite') == bool(found[0].isnan())


def test_exponents_that_are_close_come_in_order():
    values = (0.055, 0.05, 0.045, *np.linspace(0.03, -0.1, 37))
    for seed in range(3):
        found = lyapunov_exponents(linear(rotated(values), steps=12, h=1.), count=2, sweeps=1000, seed=seed).values
        assert (found[:, 0] > found[:, 1]).all() and found[:, 0] == pytest.approx(0.055, abs=1e-3)


# --- Lipschitz ---

def test_the_lipschitz_constants_are_those_of_the_jacobian(vit, images):
    model, images = vit(img_size=8).double().eval(), images[:1, :, :8, :8].double()
    field = lipschitz_constants(model, images, iterations=80).values
    with follow(model, images) as flow:
        for k, (step, x) in enumerate(zip(flow.maps, flow.states(), strict=False)):
            J = torch.autograd.functional.jacobian(lambda v, step=step, x=x: step(v.view_as(x)).flatten(), x.flatten())
            assert float(field[0, k]) == pytest.approx(float(torch.linalg.svdvals(J - torch.eye(len(J)))[0]), rel=1e-3)


def test_g_1_bounds_the_eigenvalues_of_the_softmax_jacobian(vit, images):
    p = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(2).softmax(-1)
    eigenvalues = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None])
    assert (log_softmax_bound(p).exp() >= eigenvalues[:, -1] - 1e-12).all()
    two = torch.tensor([0.5, 0.5])
    assert float(log_softmax_bound(two).exp()) == pytest.approx(0.5)  # the Jacobian's eigenvalue, exactly
    found = attention_over_time(vit().eval(), images).softmax_bound
    assert found.shape == (3, 3, 2) and 0 < found.min() and found.max() <= 0.5


@pytest.mark.parametrize('options', [{}, {'phases': 2}, {'field': 'lipschitz'}, {'blocks': (1, 1)}])
def test_spectral_norms(vit, options):
    model = convert_(vit(), **options).model
    found = spectral_norms(model)
    every = (*model.blocks.before, *model.blocks.shared.phases, *model.blocks.after)
    parts = [{key: p.detach() for key, p in part.named_parameters()} for part in every]
    for name in ('attn.proj.weight', 'mlp.fc1.weight') if 'field' not in options else ('proj.weight', 'fc1.weight'):
        largest = max(float(torch.linalg.matrix_norm(w, ord=2)) for part in parts for key, w in part.items() if key.endswith(name))
        assert max(value for key, value in found.items() if name in key) == pytest.approx(largest, rel=1e-3)
    qkv = [part[key][:32] for part in parts for key in part if key.endswith('qkv.weight')]
    queries = max(value for key, value in found.items() if key.endswith('(queries)'))
    assert queries == pytest.approx(max(float(torch.linalg.matrix_norm(w, ord=2)) for w in qkv), rel=1e-3)


# --- discretisation ---

@pytest.mark.parametrize(('method', 'order'), [('euler', 1), ('heun2', 2), ('rk4', 4), ('lie_trotter', 1)])
def test_the_observed_order(vit, images, method, order):
    model = vit().double().eval()
    for p in model.blocks.parameters():
        p.data.mul_(0.5)  # a smooth field, for which the grids are fine enough to show the order
    convert_(model)
    errors = discretisation_errors(model, images.double(), methods=[method], steps=[6, 12, 24], fine=16)
    slope = np.polyfit(*np.log([(found.steps, float(found.error.mean())) for found in errors]).T, 1)[0]
    assert -slope == pytest.approx(order, abs=0.35)
    for found in errors:
        assert (found.error < found.error.new_tensor(1.)).all() and found.local.shape == (3, found.steps)
        assert (found.reference < found.error).all() or method == 'rk4'
    assert model.blocks.steps == 3 and model.blocks.method == 'lie_trotter'


def test_a_field_with_jumps(vit, images):
    few, many = discretisation_errors(convert_(vit().eval(), phases=3).model, images, methods=['euler'], steps=[3, 24])
    assert (many.error < few.error / 3).all() and repr(few).startswith('DiscretisationError(method euler, steps 3, 3 images; on average error ')


# --- numbers that go with right answers ---

def test_signals_of_a_model_and_their_relation_to_right_answers(teacher_and_twin, images, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / 'hub' / 'tools')
    tool = __import__('dynamics')
    teacher, student = teacher_and_twin
    convert_(student)
    labels = student(images).argmax(1)
    found, correct = tool.signals(student, [(images[:2], labels[:2]), (images[2:], 4 - labels[2:])], teacher)
    assert correct.tolist() == [True, True, False] and all(len(x) == 3 and x.isfinite().all() for x in found.values())
    torch.testing.assert_close(found['confidence'], student(images).softmax(1).amax(1).double())
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(300, generator=generator) < 0.6
    noise = torch.randn(300, generator=generator)
    chance, related = tool.relations({'noise': noise, 'gaps': (noise + right).where(noise > -1, torch.nan)}, right, 2, resamples=200)
    assert not chance['related'] and related['related'] and related['images'] == int((noise > -1).sum())


# --- what they have in common ---

def test_measures_of_an_ordinary_vit_and_of_its_exact_conversion_agree(teacher_and_twin, images):
    model, twin = teacher_and_twin
    convert_(twin, phases=3)
    for measure in (lyapunov_exponents, lipschitz_constants):
        a, b = measure(model, images), measure(twin, images)
        assert torch.allclose(a.values, b.values, atol=1e-4)
    with follow(model, images) as flow:
        assert torch.allclose(flow.logits(flow.states()[-1]), model(images), atol=1e-5)


def test_batches_and_threads_and_modes_change_nothing(vit, images):
    model = convert_(vit()).model
    model.train()
    whole = lyapunov_exponents(model, images, count=2).values
    assert torch.is_grad_enabled() and model.training and all(p.grad is None for p in model.parameters())
    assert torch.allclose(lyapunov_exponents(model, images, count=2, batch_size=2).values, whole, atol=1e-5)
    assert torch.allclose(lyapunov_exponents(model, [(images[:1], None), images[1:]], count=2).values, whole, atol=1e-5)
    assert torch.allclose(lyapunov_exponents(model, (images, torch.zeros(3)), count=2).values, whole, atol=1e-5)
    model.eval()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: lyapunov_exponents(model, images, count=2).values, range(3)))
    assert all(torch.equal(each, whole) for each in found)


@pytest.mark.parametrize(('step', 'sigma'), [
    (torch.round, 0.), (torch.ones_like, 0.), (lambda x: 0 * x.detach() + torch.ones(3, requires_grad=True), 0.), (lambda x: x, 1.),
    (lambda x: x.mul_(2), 2.), (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) * 3, 3.)])
def test_maps_that_are_constant_or_change_their_input(step, sigma):
    flow = Flow(torch.rand(2, 3), (step,), (0., 1.))
    found = lipschitz_constants(flow, iterations=5).values
    torch.testing.assert_close(found, torch.full((2, 1), abs(sigma - 1.)))
    expected = torch.full((2, 1), math.log(sigma) if sigma else math.nan, dtype=torch.float64)
    torch.testing.assert_close(lyapunov_exponents(flow, sweeps=0).values, expected, equal_nan=True)


def test_bfloat16_and_inference_mode(vit, images):
    model = vit()
    expected = lyapunov_exponents(model, images).values
    with torch.inference_mode():
        assert torch.equal(lyapunov_exponents(model, images.clone()).values, expected)
    assert lyapunov_exponents(model.to(torch.bfloat16), images.to(torch.bfloat16)).values.isfinite().all()


def test_spectral_norms_of_layers_that_a_library_wraps(vit):
    model = convert_(vit()).model
    expected = spectral_norms(model)

    class Wrapped(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer
    block = model.blocks.shared.block
    block.mlp.fc1, block.attn.qkv = Wrapped(block.mlp.fc1), Wrapped(block.attn.qkv)
    assert spectral_norms(model) == pytest.approx(expected)
    nn.utils.parametrizations.spectral_norm(block.attn.proj)
    assert spectral_norms(model)['attn.proj.weight'] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(('call', 'message'), [
    (lambda m, x: lyapunov_exponents(m, x, count=0), 'count must be a whole number'),
    (lambda m, x: lyapunov_exponents(m, x, tokens='cls'), "Unknown tokens 'cls'"),
    (lambda m, x: lyapunov_exponents(timm.create_model('vit_tiny_patch16_224', img_size=16, embed_dim=24, depth=1, class_token=False, global_pool='avg'), x, tokens='class'), 'needs a class token'),
    (lambda m, x: discretisation_errors(ode(m), x, steps=0), 'steps must be a whole number from 1 to 10000'),
    (lambda m, x: discretisation_errors(ode(m), x, methods='eulre'), "Unknown method 'eulre'. Did you mean 'euler'"),
    (lambda m, x: lipschitz_constants(m, []), 'no images'), (lambda m, x: lipschitz_constants(m), 'no images'),
    (lambda m, x: lipschitz_constants(m, x[0]), r'images \[B, C, H, W\]; got torch.float32 \[3, 16, 16\]'),
    (lambda m, x: lyapunov_exponents(ode(m, method='dopri5'), x), 'no map of the state alone'),
    (lambda m, x: lyapunov_exponents(ode(m, tokens=0.5), x), 'no map of the state alone'),
    (lambda m, x: lipschitz_constants(timm.create_model('test_resnet'), torch.randn(1, 3, 96, 96)), 'no single sequence of blocks'),
    (lambda m, x: spectral_norms(timm.create_model('test_resnet')), 'ResNet'),
    (lambda m, x: discretisation_errors(ode(timm.create_model('vit_small_patch16_rope_mixed_224', img_size=16, depth=2)), x), 'RoPE tables of their own'),
    (lambda m, x: discretisation_errors(m, x), 'has 0'), (lambda m, x: discretisation_errors(ode(m), x, fine=3), 'fine must be even; got 3'),
    (lambda m, x: class_over_time(Flow(torch.ones(1, 2), (lambda x: x,), (0., 1.))), 'no norm and head'),
    (lambda m, x: attention_over_time(timm.create_model('mixer_s32_224', img_size=64, num_classes=3).eval(), torch.randn(1, 3, 64, 64)), 'never attend')])
def test_what_cannot_be_measured(vit, images, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(vit(), images)


# --- trajectories ---

def line_of(points, head=None, **kwargs):
    """A flow through given states [K + 1, B, ...], one unit of time apart."""
    points = torch.as_tensor(points)
    moves = tuple([lambda x, d=d: x + d for d in points.diff(dim=0)])
    return Flow(points[0], moves, tuple(float(i) for i in range(len(points))), head, **kwargs)


def test_the_geometry_of_a_circle_and_of_a_straight_line():
    angle, radius = 0.3, 2.
    turns = torch.arange(6, dtype=torch.float64) * angle
    circle = radius * torch.stack([turns.cos(), turns.sin()], dim=-1)[:, None]
    found = trajectory_geometry(line_of(circle))
    assert trajectory_geometry(line_of(circle[:2])).angle.shape == (1, 0)  # of one step
    chord = 2 * radius * math.sin(angle / 2)
    assert torch.allclose(found.speed, torch.full((1, 5), chord, dtype=torch.float64))
    assert torch.allclose(found.angle, torch.full((1, 4), math.degrees(angle), dtype=torch.float64))
    assert torch.allclose(found.norm, torch.full((1, 6), radius, dtype=torch.float64))
    found = trajectory_geometry(line_of(torch.tensor([[[1., 0.]], [[2., 1.]], [[4., 3.]]])))
    still = trajectory_geometry(line_of(torch.tensor([[[1., 0.]], [[2., 0.]], [[2., 0.]], [[3., 0.]]])))
    assert still.angle.isnan().all()  # a step without length has no direction
    assert found.angle.abs().max() < 1e-3 and found.speed.tolist() == [pytest.approx([2 ** .5, 8 ** .5])]


def test_the_class_settles_when_it_no_longer_changes():
    # logits of two images at t = 0 ... 3: the first changes back and forth, the second never
    states = torch.tensor([[[2., 0.], [0., 1.]], [[0., 2.], [0., 2.]], [[2., 0.], [0., 3.]], [[3., 0.], [0., 4.]]])
    found = class_over_time(line_of(states, head=lambda x: x))
    assert found.classes.tolist() == [[0, 1, 0, 0], [1, 1, 1, 1]] and found.settled.tolist() == [2., 0.]
    assert torch.allclose(found.probability[0], states[:, 0].softmax(-1)[:, 0])
    assert class_over_time(line_of(states / 0, head=lambda x: x)).settled.isnan().all()


# --- attention over time ---

@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'beit_base_patch16_224', 'vit_relpos_small_patch16_224',
                                  'eva02_tiny_patch14_224', 'deit3_small_patch16_224', 'cait_xxs24_224'])
def test_attention_maps_of_many_families(name):
    patch = 14 if 'patch14' in name else 16
    model = timm.create_model(name, img_size=4 * patch, depth=2).eval()
    with follow(model, torch.randn(2, 3, 4 * patch, 4 * patch)) as flow:
        maps = list(attention_maps(flow))
        N = flow.start.shape[1]
    assert len(maps) == 2 and all(m.shape[0] == 2 and m.shape[2:] == (N, N) for m in maps)
    assert all(torch.allclose(m.sum(-1), torch.ones(m.shape[:-1]), atol=1e-5) for m in maps)


@pytest.mark.parametrize('config', [dict(), dict(method='rk4', steps=3), dict(field='lipschitz', method='euler'),
                                    dict(phases=2)])
def test_attention_maps_are_those_of_the_field_fused_or_not(vit, config, images):
    model = convert_(vit(qk_norm='field' not in config), OdeConfig(**config)).model
    found = []
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, 'fused_attn'):
                module.fused_attn = fused
        with follow(model, images) as flow:
            found.append(list(attention_maps(flow)))
            wanted = [model.blocks.shared.attention_map(t, x) for t, x in zip(flow.times, flow.states())]
    for maps in found:
        for ours, theirs in zip(maps, wanted):
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert model.bfloat16().blocks.shared.attention_map(0., flow.start.bfloat16()).dtype == torch.float32


def test_rollout_multiplies_the_maps_of_all_steps(vit, images):
    model = convert_(vit().eval(), steps=6).model
    found = attention_over_time(model, images, batch_size=2)
    with follow(model, images) as flow:
        first, second = [m.mean(1) / 2 for m in attention_maps(flow)][:2]  # h = 1/2
    eye = torch.eye(first.shape[-1])
    assert torch.allclose(found.attention[:, 0], 2 * first[:, 0], atol=1e-6) and found.prefix == 1
    assert torch.allclose(found.rollout[:, 1], ((second + eye) / 1.5 @ (first + eye) / 1.5)[:, 0], atol=1e-6)
    assert torch.allclose(found.rollout.sum(-1), torch.ones(found.rollout.shape[:2]), atol=1e-5)


def test_rates_are_per_unit_of_time():
    flow = Flow(torch.ones(1, 2), (lambda x: 2 * x,) * 2, (0., 0.5, 1.))
    assert lipschitz_constants(flow).values.tolist() == [pytest.approx([2., 2.])]
    assert trajectory_geometry(flow).speed.tolist() == [pytest.approx([8 ** 0.5, 32 ** 0.5])]
    flow = Flow(torch.ones(1, 2), (lambda x: x, lambda x: 3 * x), (0., 1., 2.))  # what the first finds is no start for the second
    assert lipschitz_constants(flow).values.tolist() == [pytest.approx([0., 2.])]


def test_the_error_of_one_step_is_its_local_error(vit, images):
    found = discretisation_errors(ode(vit()), images)
    assert [each.steps for each in found] == [1, 3, 6] and found[1].times.tolist() == [1, 2, 3] and (found[0].reference > 0).all()
    assert [each.steps for each in discretisation_errors(ode(vit(), phases=3, steps=4), images)] == [3, 4, 8]  # as few as there can be
    assert len(discretisation_errors(ode(vit()), images, steps=np.int64(3))) == 1
    torch.testing.assert_close(found[0].local[:, 0], found[0].error)
