"""What the dynamics do: known answers, and the same measures on ODE-ViTs and on ordinary ViTs."""
import math
import threading

import pytest
import timm
import torch
from torch import nn

from timm_odevit import OdeConfig, convert_
from timm_odevit.dynamics.discretisation import discretisation_errors, observed_order
from timm_odevit.dynamics.flow import Flow, follow
from timm_odevit.dynamics.lipschitz import lipschitz_constants, log_softmax_bound, softmax_bounds
from timm_odevit.dynamics.lyapunov import lyapunov_exponents
from timm_odevit.dynamics.spectral_norms import SpectralNorms, spectral_norms


def linear(matrix, steps=40, h=0.1, systems=3):
    """The flow of dx/dt = A x, exactly."""
    size = len(matrix)
    start = torch.randn(systems, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    each = torch.matrix_exp(torch.as_tensor(matrix, dtype=torch.float64) * h).T
    return Flow(start, tuple([lambda x: x @ each] * steps), tuple(h * i for i in range(steps + 1)))


def rotated(values):
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    return turn @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ turn.T


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


# --- exponents ---

@pytest.mark.parametrize('values', [(0.5, 0.2, -0.1, -0.3), (-0.2, -0.4, -0.9, -1.5), (2., 1.5, 1., 0.5)])
def test_the_exponents_of_a_linear_field_are_its_spectrum(values):
    found = lyapunov_exponents(linear(rotated(values), steps=100), count=4)
    assert torch.allclose(found.values, torch.tensor(values, dtype=torch.float64).expand(3, 4), atol=1e-3)
    assert found.drift.max() < 1e-3 and found.reasons == (None,) * 3
    assert found.running.shape == (3, 100, 4) and torch.allclose(found.times[-1], torch.tensor(10., dtype=torch.float64))


def test_a_rotation_and_the_identity_have_exponent_0():
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for matrix in (whole - whole.T, torch.zeros(4, 4)):
        assert lyapunov_exponents(linear(matrix), count=2).values.abs().max() < 1e-9


def test_directions_that_grow_late_are_found_by_the_sweeps():
    # the whole map is diag(8, 1/2): a tangent vector that grows most at first is not the one that grows most in the end
    maps = [lambda x: x * torch.tensor([0.5, 2.])] * 2 + [lambda x: x * torch.tensor([16., 1 / 16])] * 2
    flow = Flow(torch.ones(1, 2), tuple(maps), (0., 1., 2., 3., 4.))
    whole = math.log(0.5 * 0.5 * 16 * 16) / 4
    assert float(lyapunov_exponents(flow, sweeps=4).values) == pytest.approx(whole, abs=1e-3)


def test_the_exponents_of_the_lorenz_system():
    A = torch.tensor([[-10., 10., 0.], [28., -1., 0.], [0., 0., -8 / 3]], dtype=torch.float64)
    B = torch.tensor([[0., 0., 0.], [0., -1., 0.], [0., 0., 1.]], dtype=torch.float64)

    def field(x):
        return x @ A.T + x[:, :1] * x[:, [0, 2, 1]] @ B.T

    def step(x, h=0.03):
        k1 = field(x)
        k2 = field(x + h / 2 * k1)
        k3 = field(x + h / 2 * k2)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + field(x + h * k3))
    x = torch.randn(256, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(500):
        x = step(x)
    found = lyapunov_exponents(Flow(x, (step,) * 1000, tuple(0.03 * i for i in range(1001))), count=2, sweeps=0)
    first, second = found.values.mean(0).tolist()
    assert first == pytest.approx(0.906, abs=0.05) and second == pytest.approx(0., abs=0.05)
    assert found.drift[:, 0].mean() > 0.01  # of a single path, it has not settled in 30 units of time


def test_a_flow_that_diverges_or_stands_still_has_no_exponents_but_a_reason():
    blown = Flow(torch.tensor([[1.], [0.]]), (lambda x: x * 1e30,) * 3, (0., 1., 2., 3.))
    found = lyapunov_exponents(blown, sweeps=0)
    assert found.values.isnan()[0] and 'not finite at t = 2' in found.reasons[0]
    still = lyapunov_exponents(Flow(torch.ones(2, 3), (lambda x: 0 * x,), (0., 1.)))
    assert still.values.isnan().all() and still.reasons == ('the tangent vectors vanish at t = 1',) * 2
    assert '2 without: the tangent vectors vanish' in repr(still)


@pytest.mark.parametrize('method', ['lie_trotter', 'euler', 'rk4'])
def test_the_largest_exponent_is_that_of_the_deployed_map(vit, images, method):
    model = vit().double().eval()
    convert_(model, time='low_rank', rank=2, method=method, init='svd')
    model.blocks.steps = 4
    images = images.double()
    with follow(model, images[:1]) as flow:
        def whole(x):
            return model.blocks(x.view_as(flow.start)).flatten()
        sigma = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(whole, flow.start.flatten()), ord=2)
    found = lyapunov_exponents(model, images[:1], sweeps=20)
    assert float(found.values) == pytest.approx(math.log(sigma) / 3, abs=2e-3)


def test_the_class_token_alone(vit, images):
    model = vit().double().eval()
    with follow(model, images[:1].double()) as flow:
        x, total = flow.start, torch.eye(flow.start.shape[-1], dtype=torch.float64)
        for step in flow.maps:
            whole = torch.autograd.functional.jacobian(lambda v, x=x, step=step: step(torch.cat([v[None, None], x[:, 1:]], 1))[0, 0], x[0, 0])
            total, x = whole @ total, step(x)
    found = lyapunov_exponents(model, images[:1].double(), tokens='class', sweeps=20, count=2)
    assert torch.allclose(found.values[0], torch.linalg.svdvals(total)[:2].log() / 3, atol=1e-3)


# --- Lipschitz ---

def test_the_lipschitz_constant_of_a_linear_field():
    A = rotated((-3., 2., 0.5))
    flow = Flow(torch.randn(2, 3, dtype=torch.float64), (lambda x: x + 0.1 * x @ A.T,) * 4, (0., .1, .2, .3, .4))
    found = lipschitz_constants(flow, iterations=100)
    assert torch.allclose(found.field, torch.full((2, 4), 3., dtype=torch.float64), atol=1e-3)
    assert torch.allclose(found.step, torch.full((2, 4), 1.2, dtype=torch.float64), atol=1e-3)


def test_the_lipschitz_constants_are_those_of_the_jacobian(vit, images):
    model = vit().double().eval()
    found = lipschitz_constants(model, images[:1].double(), iterations=80)
    with follow(model, images[:1].double()) as flow:
        for k, (step, x) in enumerate(zip(flow.maps, flow.states(), strict=False)):
            J = torch.autograd.functional.jacobian(lambda v, step=step, x=x: step(v.view_as(x)).flatten(), x.flatten())
            assert float(found.step[0, k]) == pytest.approx(float(torch.linalg.svdvals(J)[0]), rel=1e-3)
            assert float(found.field[0, k]) == pytest.approx(float(torch.linalg.svdvals(J - torch.eye(len(J)))[0]), rel=1e-3)


def test_g_k_bounds_the_eigenvalues_of_the_softmax_jacobian(vit, images):
    p = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(2).softmax(-1)
    eigenvalues = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None]).flip(-1)
    bounds = log_softmax_bound(p, 6).exp()
    assert (bounds >= eigenvalues - 1e-12).all()
    two = torch.tensor([0.5, 0.5])
    assert float(log_softmax_bound(two, 1).exp()) == pytest.approx(0.5)  # the Jacobian's eigenvalue, exactly
    found = softmax_bounds(vit().eval(), images)
    assert found.values.shape == (3, 3, 2) and 0 < found.values.min() and found.values.max() <= 0.5


@pytest.mark.parametrize('options', [{}, {'time': 'low_rank', 'rank': 3, 'init': 'svd'}, {'phases': 2}, {'field': 'lipschitz'}])
def test_spectral_norms(vit, options):
    model = vit()
    convert_(model, **options)
    found = spectral_norms(model, iterations=300)
    shared = model.blocks.shared
    with torch.no_grad():
        parts = [part.at(float(layer)) if part.depends_on_time else {k: p.data for k, p in part.named_parameters()}
                 for part in shared.parts for layer in (range(3) if part.depends_on_time else (0,))]
    for name in ('attn.proj.weight', 'mlp.fc1.weight') if 'field' not in options else ('proj.weight', 'fc1.weight'):
        largest = max(float(torch.linalg.matrix_norm(w, ord=2)) for part in parts for key, w in part.items() if key.endswith(name))
        assert max(value for key, value in found.items() if name in key) == pytest.approx(largest, rel=1e-3)
    qkv = [part[key][:32] for part in parts for key in part if key.endswith('qkv.weight')]
    queries = max(value for key, value in found.items() if key.endswith('(queries)'))
    assert queries == pytest.approx(max(float(torch.linalg.matrix_norm(w, ord=2)) for w in qkv), rel=1e-3)


def test_spectral_norms_follow_the_weights_with_one_iteration(vit):
    model = vit()
    watch = SpectralNorms(model)
    watch.update(300)
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight.mul_(2)
    before = watch.update(0)
    assert before.keys() == watch.update(1).keys()
    assert watch.update(1)['blocks.1.mlp.fc1.weight'] == pytest.approx(
        float(torch.linalg.matrix_norm(model.blocks[1].mlp.fc1.weight.detach(), ord=2)), rel=1e-3)


# --- discretisation ---

@pytest.mark.parametrize(('method', 'order'), [('euler', 1), ('heun2', 2), ('rk4', 4), ('lie_trotter', 1)])
def test_the_observed_order_and_the_bound(vit, images, method, order):
    model = vit().double().eval()
    for p in model.blocks.parameters():
        p.data.mul_(0.5)  # a smooth field, for which the grids are fine enough to show the order
    convert_(model)
    errors = discretisation_errors(model, images.double(), methods=[method], steps=[6, 12, 24], fine=16, iterations=5)
    assert observed_order(errors) == pytest.approx(order, abs=0.35)
    for found in errors:
        assert (found.error < found.error.new_tensor(1.)).all() and found.local.shape == (3, found.steps)
        assert (found.bound >= 0.99 * found.error).all()
        assert (found.reference < found.error).all() or method == 'rk4'
    assert model.blocks.steps == 3 and model.blocks.method == 'lie_trotter'


def test_a_field_that_depends_on_time_and_one_with_jumps(vit, images):
    for options in ({'time': 'low_rank', 'rank': 2, 'init': 'svd'}, {'phases': 3}):
        model = vit().eval()
        convert_(model, **options)
        few, many = discretisation_errors(model, images, methods=['euler'], steps=[3, 24], iterations=2)
        assert (many.error < few.error / 3).all() and repr(few).startswith('DiscretisationError(euler, K = 3')


# --- what they have in common ---

def test_measures_of_an_ordinary_vit_and_of_its_exact_conversion_agree(vit, images):
    model = vit().eval()
    twin = vit().eval()
    twin.load_state_dict(model.state_dict())
    convert_(twin, phases=3)
    for measure in (lyapunov_exponents, lipschitz_constants):
        a, b = measure(model, images), measure(twin, images)
        assert torch.allclose(getattr(a, 'values', getattr(a, 'field', None)), getattr(b, 'values', getattr(b, 'field', None)), atol=1e-4)
    with follow(model, images) as flow:
        assert torch.allclose(flow.logits(flow.states()[-1]), model(images), atol=1e-5)


def test_batches_and_threads_and_modes_change_nothing(vit, images):
    model = vit()
    convert_(model)
    model.train()
    whole = lyapunov_exponents(model, images, count=2).values
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.allclose(lyapunov_exponents(model, images, count=2, batch_size=2).values, whole, atol=1e-5)
    assert torch.allclose(lyapunov_exponents(model, [(images[:1], None), images[1:]], count=2).values, whole, atol=1e-5)
    found = {}

    def run(i):
        found[i] = lyapunov_exponents(model, images, count=2).values
    model.eval()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], whole) for i in range(3))


@pytest.mark.parametrize(('wrong', 'message'), [
    (dict(count=0), 'count must be a whole number'), (dict(sweeps=-1), 'sweeps must'), (dict(tokens='cls'), "tokens must be 'all' or 'class'"),
    (dict(count=10 ** 6), 'at most the number of dimensions')])
def test_wrong_arguments(vit, images, wrong, message):
    with pytest.raises(ValueError, match=message):
        lyapunov_exponents(vit(), images, **wrong)


def test_models_that_cannot_be_followed(vit, images):
    model = vit()
    convert_(model, OdeConfig(method='dopri5'))
    with pytest.raises(ValueError, match="'dopri5' chooses its own steps"):
        lyapunov_exponents(model, images)
    with pytest.raises(TypeError, match='no single sequence of blocks'):
        lipschitz_constants(timm.create_model('test_resnet'), torch.randn(1, 3, 96, 96))
    with pytest.raises(ValueError, match='no images'):
        lipschitz_constants(vit(), [])
    with pytest.raises(ValueError, match=r'Expected images \[B, C, H, W\]'):
        lipschitz_constants(vit(), images[0])
    with pytest.raises(TypeError, match='Convert it first'):
        discretisation_errors(vit(), images)
    with pytest.raises(TypeError, match='no blocks with weight matrices'):
        spectral_norms(nn.Linear(2, 2))
    headless = Flow(torch.ones(1, 2), (lambda x: x,), (0., 1.))
    with pytest.raises(TypeError, match='no norm and head'):
        headless.logits(headless.start)
