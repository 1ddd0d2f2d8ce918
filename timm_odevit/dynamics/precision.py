"""How far the last state is from the solution of the ODE."""
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..data.batches import read_batches
from ..ode.blocks import OdeBlocks, the_ode
from ..ode.methods import METHODS
from ..ode.solver import Solver
from ..settings import integer, one_of
from .flow import Flow, Images, PerImage, follow, joined, norms


@dataclass(frozen=True, repr=False)
class DiscretisationError(PerImage):
    """Errors of a method with K steps, relative to the distance between the start and the end of the exact solution.

    Attributes:
        error: [B], distance of the last state from the reference solution's.
        local: [B, K], what each step adds from the state where it starts.
        reference: [B], how accurate `error` is: distance of the reference from one with half as many steps.
        times: [K], at which the steps end.
    """
    error: Tensor
    local: Tensor
    reference: Tensor
    method: str
    steps: int
    times: Tensor


def discretisation_errors(
        model: Any, images: Images, *, methods: str | Sequence[str] | None = None,
        steps: int | Sequence[int] | None = None, fine: int = 8, batch_size: int = 16,
) -> list[DiscretisationError]:
    """Compare solutions of an ODE-ViT's ODE with one by rk4 on a fine grid; see `timm_odevit.dynamics`.

    Args:
        methods: Fixed-step method or methods; None for the model's own.
        steps: Number or numbers of steps; None for half, all and twice the model's own.
        fine: Steps of the reference per unit of time, an even number.

    Examples:
        >>> for error in discretisation_errors(student, images, methods=['euler', 'rk4'], steps=[6, 12]):
        ...     print(error)

    Source: Hairer, Nørsett & Wanner, Solving ODEs I, II.3.
    """
    ode = the_ode(model)
    if getattr(model, 'rope_mixed', False):
        raise TypeError(f'The blocks of this {type(model).__name__} have RoPE tables of their own, so it has no ODE.')
    if integer(2)('fine', fine) % 2:
        raise ValueError(f'fine must be even; got {fine}.')
    if steps is None:
        steps = sorted({max(ode.steps // 2, ode.fewest_steps), ode.steps, 2 * ode.steps})
    if methods is None or isinstance(methods, str):
        methods = [methods or ode.method]
    each = [(one_of(METHODS)('method', method), count)
            for method in methods for count in (steps if isinstance(steps, Iterable) else [steps])]
    rows = []
    for batch, _ in read_batches(images, labels=False, size=batch_size):
        with follow(model, batch) as flow:
            rows.append(_errors(ode, flow, fine, each))
    return [joined(parts) for parts in zip(*rows, strict=True)]


def _errors(ode: OdeBlocks, flow: Flow, fine: int, each: Sequence[tuple[str, Any]]) -> list[DiscretisationError]:
    """Local errors are along the numerical solution, against the reference started from the same state."""
    first = len(ode.before)
    args, kwargs = flow.maps[first].args[1:]  # type: ignore[attr-defined]
    block_kwargs = ode.shared.context(args, kwargs).block_kwargs

    def solve(x: Tensor, method: str, steps: int, t: float, end: float) -> Iterator[tuple[Tensor, float]]:
        """The state at the end of each step, and its time."""
        solver: Any = Solver(replace(ode.config, method=method, steps=steps, T=end - t), ode.shared, t)
        for step in solver:
            x = step(x, step.field.context((), block_kwargs, step.field.fold()))
            yield x, step.t + step.h

    def reference(x: Tensor, t: float, end: float, fine: int = fine) -> Tensor:
        # a step ends at every layer, where the field jumps
        stops = [t, *(float(s) for s in range(math.floor(t + 1e-6) + 1, math.ceil(end - 1e-6))), end]
        for a, b in pairwise(stops):
            *_, (x, _) = solve(x, 'rk4', max(1, math.ceil(fine * (b - a) - 1e-6)), a, b)
        return x
    start = flow.states()[first]
    exact = reference(start, ode.t, ode.end)
    path = norms(start - exact).clamp_min(torch.finfo(start.dtype).tiny)
    half = norms(reference(start, ode.t, ode.end, fine // 2) - exact) / path
    found = []
    for method, steps in each:
        states = [(start, ode.t), *solve(start, method, steps, ode.t, ode.end)]
        local = [norms(after - reference(before, t, end)) / path for (before, t), (after, end) in pairwise(states)]
        found.append(DiscretisationError(
            norms(states[-1][0] - exact) / path, torch.stack(local, 1), half, method, steps,
            torch.tensor([t for _, t in states[1:]], dtype=torch.float64)))
    return found
