"""The error of the discretisation: how far K steps of a method are from the solution of the ODE, and where."""
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..convert.merge import check_not_merged
from ..ode.blocks import OdeBlocks, find_ode_blocks
from ..ode.fields import Context
from ..ode.methods import METHODS
from ..ode.solver import Solver
from ..settings import integer, many, one_of
from .flow import Flow, Images, PerImage, batches, follow, norms

__all__ = ['DiscretisationError', 'discretisation_errors']


@dataclass(frozen=True, repr=False)
class DiscretisationError(PerImage):
    """The error of one method with K steps, for some images. All distances are relative to how far the exact solution
    moves: the distance between its states at 0 and T.

    Attributes:
        error: Distance of the last state from the exact solution's [B].
        local: Error that each step makes on its own, from the state where it starts [B, K].
        reference: Distance of the reference solution from one with half as many steps: how accurate `error` is [B].
        method: The method.
        steps: Number K of steps.
        times: The times at which the steps end [K].
    """
    error: Tensor
    local: Tensor
    reference: Tensor
    method: str = field(metadata={'shared': True})
    steps: int = field(metadata={'shared': True})
    times: Tensor = field(metadata={'shared': True})

    def __repr__(self) -> str:
        return (f'DiscretisationError({self.method}, K = {self.steps}: {self.error.mean():.2e}, reference '
                f'{self.reference.mean():.0e})')


def discretisation_errors(
        model: Any,
        images: Images,
        *,
        methods: str | Sequence[str] | None = None,
        steps: int | Sequence[int] | None = None,
        fine: int = 8,
        batch_size: int = 16,
) -> list[DiscretisationError]:
    """Compare solutions of a model's ODE with one on a fine grid.

    The reference is rk4 with `fine` steps per unit of time. Local errors are measured along the numerical solution,
    against the reference started from the same state.

    Args:
        model: ODE-ViT with one sequence of blocks. Its own method and steps stay as they are.
        images, batch_size: See `timm_odevit.dynamics`.
        methods: Fixed-step method or methods; None for the model's own.
        steps: Number or numbers of steps; None for half, all and twice the model's own.
        fine: Steps of the reference per unit of time, an even number. It takes 6 fine T evaluations per image, and
            every method and number of steps 4 fine T more.

    Returns:
        One DiscretisationError per method and number of steps, in this order.

    Raises:
        TypeError: The model is not an ODE-ViT.
        ValueError: An argument is out of range, or the model is merged.

    Examples:
        >>> for error in discretisation_errors(student, images, methods=['euler', 'rk4'], steps=[6, 12]):
        ...     print(error)

    Source: Hairer, Nørsett & Wanner, Solving ODEs I, II.3.
    """
    odes = find_ode_blocks(model)
    if len(odes) != 1:
        raise TypeError(f'A {type(model).__name__} has ' + (
            f'{len(odes)} stages; this compares the solution of one ODE.' if odes else
            'no ODE whose solution could be compared. Convert it first.'))
    check_not_merged(model)
    own = odes[0]
    chosen = [methods] if isinstance(methods, str) else [own.method] if methods is None else list(methods)
    for method in chosen:
        one_of(list(METHODS))('method', method)
    usual = sorted({max(own.steps // 2, 1), own.steps, 2 * own.steps})
    given: Any = usual if steps is None else steps if isinstance(steps, (list, tuple)) else [steps]
    counts = many(integer(1), 'whole numbers of at least 1')('steps', given)
    if not counts or not chosen:
        raise ValueError('There are no methods or no steps. Give at least one of each.')
    if type(fine) is not int or fine < 2 or fine % 2:
        raise ValueError(f'fine must be an even number of at least 2; got {fine!r}.')

    rows = []
    for batch in batches(images, batch_size):
        with follow(model, batch) as flow:
            solutions = _Solutions(own, flow, fine)
            rows.append([solutions.compare(method, count) for method in chosen for count in counts])
    return [DiscretisationError.joined(list(each)) for each in zip(*rows, strict=True)]


class _Solutions:
    """Solutions of one model's ODE for some images, with any method and number of steps.

    Distances are relative to that between the states of the exact solution at its start and its end.
    """

    def __init__(self, ode: OdeBlocks, flow: Flow, fine: int) -> None:
        self.ode, self.fine = ode, fine
        first = len(ode.before)
        args, kwargs = flow.maps[first].args[1:]  # type: ignore[attr-defined]
        given = len(args) == 1 and isinstance(args[0], Context)
        context = args[0] if given else ode.shared.context(args, kwargs)
        self.block_kwargs = context.block_kwargs
        self.start = flow.states()[first]
        self.exact = self.reference(self.start, ode.t, ode.end, fine)
        self.half = norms(self.reference(self.start, ode.t, ode.end, fine // 2) - self.exact)
        self.path = norms(self.start - self.exact).clamp_min(torch.finfo(self.start.dtype).tiny)

    def maps(self, method: str, steps: int, t: float, end: float) -> list[Any]:
        config = replace(self.ode.config, method=method, steps=steps, T=end - t, adjoint=False)
        solver: Any = Solver(config, self.ode.shared, t)
        return [lambda x, step=step: step(x, step.field.context((), self.block_kwargs, step.field.fold()))
                for step in solver]

    def reference(self, x: Tensor, t: float, end: float, fine: int) -> Tensor:
        """It starts anew where the field jumps, and has a step end at every layer."""
        stops = [t, *(float(s) for s in range(math.floor(t + 1e-6) + 1, math.ceil(end - 1e-6))), end]
        for a, b in pairwise(stops):
            for step in self.maps('rk4', max(1, math.ceil(fine * (b - a) - 1e-6)), a, b):
                x = step(x)
        return x

    def compare(self, method: str, steps: int) -> DiscretisationError:
        times = torch.linspace(self.ode.t, self.ode.end, steps + 1, dtype=torch.float64)
        x, local = self.start, []
        for step, (t, end) in zip(self.maps(method, steps, self.ode.t, self.ode.end), pairwise(times.tolist()),
                                  strict=True):
            after = step(x)
            local.append(norms(after - self.reference(x, t, end, self.fine)) / self.path)
            x = after
        return DiscretisationError(norms(x - self.exact) / self.path, torch.stack(local, 1), self.half / self.path,
                                   method, steps, times[1:])
