"""How far the last state is from the solution of the ODE, and how far it may be moved before the class changes."""
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..data.batches import read_batches
from ..ode.blocks import OdeBlocks, find_ode_blocks
from ..ode.fields import Context
from ..ode.methods import METHODS
from ..ode.solver import Solver
from ..settings import one_of
from .flow import Flow, Images, PerImage, along, follow, joined, noise, norms, over_images, unit


@dataclass(frozen=True, repr=False)
class DiscretisationError(PerImage):
    """Errors of a method with K steps, relative to the distance between the start and the end of the exact solution."""
    error: Tensor  # [B], distance of the last state from the reference solution's
    local: Tensor  # [B, K], what each step adds from the state where it starts
    reference: Tensor  # [B], how accurate `error` is: distance of the reference from one with half as many steps
    method: str
    steps: int
    times: Tensor  # [K], at which the steps end


def discretisation_errors(
        model: Any, images: Images, *, methods: str | Sequence[str] | None = None,
        steps: int | Sequence[int] | None = None, fine: int = 8, batch_size: int = 16,
) -> list[DiscretisationError]:
    """Compare solutions of a model's ODE with one by rk4 on a fine grid.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`; an ODE-ViT.
        methods: Fixed-step method or methods; None for the model's own.
        steps: Number or numbers of steps; None for half, all and twice the model's own.
        fine: Steps of the reference per unit of time, an even number.

    Returns one DiscretisationError per method and number of steps.

    Examples:
        >>> for error in discretisation_errors(student, images, methods=['euler', 'rk4'], steps=[6, 12]):
        ...     print(error)

    Source: Hairer, Nørsett & Wanner, Solving ODEs I, II.3.
    """
    odes = find_ode_blocks(model)
    if len(odes) != 1:
        raise TypeError(f'A {type(model).__name__} has {len(odes)} ODEs. Give an ODE-ViT with one sequence of blocks.')
    ode = odes[0]
    if steps is None:
        steps = sorted({max(ode.steps // 2, len(ode.shared.borders) + 1), ode.steps, 2 * ode.steps})
    if methods is None or isinstance(methods, str):
        methods = [methods or ode.method]
    each = [(one_of(list(METHODS))('method', method), count)
            for method in methods for count in ([steps] if isinstance(steps, int) else steps)]
    rows = []
    for batch, _ in read_batches(images, labels=False, size=batch_size):
        with follow(model, batch) as flow:
            rows.append(_errors(ode, flow, fine, each))
    return [joined(parts) for parts in zip(*rows, strict=True)]


def _errors(ode: OdeBlocks, flow: Flow, fine: int, each: Sequence[tuple[str, Any]]) -> list[DiscretisationError]:
    """Local errors are along the numerical solution, against the reference started from the same state."""
    first = len(ode.before)
    args, kwargs = flow.maps[first].args[1:]  # type: ignore[attr-defined]
    given = len(args) == 1 and isinstance(args[0], Context)
    block_kwargs = (args[0] if given else ode.shared.context(args, kwargs)).block_kwargs

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


@dataclass(frozen=True, repr=False)
class Region(PerImage):
    """The region around a model's last state in which the head gives the same class, over the tokens that it reads.

    Without a student, what is said of it is NaN or False.
    """
    random: Tensor  # [B, directions], radius; infinite where the class never changes, NaN where nothing is finite
    worst: Tensor  # [B], radius along the worst direction found, an upper bound on the distance to the boundary
    norm: Tensor  # [B], of the last state
    distance: Tensor  # [B], of the student's last state
    towards: Tensor  # [B], radius in the student's direction
    same: Tensor  # [B], whether the student gives the model's class

    @property
    def inside(self) -> Tensor:
        """Whether the student's last state is nearer than the boundary in the worst direction [B]."""
        return self.distance < self.worst


def contraction_regions(
        model: Any, images: Images = None, *, student: Any = None, directions: int = 16, limit: float = 10.,
        batch_size: int = 64, seed: int = 0,
) -> Region:
    """How far the last state of each image may be moved before norm and head give another class.

    A student that ends nearer to its teacher's last state than that gives the teacher's class with the teacher's head.
    Distances are found by search, not guaranteed.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`; the model, such as the teacher, has a head.
        student: A model of the same width and tokens, to compare with the region.
        directions, seed: Number of random directions, and their seed.
        limit: Largest radius that is tried, in units of the norm of the state.

    Examples:
        >>> found = contraction_regions(teacher, images, student=student)
        >>> print(found.inside)    # [B]

    Source: the contraction region of ODE-ViT, arXiv 2511.16501; DeepFool, arXiv 1511.04599.
    """
    def measure(flow: Flow, other: Flow | None = None) -> Region:
        x = flow.states()[-1]
        label, mask = flow.logits(x).argmax(dim=1), _read_by_the_head(flow, x)
        norm = norms(x * mask)
        radius = partial(_radius, flow, x, label, limit * norm)
        generator = torch.Generator().manual_seed(seed)
        radii = torch.stack([radius(noise(x, generator) * mask) for _ in range(directions)], dim=1)
        worst = torch.fmin(radius(_worst(flow, x, label, mask)), radii.amin(dim=1))
        if other is None:
            none = torch.full_like(norm, math.nan)
            return Region(radii, worst, norm, none, none, torch.zeros_like(label, dtype=torch.bool))
        y = other.states()[-1]
        way = (y - x) * mask
        towards = radius(way)
        same = other.logits(y).argmax(dim=1) == label
        return Region(radii, torch.fmin(worst, towards), norm, norms(way), towards, same)
    return over_images(measure, model, images, batch_size, student)


def _read_by_the_head(flow: Flow, x: Tensor) -> Tensor:
    """1 for the tokens that norm and head read, such as the class token, 0 for others [1, ..., 1]."""
    with torch.enable_grad():  # at a random state: those of the images may not be finite
        state = noise(x[:1], torch.Generator().manual_seed(0)).requires_grad_()
        gradient, = torch.autograd.grad(flow.logits(state).square().sum(), state)
    return (gradient != 0).any(dim=-1, keepdim=True).to(x)


def _radius(flow: Flow, x: Tensor, label: Tensor, limit: Tensor, way: Tensor) -> Tensor:
    """The smallest radius found at which the class is another: on a grid of 24 radii, then by bisection [B]."""
    direction = unit(way)

    def changed(r: Tensor) -> Tensor:
        return flow.logits(x + along(r, x) * direction).argmax(dim=1) != label
    low, high = torch.zeros_like(limit), torch.full_like(limit, math.inf)
    for exponent in torch.linspace(-9, 0, 24).tolist():
        r = limit * 2. ** exponent
        high = torch.where(high.isinf() & changed(r), r, high)
        low = torch.where(high.isinf(), r, low)
    for _ in range(12):  # where the class never changes, high stays infinite
        middle = torch.where(high.isfinite(), (low + high) / 2, low)
        beyond = changed(middle) & high.isfinite()
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    finite = flow.logits(x).isfinite().all(dim=1) & direction.flatten(1).isfinite().all(dim=1) & limit.isfinite()
    return high.where(finite, torch.nan)


def _worst(flow: Flow, x: Tensor, label: Tensor, mask: Tensor) -> Tensor:
    """A direction in which the class ends soon, by repeated steps to the nearest linearised boundary."""
    shift = torch.zeros_like(x)
    for _ in range(6):
        with torch.enable_grad():
            state = (x + shift).detach().requires_grad_()
            logits = flow.logits(state)
            rivals = logits.detach().scatter(1, label[:, None], -math.inf).topk(min(10, logits.shape[1] - 1)).indices
            own = logits.gather(1, label[:, None])[:, 0]
            best, step = torch.full_like(own, math.inf).detach(), torch.zeros_like(x)
            for rival in rivals.unbind(1):
                gap = own - logits.gather(1, rival[:, None])[:, 0]
                gradient = torch.autograd.grad(gap.sum(), state, retain_graph=True)[0] * mask
                size = norms(gradient).clamp_min(1e-12)
                away = gap.detach().clamp_min(0.) / size
                move = -along((away + 1e-4 / size) / size, x) * gradient
                step, best = torch.where(along(away < best, x), move, step), torch.minimum(best, away)
        moved = along(flow.logits(x + shift).argmax(dim=1) != label, x)
        shift = torch.where(moved, shift, shift + step)
    return shift
