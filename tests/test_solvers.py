import math

import pytest
import torch
import torchdiffeq
from conftest import converted
from torch import nn
from torchdiffeq._impl.odeint import SOLVERS

from timm_odevit import OdeConfig
from timm_odevit.ode.config import ADAPTIVE
from timm_odevit.ode.fields import Field
from timm_odevit.ode.methods import METHODS, RungeKutta
from timm_odevit.ode.solver import Solver

FIXED = list(METHODS)


class Split:
    def __call__(self, t, x):
        return self.attention(t, x) + self.mlp(t, x)


class Linear(Split):
    """dx/dt = (G + F) x with matrices that do not commute."""
    G = torch.tensor([[0., 1.], [-1., 0.]], dtype=torch.float64)
    F = torch.tensor([[-0.5, 0.3], [0., 0.2]], dtype=torch.float64)

    def attention(self, t, x):
        return x @ self.G.T

    def mlp(self, t, x):
        return x @ self.F.T

    def exact(self, x, T):
        return x @ torch.linalg.matrix_exp((self.G + self.F) * T).T


class Periodic(Split):
    """dx/dt = cos(t) x - sin(2 t) x / 2, so x(t) = x(0) exp(sin t + (cos 2t - 1) / 4): depends on time."""

    def attention(self, t, x):
        return math.cos(t) * x

    def mlp(self, t, x):
        return -0.5 * math.sin(2 * t) * x

    def exact(self, x, T):
        return x * math.exp(math.sin(T) + (math.cos(2 * T) - 1) / 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def attention(self, t, x):
        return torch.tanh(self.a(x)) * math.cos(float(t))

    def mlp(self, t, x):
        return torch.tanh(self.b(x)) * float(t)

    def forward(self, t, x):
        return self.attention(t, x) + self.mlp(t, x)


class AsField(Field):
    """Any callable field(t, x); for splitting methods, with attention(t, x) and mlp(t, x)."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, t, x, context=None, part=''):
        return (getattr(self.function, part) if part else self.function)(t, x)


def solve(function, x, **config):
    """The state at t = 0 and after each step [K + 1, ...]."""
    states = [x]
    for step in Solver(OdeConfig(**config), AsField(function)):
        states.append(step(states[-1]))
    return torch.stack(states)


X = torch.tensor([[1., 0.5], [-0.3, 2.]], dtype=torch.float64)


@pytest.mark.parametrize('problem', [Linear, Periodic])
@pytest.mark.parametrize('method', FIXED)
def test_order_of_convergence(method, problem):
    field, T = problem(), 1.7
    errors = [(solve(field, X, method=method, steps=k, T=T)[-1] - field.exact(X, T)).norm() for k in (32, 64, 128)]
    slopes = [math.log2(a / b) for a, b in zip(errors, errors[1:])]
    for slope in slopes:
        assert abs(slope - METHODS[method].order) < 0.15, slopes


def test_a_method_may_be_registered_later(monkeypatch):
    monkeypatch.setitem(METHODS, 'ralston', type('Ralston', (RungeKutta,), dict(order=2, evaluations=2, a=((), (2 / 3,)), b=(1 / 4, 3 / 4))))
    test_order_of_convergence('ralston', Periodic)


@pytest.mark.parametrize('method', [m for m in FIXED if issubclass(METHODS[m], RungeKutta) and m in SOLVERS])
def test_equals_torchdiffeq_on_the_same_grid(method):
    field, x = Net(), torch.randn(4, 3, dtype=torch.float64)
    ours = solve(field, x, method=method, steps=9, T=2.5)
    theirs = torchdiffeq.odeint(field, x, torch.linspace(0, 2.5, 10, dtype=torch.float64), method=method)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize('method', FIXED)
def test_gradients(method):
    field, x = Net(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *p: solve(field, x, method=method, steps=3, T=1.5)[-1], (x, *field.parameters()))


@pytest.mark.parametrize('method', ADAPTIVE)
def test_adaptive_methods_reach_the_tolerance_and_their_gradients_agree(method):
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(Linear.G + Linear.F)

        def forward(self, t, x):
            return x @ self.w.T

    field, x = Rotation(), X.clone().requires_grad_()
    # the tolerance holds per step; with an error estimate of order 1, steps are many and their errors add up
    tight, error = (1e-7, 1e-4) if method in ('fehlberg2', 'adaptive_heun') else (1e-9, 1e-8)
    found = solve(field, x, method=method, steps=1, T=1., rtol=tight, atol=tight)[-1]
    torch.testing.assert_close(found, Linear().exact(x, 1.), rtol=error, atol=error)
    found.square().sum().backward()
    w, y = field.w.detach().clone().requires_grad_(), X.clone().requires_grad_()
    (y @ torch.linalg.matrix_exp(w).T).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=10 * error, atol=10 * error)
    torch.testing.assert_close(field.w.grad, w.grad, rtol=10 * error, atol=10 * error)


def test_adaptive_keeps_states_at_times_that_rounding_moves_off_a_jump(vit):
    model = converted(vit, OdeConfig(phases=3, method='bosh3', steps=94, rtol=1e-2, atol=1e-2))
    x = torch.randn(1, 17, 32)
    states = model.blocks.trajectory(x)
    assert len(states) == 95 and states.isfinite().all()
    torch.testing.assert_close(states[-1], model.blocks(x), rtol=0.05, atol=0.05)
    for step in model.blocks:
        x = step(x)
    torch.testing.assert_close(states[-1], x, rtol=0.05, atol=0.05)


def test_divergence_of_an_adaptive_method_names_the_time():
    with pytest.raises(FloatingPointError, match="'dopri5' failed between t = 0 and 20"):
        solve(lambda t, x: 1e3 * x ** 3, X, method='dopri5', steps=1, T=20.)


def test_refuses_what_cannot_be_integrated():
    with pytest.raises(ValueError, match='steps and T are needed here; got None and None'):
        solve(Linear(), X, method='euler')
    with pytest.raises(ValueError, match='needs float32 or float64; got torch.bfloat16'):
        solve(Linear(), X.bfloat16(), method='dopri5', steps=1, T=1.)
