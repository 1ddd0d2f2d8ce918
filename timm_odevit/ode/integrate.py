"""integrate: solve dx/dt = field(t, x) for any field."""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .adaptive import solve_adaptive
from .config import OdeConfig
from .fields import Field
from .methods import METHODS
from .solver import Solver

__all__ = ['integrate']


def integrate(field: Callable[..., Tensor], x0: Tensor, config: OdeConfig, *, keep: bool = False) -> Tensor:
    """Solve dx/dt = field(t, x) from t = 0 to config.T.

    Fixed-step methods run as a plain loop over Python floats, adaptive ones through torchdiffeq.
    Time is dimensionless: one unit is one transformer block of the base model.

    Args:
        field: Vector field, called as field(t, x) with t a float (a 0-dim tensor from an adaptive method) and
            x [B, N, D] (or any other shape); returns the slope in the shape of x. The splitting methods call its
            `attention(t, x)` and `mlp(t, x)`.
        x0: State at t = 0 [B, N, D]; integrated in its own dtype.
        config: Method, number of steps and end time; steps and T must be set.
        keep: Also keep the states in between.

    Returns:
        x(T) [B, N, D], or all states [K + 1, B, N, D] with keep.

    Raises:
        ValueError: steps or T is not set, an adaptive method gets a state in half precision, a splitting method a field
            without sub-flows, or the adjoint method one that is not an nn.Module.
        FloatingPointError: The state stopped being finite; the message names the step and t.

    Examples:
        >>> config = OdeConfig(method='rk4', steps=10, T=1.)
        >>> x = integrate(lambda t, x: -x, torch.ones(1, 1, 1), config)    # exp(-1)
        >>> print(f'{x.item():.4f}')
        0.3679

    Source: Hairer, Nørsett & Wanner, Solving ODEs I, II.1; ODE-ViT, arXiv 2511.16501.
    """
    steps, T = config.steps_and_end
    if config.tokens < 1 or config.halting is not None:
        raise ValueError('tokens and halting apply to the blocks of a model, not to integrate. Leave them out.')
    if not config.adaptive and METHODS[config.method].splits and not (
            isinstance(field, Field) or hasattr(field, 'attention')):
        raise ValueError(
            f"'{config.method}' splits the field into attention(t, x) and mlp(t, x), which this one does not have. "
            "Use an unsplit method, such as 'euler' or 'rk4'.")
    if config.adjoint and not isinstance(field, nn.Module):
        raise ValueError('adjoint finds the parameters of a field that is an nn.Module; this one is a '
                         f'{type(field).__name__}. Set adjoint=False.')
    module: Any = field if isinstance(field, Field) else _CallableField(field)
    if config.adaptive:
        times = [i * T / steps for i in range(steps + 1)]
        wanted = times if keep else (times[0], times[-1])
        found = solve_adaptive(module, x0, wanted, config, module.context((), {}))[0]
        _check_finite(found[-1], steps, config)
        return found if keep else found[-1]
    x, states = x0, [x0]
    for i, step in enumerate(Solver(config, module)):
        x = step(x)
        _check_finite(x, i + 1, config)
        if keep:
            states.append(x)
    return torch.stack(states) if keep else x


class _CallableField(Field):
    """Any callable field(t, x) as a Field."""

    def __init__(self, field: Callable[..., Tensor]) -> None:
        super().__init__()
        self.field = field

    def forward(self, t, x, context=None, part=''):
        return (getattr(self.field, part) if part else self.field)(t, x)


def _check_finite(x: Tensor, step: int, config: OdeConfig) -> None:
    steps, T = config.steps_and_end
    if not torch.isfinite(x).all():
        raise FloatingPointError(
            f'The state is not finite after step {step} of {steps} '
            f"(t = {step * T / steps:g}, '{config.method}'). Use more steps or a smaller T.")
