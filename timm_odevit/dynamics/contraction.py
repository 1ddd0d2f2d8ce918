"""How far a state may be moved before the class changes."""
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..settings import integer, number
from .flow import Flow, Images, PerImage, along, check_derivatives, noise, norms, over_images, unit

__all__ = ['Region', 'contraction_regions']


@dataclass(frozen=True, repr=False)
class Region(PerImage):
    """The region around a model's last state in which the head gives the same class. Distances are Euclidean, over the
    tokens that the head reads.

    Attributes:
        random: Radius along each random direction [B, directions]; infinite where the class never changes, NaN where
            the state or its logits are not finite.
        worst: Radius along the worst direction that was found: an upper bound on the distance to the boundary [B].
        norm: Norm of the last state [B], for comparison.
        distance: Distance of the student's last state [B]; NaN without one.
        towards: Radius along the direction to the student's last state [B]; NaN without one.
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
    teacher's head, whatever its error looks like. Distances to the boundary are found by search, not guaranteed.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`; the model, such as the teacher, has a head.
        student: A model of the same width and tokens, whose distance is compared with the region.
        directions: Number of random directions.
        limit: Largest radius that is tried, in units of the norm of the state.
        seed: Seed of the directions.

    Returns:
        Region. The worst direction is searched for by linear approximations of the boundaries to the ten classes that
        come next.

    Raises:
        TypeError: The model has no head for a state.
        ValueError: An argument is out of range, or student and model have states of different shapes.

    Examples:
        >>> found = contraction_regions(teacher, images, student=student)
        >>> print(found.inside)    # [B]

    Source: the contraction region of ODE-ViT, arXiv 2511.16501; DeepFool, arXiv 1511.04599.
    """
    directions, limit = integer(1)('directions', directions), number(open='(')('limit', limit)

    def measure(flow: Flow, other: Flow | None = None) -> Region:
        return _region(flow, other, directions, limit, seed)
    return over_images(measure, model, images, batch_size, *([] if student is None else [student]))


def _region(flow: Flow, other: Flow | None, directions: int, limit: float, seed: int) -> Region:
    x = flow.states()[-1]
    check_derivatives(x)
    logits = flow.logits(x)
    label, mask = logits.argmax(dim=1), _read_by_the_head(flow, x)
    norm = norms(x * mask)
    generator = torch.Generator().manual_seed(seed)
    random = [_radius(flow, x, unit(noise(x, generator) * mask), label, limit * norm)
              for _ in range(directions)]
    worst = _radius(flow, x, unit(_worst(flow, x, label, mask)), label, limit * norm)
    distance = towards = torch.full_like(norm, math.nan)
    same = torch.zeros_like(label, dtype=torch.bool)
    if other is not None:
        y = other.states()[-1]
        if y.shape != x.shape:
            raise ValueError(f"The student's states have the shape {list(y.shape)}, the model's {list(x.shape)}, so "
                             'they cannot be compared.')
        way = (y - x) * mask
        distance = norms(way)
        towards = _radius(flow, x, unit(way), label, limit * norm)
        same = other.logits(y).argmax(dim=1) == label
        worst = torch.fmin(worst, towards)
    found = torch.stack(random, dim=1)
    return Region(found, torch.fmin(worst, found.amin(dim=1)), norm, distance, towards, same)


def _read_by_the_head(flow: Flow, x: Tensor) -> Tensor:
    """1 for the parts of the state that norm and head read, such as the class token, and 0 for the others [1, ...]."""
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
    """A direction in which the boundary of the class is near: repeated steps to the nearest linearised boundary."""
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
