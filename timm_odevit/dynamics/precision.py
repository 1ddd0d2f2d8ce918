"""How far the last state is from the solution of the ODE, and how far it may be moved before the class changes."""
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..convert.merge import check_not_merged
from ..ode.blocks import OdeBlocks, find_ode_blocks
from ..ode.fields import Context
from ..ode.methods import METHODS
from ..ode.solver import Solver
from ..settings import integer, many, number, one_of
from .flow import Flow, Images, PerImage, along, batches, check_derivatives, follow, noise, norms, over_images, unit

__all__ = ['DiscretisationError', 'Region', 'contraction_regions', 'discretisation_errors']


@dataclass(frozen=True, repr=False)
class DiscretisationError(PerImage):
    """The error of one method with K steps, relative to the distance between the exact solution's states at 0 and T.

    Attributes:
        error: Distance of the last state from the exact solution's [B].
        local: Error that each step makes on its own, from the state where it starts [B, K].
        reference: Distance of the reference solution from one with half as many steps: how accurate `error` is [B].
        method, steps: The method, and its number K of steps.
        times: The times at which the steps end [K].
    """
    error: Tensor
    local: Tensor
    reference: Tensor
    method: str
    steps: int
    times: Tensor

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
    """Compare solutions of a model's ODE with one by rk4 on a fine grid.

    Local errors are measured along the numerical solution, against the reference started from the same state.

    Args:
        model: ODE-ViT with one sequence of blocks. Its own method and steps stay as they are.
        images, batch_size: See `timm_odevit.dynamics`.
        methods: Fixed-step method or methods; None for the model's own.
        steps: Number or numbers of steps; None for half, all and twice the model's own.
        fine: Steps of the reference per unit of time, an even number.

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
        raise TypeError(f'A {type(model).__name__} has {len(odes)} ODEs; this measures the solution of one. '
                        f"{'Give a model with one sequence of blocks' if odes else 'Convert it first'}.")
    check_not_merged(model)
    own = odes[0]
    chosen = [methods] if isinstance(methods, str) else [own.method] if methods is None else list(methods)
    usual = sorted({max(own.steps // 2, 1), own.steps, 2 * own.steps})
    counts = many(integer(1), 'whole numbers of at least 1')(
        'steps', usual if steps is None else steps if isinstance(steps, (list, tuple)) else [steps])
    chosen = [one_of(list(METHODS))('method', method) for method in chosen]
    if not counts or not chosen:
        raise ValueError('There are no methods or no steps. Give at least one of each.')
    if integer(2)('fine', fine) % 2:
        raise ValueError(f'fine must be an even number of at least 2; got {fine!r}.')

    rows = []
    for batch in batches(images, batch_size):
        with follow(model, batch) as flow:
            solutions = _Solutions(own, flow, fine)
            rows.append([solutions.compare(method, count) for method in chosen for count in counts])
    return [DiscretisationError.joined(list(each)) for each in zip(*rows, strict=True)]


class _Solutions:
    """Solutions of a model's ODE for some images."""

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
        """By rk4; a step ends at every layer, where the field jumps."""
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


@dataclass(frozen=True, repr=False)
class Region(PerImage):
    """The region around a model's last state in which the head gives the same class, over the tokens that it reads.

    Attributes:
        random: Radius along each random direction [B, directions]; infinite where the class never changes, NaN where
            the state or its logits are not finite.
        worst: Radius along the worst direction found, an upper bound on the distance to the boundary [B].
        norm: Norm of the last state [B].
        distance, towards: Distance of the student's last state, and the radius in its direction [B]; or NaN.
        same: Whether the student gives the model's class [B]; all False without one.
    """
    random: Tensor
    worst: Tensor
    norm: Tensor
    distance: Tensor
    towards: Tensor
    same: Tensor

    @property
    def inside(self) -> Tensor:
        """Whether the student's last state is nearer than the boundary in the worst direction [B]."""
        return self.distance < self.worst


def contraction_regions(
        model: Any, images: Images = None, *, student: Any = None, directions: int = 16, limit: float = 10.,
        batch_size: int = 64, seed: int = 0,
) -> Region:
    """How far the last state of each image may be moved before norm and head give another class.

    A student that ends nearer to its teacher's last state than the boundary gives the teacher's class with the
    teacher's head. Distances are found by search, not guaranteed.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`; the model, such as the teacher, has a head.
        student: A model of the same width and tokens, whose distance is compared with the region.
        directions: Number of random directions.
        limit: Largest radius that is tried, in units of the norm of the state.
        seed: Seed of the directions.

    Raises:
        TypeError: The model has no head for a state.
        ValueError: An argument is out of range, or student and model have states of different shapes.

    Examples:
        >>> found = contraction_regions(teacher, images, student=student)
        >>> print(found.inside)    # [B]

    Source: the contraction region of ODE-ViT, arXiv 2511.16501; DeepFool, arXiv 1511.04599.
    """
    directions, limit = integer(1)('directions', directions), number(open='(')('limit', limit)

    return over_images(partial(_region, directions, limit, seed), model, images, batch_size, student)


def _region(directions: int, limit: float, seed: int, flow: Flow, other: Flow | None = None) -> Region:
    x = flow.states()[-1]
    check_derivatives(x)
    logits = flow.logits(x)
    label, mask = logits.argmax(dim=1), _read_by_the_head(flow, x)
    norm = norms(x * mask)
    generator = torch.Generator().manual_seed(seed)

    def radius(direction: Tensor) -> Tensor:
        return _radius(flow, x, unit(direction), label, limit * norm)
    radii = torch.stack([radius(noise(x, generator) * mask) for _ in range(directions)], dim=1)
    worst = radius(_worst(flow, x, label, mask))
    distance = towards = torch.full_like(norm, math.nan)
    same = torch.zeros_like(label, dtype=torch.bool)
    if other is not None:
        y = other.states()[-1]
        if y.shape != x.shape:
            raise ValueError(f'States {list(y.shape)} and {list(x.shape)} cannot be compared. Give the student of this '
                             'model.')
        way = (y - x) * mask
        distance = norms(way)
        towards = radius(way)
        same = other.logits(y).argmax(dim=1) == label
        worst = torch.fmin(worst, towards)
    return Region(radii, torch.fmin(worst, radii.amin(dim=1)), norm, distance, towards, same)


def _read_by_the_head(flow: Flow, x: Tensor) -> Tensor:
    """1 for the tokens that norm and head read, such as the class token, 0 for others [1, ..., 1]."""
    with torch.enable_grad():  # at a random state: those of the images may not be finite
        state = noise(x[:1], torch.Generator().manual_seed(0)).requires_grad_()
        gradient, = torch.autograd.grad(flow.logits(state).square().sum(), state)
    return (gradient != 0).any(dim=-1, keepdim=True).to(x)


def _radius(flow: Flow, x: Tensor, direction: Tensor, label: Tensor, limit: Tensor) -> Tensor:
    """The smallest radius found at which the class is another: on a grid of 24 radii, then by bisection [B]."""
    def changed(r: Tensor) -> Tensor:
        return flow.logits(x + along(r, x) * direction).argmax(dim=1) != label
    low, high = torch.zeros_like(limit), torch.full_like(limit, math.inf)
    for exponent in torch.linspace(-9, 0, 24).tolist():
        r = limit * 2. ** exponent
        new = high.isinf() & changed(r)
        high = torch.where(new, r, high)
        low = torch.where(high.isinf(), r, low)
    for _ in range(12):  # where the class never changes, high stays infinite
        middle = torch.where(high.isfinite(), (low + high) / 2, low)
        beyond = changed(middle) & high.isfinite()
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    finite = flow.logits(x).isfinite().all(dim=1) & direction.flatten(1).isfinite().all(dim=1) & limit.isfinite()
    return high.where(finite, torch.nan)


def _worst(flow: Flow, x: Tensor, label: Tensor, mask: Tensor, rounds: int = 6) -> Tensor:
    """A direction in which the class ends soon, by repeated steps to the nearest linearised boundary."""
    shift = torch.zeros_like(x)
    for _ in range(rounds):
        with torch.enable_grad():
            state = (x + shift).detach().requires_grad_()
            logits = flow.logits(state)
            rivals = logits.detach().scatter(1, label[:, None], -math.inf).topk(min(10, logits.shape[1] - 1)).indices
            own = logits.gather(1, label[:, None])[:, 0]
            best, step = torch.full_like(own, math.inf).detach(), torch.zeros_like(x)
            for rival in rivals.unbind(1):
                gap = own - logits.gather(1, rival[:, None])[:, 0]
                gradient, = torch.autograd.grad(gap.sum(), state, retain_graph=True)
                gradient = gradient * mask
                size = norms(gradient).clamp_min(1e-12)
                away = gap.detach().clamp_min(0.) / size
                nearer = along(away < best, x)
                move = -along((away + 1e-4 / size) / size, x) * gradient
                step, best = torch.where(nearer, move, step), torch.minimum(best, away)
        moved = along(flow.logits(x + shift).argmax(dim=1) != label, x)
        shift = torch.where(moved, shift, shift + step)
    return shift
