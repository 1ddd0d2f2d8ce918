"""The steps that a configuration asks for, adaptive methods by way of torchdiffeq, and the solver for any field."""
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .config import OdeConfig
from .fields import Context, Field
from .methods import METHODS, Step
from .tokens import TokenMerging

_SAME = 1e-6  # times that differ by rounding


class Solver(nn.ModuleList):
    """The K steps of a resolved configuration on [t, t + T]; what a step does is in methods.py."""

    def __init__(self, config: OdeConfig, field: Field, t: float = 0., num_prefix_tokens: int = 0) -> None:
        grid = layout(config, field.borders, t)
        if config.adaptive:
            super().__init__(AdaptiveStep(field, start, h, config) for start, h in grid)
        else:
            T = config.steps_and_end[1]
            merging = TokenMerging(config.tokens, num_prefix_tokens, t, T) if config.tokens < 1 else None
            super().__init__(METHODS[config.method](field, start, h, merging) for start, h in grid)


def layout(config: OdeConfig, borders: Sequence[float], t: float = 0.) -> list[tuple[float, float]]:
    """Start and length of the K steps on [t, t + T], which cross no border of two spans.

    Each span has a step; then one more goes where steps are longest, to the first of equals.
    """
    steps, T = config.steps_and_end
    starts = [0., *(b - t for b in borders if t + _SAME < b < t + T - _SAME)]
    if steps < len(starts):
        raise ValueError(f'steps={steps} are too few: each of the {len(starts)} shared blocks needs a step of its own.')
    lengths, counts = [b - a for a, b in pairwise([*starts, T])], [1] * len(starts)
    for _ in range(steps - len(starts)):
        ratios = [round(length / count, 9) for length, count in zip(lengths, counts, strict=True)]
        counts[ratios.index(max(ratios))] += 1
    return [(t + start + i * (length / n), length / n)
            for start, length, n in zip(starts, lengths, counts, strict=True) for i in range(n)]


class AdaptiveStep(Step):
    """An adaptive solution over [t, t + h]."""

    def __init__(self, field: Field, t: float, h: float, config: OdeConfig) -> None:
        super().__init__(field, t, h)
        self.config = config

    def set_field(self, field: Field) -> None:
        self.__dict__['field'] = field  # with all its phases

    def advance(self, x: Tensor, context: Context) -> Tensor:
        return solve_adaptive(self.field, x, [self.t, self.t + self.h], self.config, context)[0][-1]


def solve_adaptive(
        field: Field, x: Tensor, times: Sequence[float], config: OdeConfig, context: Context) -> tuple[Tensor, int]:
    """The states at some times [len(times), B, N, D], x at the first, and how often an adaptive method evaluated."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"'{config.method}' controls its error and needs float32 or float64; got {x.dtype}. Use a "
                         f"fixed-step method ({', '.join(METHODS)}) or a float32 model.")
    if not x.numel():  # an empty state has no error to measure
        return x.expand(len(times), *x.shape), 0
    import torchdiffeq
    states, evaluations = [x], 0

    def slope(piece: Field, context: Context, t: Tensor, x: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return piece(t, x, context, '')
    # no error estimate holds across a jump of the field: each piece between two is solved separately, with its weights
    jumps = [t for t in field.jumps if times[0] + _SAME < t < times[-1] - _SAME]
    for start, end in pairwise([times[0], *jumps, times[-1]]):
        piece, inner = field.select(start), [t for t in times if start + _SAME < t < end - _SAME]
        inside = context._replace(weights=piece.fold())
        grid = torch.tensor([start, *inner, end], dtype=x.dtype, device=x.device)
        try:
            path = torchdiffeq.odeint(
                partial(slope, piece, inside), x, grid, rtol=config.rtol, atol=config.atol, method=config.method)
        except AssertionError as e:  # torchdiffeq raises it if the step size underflows or the state is not finite
            raise FloatingPointError(
                f"'{config.method}' failed between t = {start:g} and {end:g} after {evaluations} evaluations: {e}. "
                'Loosen rtol and atol, or check the field for divergence.') from e
        x = path[-1]
        states += path[1:-1].unbind()
        if any(abs(end - t) < _SAME for t in times):
            states.append(x)
    return torch.stack(states), evaluations


def integrate(field: Callable[..., Tensor], x0: Tensor, config: OdeConfig, *, keep: bool = False) -> Tensor:
    """Solve dx/dt = field(t, x) from t = 0 to config.T; one unit of time is one transformer block of the base model.

    Args:
        field: Vector field, called as field(t, x) with t a float (a 0-dim tensor from an adaptive method). Splitting
            methods call its `attention(t, x)` and `mlp(t, x)`.
        x0: State at t = 0 [B, N, D], or of any other shape; integrated in its own dtype.
        config: Method, steps and T, which must be set; tokens and halting do not apply.
        keep: Also keep the states in between.

    Returns:
        x(T) [B, N, D], or all states [K + 1, B, N, D] with keep.

    Raises:
        ValueError: steps or T is not set, or the method does not suit the field or the dtype.
        FloatingPointError: The state stopped being finite; the message names the step and t.

    Examples:
        >>> config = OdeConfig(method='rk4', steps=10, T=1.)
        >>> x = integrate(lambda t, x: -x, torch.ones(1, 1, 1), config)    # exp(-1)
        >>> print(f'{x.item():.4f}')
        0.3679

    Source: Hairer, Nørsett & Wanner, Solving ODEs I, II.1; ODE-ViT, arXiv 2511.16501.
    """
    module: Any = field if isinstance(field, Field) else _CallableField(field)
    splits = not config.adaptive and METHODS[config.method].splits
    if splits and not (module is field or hasattr(field, 'attention')):
        raise ValueError(f"'{config.method}' splits the field into attention(t, x) and mlp(t, x), which this one does "
                         "not have. Use an unsplit method, such as 'rk4'.")
    solver: Any = Solver(replace(config, tokens=1.), module)
    if config.adaptive:
        times = [step.t for step in solver] if keep else [0.]
        path = solve_adaptive(module, x0, [*times, solver[-1].t + solver[-1].h], config, Context({}))[0]
        return path if keep else path[-1]
    states = [x0]
    for i, step in enumerate(solver, 1):
        x = step(states[-1])
        if not torch.isfinite(x).all():
            raise FloatingPointError(f'The state is not finite after step {i} of {len(solver)} (t = '
                                     f"{step.t + step.h:g}, '{config.method}'). Use more steps or a smaller T.")
        if not keep:
            states.clear()
        states.append(x)
    return torch.stack(states) if keep else x


class _CallableField(Field):
    """Any callable field(t, x) as a Field."""

    def __init__(self, field: Callable[..., Tensor]) -> None:
        super().__init__()
        self.field = field

    def forward(self, t, x, context=None, part=''):
        return (getattr(self.field, part) if part else self.field)(t, x)
