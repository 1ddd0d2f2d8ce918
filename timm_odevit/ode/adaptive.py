"""Adaptive methods, which choose their own steps, by way of torchdiffeq."""
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .config import OdeConfig
from .fields import Context, Field
from .methods import METHODS, Step

__all__ = ['AdaptiveStep', 'Counts', 'solve_adaptive']

_SAME = 1e-6  # times that differ by rounding


class Counts(threading.local):
    """What the last forward pass of each thread took; a copy starts anew.

    Attributes:
        evaluations: Field evaluations of an adaptive solution.
        steps: Steps of each image [B] before it halted.
    """
    evaluations = 0
    steps: Tensor | None = None

    def __reduce__(self) -> Any:
        return Counts, ()


class AdaptiveStep(Step):
    """An adaptive solution over [t, t + h]."""
    nodes = ()

    def __init__(self, field: Field, t: float, h: float, config: OdeConfig) -> None:
        super().__init__(field, t, h)
        self.config = config

    def set_field(self, field: Field) -> None:
        """Hold a field with all its phases."""
        super().set_field(field)
        self.__dict__['field'] = field

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, context = self.enter(x, args, kwargs)
        return solve_adaptive(self.field, x, (self.t, self.t + self.h), self.config, context)[0][-1]


def solve_adaptive(
        field: Field,
        x0: Tensor,
        times: Sequence[float],
        config: OdeConfig,
        context: Context,
) -> tuple[Tensor, int]:
    """Solve with an adaptive method of torchdiffeq.

    Args:
        field: Vector field, called as field(t, x, context, '') with t a 0-dim tensor.
        x0: State at times[0] [B, N, D], float32 or float64.
        times: Increasing times at which the state is wanted.
        config: Method, tolerances and adjoint.
        context: What the host passes to its blocks besides the state.

    Returns:
        The states [len(times), B, N, D], and the number of field evaluations of the forward solution.

    Raises:
        ValueError: The state is in half precision, which is too coarse for step-size control.
        FloatingPointError: The solver could not meet the tolerance with any step size.
    """
    if x0.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"'{config.method}' controls its error and needs float32 or float64; got {x0.dtype}. "
            f"Use a fixed-step method ({', '.join(METHODS)}) or a float32 model.")
    if not x0.numel():  # an empty state has no error to measure
        return x0.expand(len(times), *x0.shape), 0
    # no error estimate holds across a jump of the field, so each piece between two jumps is solved separately
    jumps = [t for t in field.jumps if times[0] + _SAME < t < times[-1] - _SAME]
    times = [next((jump for jump in jumps if abs(jump - t) < _SAME), t) for t in times]
    bounds = [times[0], *jumps, times[-1]]
    x, states, evaluations = x0, [x0], 0
    for start, end in pairwise(bounds):
        wanted = [t for t in times[1:] if start < t <= end]
        inner = [start, *wanted, *([] if wanted and wanted[-1] == end else [end])]
        found, count = _solve_smooth(field.select(start), x, inner, config, context)
        states += list(found[1:len(wanted) + 1])
        x, evaluations = found[-1], evaluations + count
    return torch.stack(states), evaluations


def _solve_smooth(
        field: Field, x0: Tensor, times: Sequence[float], config: OdeConfig, context: Context,
) -> tuple[Tensor, int]:
    import torchdiffeq

    # the adjoint evaluates the field again in the backward pass, outside autocast; there it folds its own weights
    counted = _Counted(field, context._replace(weights=None if config.adjoint else field.fold()))
    grid = torch.tensor(times, dtype=x0.dtype, device=x0.device)
    options: dict[str, Any] = dict(rtol=config.rtol, atol=config.atol, method=config.method)
    try:
        if config.adjoint:
            handed = [v for v in context.block_kwargs.values() if isinstance(v, Tensor) and v.requires_grad]
            states = torchdiffeq.odeint_adjoint(
                counted, x0, grid, adjoint_params=(*counted.parameters(), *handed), **options)
        else:
            states = torchdiffeq.odeint(counted, x0, grid, **options)
    except AssertionError as e:  # torchdiffeq raises it if the step size underflows or the state is not finite
        raise FloatingPointError(
            f"'{config.method}' failed between t = {times[0]:g} and {times[-1]:g} after {counted.evaluations} "
            f'evaluations: {e}. Loosen rtol and atol, or check the field for divergence.') from e
    return states, counted.evaluations


class _Counted(nn.Module):
    """field(t, x) for torchdiffeq, with its context bound and its evaluations counted."""

    def __init__(self, field: nn.Module, context: Context) -> None:
        super().__init__()
        self.field = field
        self.context = context
        self.evaluations = 0

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        self.evaluations += 1  # the adjoint's own evaluations come later, in the backward pass
        return self.field(t, x, self.context, '')
