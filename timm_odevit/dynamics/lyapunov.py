"""Finite-time Lyapunov exponents of the map that is deployed."""
import math
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from ..settings import checks_keywords, whole
from .flow import Flow, Images, Jacobian, PerImage, over_images

__all__ = ['Exponents', 'lyapunov_exponents']


@dataclass(frozen=True, repr=False)
class Exponents(PerImage):
    """Finite-time Lyapunov exponents of some images; the unit is 1/time, and one unit of time is one block.

    Attributes:
        values: The leading exponents at the end [B, m], descending in the limit of a long time; NaN if there are none.
        running: The exponents up to each time [B, K, m].
        drift: How far the running values of the last half of the time lie from the final ones [B, m]: near 0 for
            exponents that have converged. A dozen steps give finite-time values, not limits.
        reasons: For each image, why there are no exponents; None if there are.
        times: The times at which `running` is given [K].
    """
    values: Tensor
    running: Tensor
    drift: Tensor
    reasons: Tuple[Optional[str], ...]
    times: Tensor = field(metadata={'shared': True})

    def __repr__(self) -> str:
        largest = self.values[:, 0]
        good = largest[~largest.isnan()]
        missing = len(largest) - len(good)
        spread = f' ± {good.std():.4f}' if len(good) > 1 else ''
        shown = f', largest {good.mean():.4f}{spread} per block' if len(good) else ''
        return f"Exponents({len(largest)} images{shown}{f', {missing} without: {self._reason()}' if missing else ''})"

    def _reason(self) -> str:
        return next(reason for reason in self.reasons if reason is not None)


@checks_keywords
def lyapunov_exponents(
        model: Any,
        images: Images = None,
        *,
        count: int = 1,
        sweeps: int = 2,
        tokens: str = 'all',
        batch_size: int = 16,
        seed: int = 0,
) -> Exponents:
    """The leading finite-time Lyapunov exponents of a model, for each image.

    They tell how fast states near the one that the model passes through draw apart (above 0) or together (below 0).
    Tangent vectors are carried along by exact products with the Jacobian of each step that the model runs, with its own
    method and number of steps and in the space of all tokens, and orthogonalised after each. Before that, they are
    turned towards the directions that grow most until the end, so that the largest exponent is log(s) / T with the
    largest singular value s of the Jacobian of the whole map.

    Args:
        model: timm model with one sequence of blocks, an ODE-ViT or an ordinary ViT; or a Flow, without images.
        images: Images [B, C, H, W], normalised for the model, on its device; or a loader of such batches.
        count: Number m of exponents, the largest first.
        sweeps: How often the tangent vectors are carried to the end and, by the transposed Jacobians, back, before the
            exponents are measured. 0 leaves them random at the start: for times so long that they align by themselves.
        tokens: 'all' for the whole state; 'class' for perturbations of the class token alone, held to it after each
            step, so that what passes through the other tokens is left out.
        batch_size: Images at a time; more need more memory, for all states, m tangent vectors, and what two backward
            passes through a step need.
        seed: Seed of the first tangent vectors.

    Returns:
        Exponents. For an image whose state or tangent vectors are not finite or vanish, they are NaN, with a reason.

    Raises:
        TypeError: The model has no single sequence of blocks.
        ValueError: An argument is out of range, there are no images, or the method is adaptive.

    Source: Benettin et al., Meccanica 15 (1980), by QR decomposition; Dieci, Russell & Van Vleck, SIAM J. Numer. Anal.
    34 (1997).
    """
    if tokens not in ('all', 'class'):
        raise ValueError(f"tokens must be 'all' or 'class'; got {tokens!r}.")
    count, sweeps = whole(1)('count', count), whole()('sweeps', sweeps)

    def measure(flow: Flow) -> Exponents:
        return _exponents(flow, count, tokens == 'class', sweeps, seed)
    return over_images(measure, model, images, batch_size)


def _exponents(flow: Flow, count: int, only_class: bool, sweeps: int, seed: int) -> Exponents:
    x = flow.start
    if only_class and x.ndim != 3:
        raise ValueError(f"tokens='class' needs states [B, N, D]; these have the shape {list(x.shape)}.")
    B, size = len(x), x[0, :1].numel() if only_class else x[0].numel()
    if count > size:
        raise ValueError(f'count must be at most the number of dimensions, {size}; got {count}.')
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(size, count, generator=generator, dtype=torch.float64)  # the same for every image
    Q = torch.linalg.qr(first)[0].to(x).expand(B, size, count)
    states = flow.states()
    for _ in range(sweeps):
        for step, state in zip(flow.maps, states, strict=False):
            Q, _ = _orthogonal(_products(Jacobian(step, state).push, state, Q))
        for step, state in reversed(list(zip(flow.maps, states, strict=False))):
            Q, _ = _orthogonal(_products(Jacobian(step, state).pull, state, Q))
    return _measure(flow, states, Q)


def _measure(flow: Flow, states: List[Tensor], Q: Tensor) -> Exponents:
    B, _, count = Q.shape
    total = torch.zeros(B, count, dtype=torch.float64, device=Q.device)
    running: List[Tensor] = []
    reasons: List[Optional[str]] = [None] * B
    for step, before, after, t in zip(flow.maps, states, states[1:], flow.times[1:], strict=False):
        moved = _products(Jacobian(step, before).push, before, Q)
        Q, growth = _orthogonal(moved)
        whole = moved.isfinite().flatten(1).all(1) & after.isfinite().flatten(1).all(1)
        _explain(reasons, ~whole, f'the state or its tangent vectors are not finite at t = {t:g}')
        _explain(reasons, (growth == 0).any(1), f'the tangent vectors vanish at t = {t:g}')
        total = total + growth.double().log()
        running.append(total / (t - flow.times[0]))
    path = torch.stack(running, dim=1)
    path[torch.tensor([reason is not None for reason in reasons])] = math.nan
    times = torch.tensor(flow.times[1:], dtype=torch.float64)
    late = times - flow.times[0] >= (times[-1] - flow.times[0]) / 2
    drift = (path[:, late] - path[:, -1:]).abs().amax(dim=1)
    return Exponents(path[:, -1], path, drift, tuple(reasons), times)


def _products(product: Callable[[Tensor], Tensor], state: Tensor, Q: Tensor) -> Tensor:
    """The products of a step's Jacobian, or of its transpose, with tangent vectors [B, n, m]."""
    size = Q.shape[1]
    return torch.stack([product(_whole(v, state)).flatten(1)[:, :size] for v in Q.unbind(-1)], dim=-1)


def _whole(v: Tensor, state: Tensor) -> Tensor:
    """Vectors [B, n] in the shape of a state; those of the class token alone are 0 in the other tokens."""
    missing = state[0].numel() - v.shape[1]
    return torch.cat([v, v.new_zeros(len(v), missing)], dim=1).view_as(state)


def _orthogonal(vectors: Tensor) -> Tuple[Tensor, Tensor]:
    """An orthonormal basis of vectors [B, n, m], and how long each vector was, beyond those before it [B, m]."""
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    Q, R = torch.linalg.qr(torch.nan_to_num(wide, posinf=0., neginf=0.))
    return Q.to(vectors.dtype), R.diagonal(dim1=-2, dim2=-1).abs()


def _explain(reasons: List[Optional[str]], where: Tensor, reason: str) -> None:
    """Give a reason to the images that have none yet."""
    for i in where.nonzero().flatten().tolist():
        reasons[i] = reasons[i] or reason
