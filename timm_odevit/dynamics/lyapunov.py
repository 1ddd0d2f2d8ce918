"""Finite-time Lyapunov exponents of the map that is deployed."""
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..settings import integer
from .flow import Flow, Images, PerImage, along, noise, norms, over_images
from .lipschitz import Jacobian

__all__ = ['Exponents', 'lyapunov_exponents']

SETTLED = 1e-4  # change of the exponents in a sweep, per unit of time
SHIFTED = {torch.bfloat16: 0.05, torch.float16: 0.05}  # share of a shift that rounding may lose in a step; else 1e-3


@dataclass(frozen=True, repr=False)
class Exponents(PerImage):
    """Finite-time Lyapunov exponents of some images; the unit is 1/time, and one unit of time is one block.

    Attributes:
        values: The leading exponents at the end [B, m], descending where they settled; NaN if there are none.
        running: Mean growth up to each time [B, K, m] of the tangent vectors that grow most until the end.
        residual: How much the last sweep changed the exponents [B], at most 1e-4 if they settled; NaN without two
            sweeps.
        drift: How far the running values of the last half of the time lie from the final ones [B, m]: near 0 if the
            growth is even.
        reasons: For each image, why there are no exponents; None if there are.
        times: The times at which `running` is given [K].
    """
    values: Tensor
    running: Tensor
    residual: Tensor
    drift: Tensor
    reasons: tuple[str | None, ...]
    times: Tensor

    def __repr__(self) -> str:
        good = self.values[~self.values[:, 0].isnan(), 0]
        text = f'{len(self.values)} images'
        if len(good):
            text += f', largest {good.mean():.4f}' + (f' ± {good.std():.4f}' if len(good) > 1 else '') + ' per block'
        if unsettled := int((self.residual > SETTLED).sum()):
            text += f', {unsettled} not settled: raise sweeps'
        if missing := list(filter(None, self.reasons)):
            text += f', none for {len(missing)}: {missing[0]}'
        return f'Exponents({text})'


def lyapunov_exponents(
        model: Any,
        images: Images = None,
        *,
        count: int = 1,
        sweeps: int = 50,
        tokens: str = 'all',
        batch_size: int = 16,
        seed: int = 0,
) -> Exponents:
    """The leading finite-time Lyapunov exponents of a model, for each image.

    They tell how fast neighbouring states draw apart (above 0) or together (below 0). Tangent vectors are carried along
    by exact products with the Jacobian of each step that the model runs, and orthogonalised after each. Before that,
    they are turned towards the directions that grow most until the end, so that the largest exponent is log(s) / T with
    the largest singular value s of the Jacobian of the whole map.

    What is added to all channels of a token alike is left out if all maps pass it on unchanged, as blocks behind
    LayerNorm do: the head's norm does not see it, and with it, no largest exponent could be below 0.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.
        count: Number m of exponents, the largest first.
        sweeps: How often, at most, the tangent vectors are carried to the end and, by the transposed Jacobians, back,
            before the exponents are measured; an image is done when they change by at most 1e-4.
        tokens: 'all' for the whole state; 'class' for perturbations of the class token alone.
        seed: Seed of the first tangent vectors.

    Returns:
        Exponents. For an image whose state or tangent vectors are not finite or vanish, they are NaN, with a reason.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> found = lyapunov_exponents(student, images, count=2)
        >>> print(found.values)    # [B, 2]
        >>> print(lyapunov_exponents(teacher, images))

    Source: Benettin et al., Meccanica 15 (1980), by QR decomposition; Dieci, Russell & Van Vleck, SIAM J. Numer. Anal.
    34 (1997).
    """
    if tokens not in ('all', 'class'):
        raise ValueError(f"tokens must be 'all' or 'class'; got {tokens!r}.")
    count, sweeps = integer(1)('count', count), integer()('sweeps', sweeps)

    return over_images(lambda flow: _exponents(flow, count, tokens == 'class', sweeps, seed), model, images, batch_size)


def _exponents(flow: Flow, count: int, only_class: bool, sweeps: int, seed: int) -> Exponents:
    whole, flow = flow, _without_shifts(flow)
    x, states, T = flow.start, flow.states(), flow.times[-1] - flow.times[0]
    if only_class and (x.ndim != 3 or (flow.blocks and not flow.class_token)):
        raise ValueError(f"tokens='class' needs states [B, N, D] with a class token; these have the shape "
                         f'{list(x.shape)}' + ('.' if x.ndim != 3 else ', without one.'))
    B, size = len(x), x[0, :1].numel() if only_class else x[0].numel()
    dimensions = size if flow is whole else size - size // x.shape[-1]
    if count > dimensions:
        raise ValueError(f'count must be at most the number of dimensions, {dimensions}; got {count}.')
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(size, count, generator=generator, dtype=torch.float64)  # the same for every image
    Q = torch.linalg.qr(first)[0].to(x).expand(B, size, count)
    last = residual = torch.full((B,), math.nan, dtype=torch.float64)  # on the CPU: not every device has float64
    turning = torch.ones(B, dtype=torch.bool)
    for i in range(sweeps):
        moved, growth = _forwards(flow, states, Q)
        exponents = growth.log().sum(dim=1) / T
        if i:
            residual = residual.where(~turning, (exponents - last).abs().amax(dim=1))
            turning = turning & (residual > SETTLED)  # False also for NaN
        if not turning.any():
            break
        still = turning.to(x.device)[:, None, None]
        last, Q = exponents, torch.where(still, _backwards(flow, states, moved), Q)
    _, growth = _forwards(flow, states, Q)
    elapsed = torch.tensor(flow.times[1:], dtype=torch.float64) - flow.times[0]
    running = growth.log().cumsum(dim=1) / elapsed[:, None]
    reasons = [_reason(each, flow.times[1:]) for each in growth]
    running[torch.tensor([reason is not None for reason in reasons])] = math.nan
    drift = (running[:, elapsed >= T / 2] - running[:, -1:]).abs().amax(dim=1)
    return Exponents(running[:, -1], running, residual, drift, tuple(reasons), elapsed + flow.times[0])


def _without_shifts(flow: Flow) -> Flow:
    """The flow of tokens with a mean of 0 over the channels, if all maps pass on what is added to that mean."""
    x = flow.start
    if x.ndim < 3:
        return flow
    spread = x.flatten(1).std(dim=1)
    spread = spread.where(spread.isfinite() & (spread > 0), 1.)  # else any length will do
    shift = noise(x[..., :1], torch.Generator().manual_seed(0)) * along(spread, x)
    for step, (before, after) in zip(flow.maps, pairwise(flow.states()), strict=True):
        missed = norms(step(before + shift) - after - shift) / norms(shift.expand_as(x))
        if (missed > SHIFTED.get(x.dtype, 1e-3)).any():
            return flow
    return replace(flow, start=_centred(x), maps=tuple(partial(_centred, step=step) for step in flow.maps))


def _centred(x: Tensor, step: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    x = x if step is None else step(x)
    return x - x.mean(dim=-1, keepdim=True)


def _forwards(flow: Flow, states: list[Tensor], Q: Tensor) -> tuple[Tensor, Tensor]:
    """Tangent vectors [B, n, m] at the end, and how much each step stretched them [B, K, m]."""
    growth: list[Tensor] = []
    product = torch.eye(Q.shape[-1], dtype=torch.float64).expand(len(Q), -1, -1)
    for step, before, after in zip(flow.maps, states, states[1:], strict=False):
        moved = _products(Jacobian(step, before).push, before, Q)
        finite = moved.isfinite().flatten(1).all(dim=1) & after.isfinite().flatten(1).all(dim=1)
        Q, R = _orthogonal(moved)
        growth.append(R.diagonal(dim1=-2, dim2=-1).abs().where(finite.cpu()[:, None], torch.nan))
        product = R @ product
        product = product / product.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-300)
    # in the order of their growth: the largest first, also where two are close
    return Q @ torch.linalg.svd(product)[0].to(Q), torch.stack(growth, dim=1)


def _backwards(flow: Flow, states: list[Tensor], Q: Tensor) -> Tensor:
    """Tangent vectors [B, n, m] carried from the end to the start by the transposed Jacobians."""
    for step, state in reversed(list(zip(flow.maps, states, strict=False))):
        Q, _ = _orthogonal(_products(Jacobian(step, state).pull, state, Q))
    return Q


def _products(product: Callable[[Tensor], Tensor], state: Tensor, Q: Tensor) -> Tensor:
    """Products with tangent vectors [B, n, m]; those of the class token alone are 0 in the other tokens."""
    B, size, _ = Q.shape
    zeros = Q.new_zeros(B, state[0].numel() - size)
    return torch.stack([product(torch.cat([v, zeros], dim=1).view_as(state)).flatten(1)[:, :size]
                        for v in Q.unbind(-1)], dim=-1)


def _orthogonal(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of vectors [B, n, m], and the vectors in it [B, m, m], in float64 on the CPU."""
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    Q, R = torch.linalg.qr(torch.nan_to_num(wide, posinf=0., neginf=0.))
    return Q.to(vectors.dtype), R.cpu().double()


def _reason(growth: Tensor, times: tuple[float, ...]) -> str | None:
    for stretch, t in zip(growth, times, strict=True):
        if stretch.isnan().any():
            return f'the state or its tangent vectors are not finite at t = {t:g}'
        if (stretch == 0).any():
            return f'the tangent vectors vanish at t = {t:g}'
    return None
