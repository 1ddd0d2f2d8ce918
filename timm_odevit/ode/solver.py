"""The steps that a configuration asks for, and adaptive methods by way of torchdiffeq."""
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from .config import OdeConfig
from .fields import Context, Field
from .methods import METHODS, Step
from .tokens import TokenMerging

_SAME = 1e-6  # times that differ by rounding


class Solver(nn.ModuleList):
    """The K steps on [t, t + T]; what a step does is in methods.py."""

    def __init__(self, config: OdeConfig, field: Field, t: float = 0., num_prefix_tokens: int = 0) -> None:
        grid = layout(config, field.borders, t)
        if config.adaptive:
            super().__init__(AdaptiveStep(field, start, h, config) for start, h in grid)
        else:
            T = config.steps_and_end[1]
            merging = TokenMerging(config.tokens, num_prefix_tokens, t, T) if config.tokens < 1 else None
            super().__init__(METHODS[config.method](field, start, h, merging) for start, h in grid)


def layout(config: OdeConfig, borders: Sequence[float], t: float) -> list[tuple[float, float]]:
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
    def __init__(self, field: Field, t: float, h: float, config: OdeConfig) -> None:
        super().__init__(field, t, h)
        self.config = config

    def advance(self, x: Tensor, context: Context) -> Tensor:
        return solve_adaptive(self.whole, x, [self.t, self.t + self.h], self.config, context)[0][-1]


def solve_adaptive(
        field: Field, x: Tensor, times: Sequence[float], config: OdeConfig, context: Context) -> tuple[Tensor, int]:
    """The states at some times [len(times), B, N, D], x at the first, and how often an adaptive method evaluated."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"'{config.method}' controls its error and needs float32 or float64; got {x.dtype}. Use a "
                         "fixed-step method, such as model.blocks.method = 'rk4', or float32 without autocast.")
    if not x.numel():  # it has no error to measure
        return x.expand(len(times), *x.shape), 0
    with torch.device('cpu'):  # its tables are made at import
        import torchdiffeq
    states, evaluations = [x], 0

    def slope(piece: Field, context: Context, t: Tensor, x: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return piece(t, x, context, '')
    # no error estimate holds across a jump
    jumps = [t for t in field.jumps if times[0] + _SAME < t < times[-1] - _SAME]
    kind = x.device.type  # whose autocast would count as an error
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        for start, end in pairwise([times[0], *jumps, times[-1]]):
            piece = field.select(start) if field.jumps else field  # a wrapper selects what is inside
            inner = [t for t in times if start + _SAME < t < end - _SAME]
            inside = context._replace(weights=piece.fold())
            grid = torch.tensor([start, *inner, end], dtype=x.dtype, device=x.device)
            try:
                path = torchdiffeq.odeint(
                    partial(slope, piece, inside), x, grid, rtol=config.rtol, atol=config.atol, method=config.method,
                    options={'step_t': grid[-1:],  # a step ends there: interpolation is not controlled
                             'dtype': x.dtype if kind == 'mps' else torch.float64})  # MPS has none
            except AssertionError as e:  # the step size underflows or the state is not finite
                raise FloatingPointError(
                    f"'{config.method}' failed between t = {start:g} and {end:g} after {evaluations} evaluations: {e}. "
                    'Loosen rtol and atol, or check the field for divergence.') from e
            x = path[-1]
            states += path[1:-1].unbind()
            if any(abs(end - t) < _SAME for t in times):
                states.append(x)
    return torch.stack(states), evaluations
