"""How fast neighbouring states draw apart: Lyapunov exponents, Lipschitz constants, softmax, spectral norms."""
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..convert.block_kinds import own_blocks
from ..settings import integer, one_of
from .flow import Flow, Images, Jacobian, PerImage, along, noise, norms, over_images

SETTLED = 1e-4  # change of the exponents in a sweep, per unit of time


@dataclass(frozen=True, repr=False)
class Exponents(PerImage):
    """Finite-time Lyapunov exponents of B images, per unit of time, which is one block.

    Attributes:
        values: [B, m], the leading exponents at the end, descending where they settled; or NaN.
        running: [B, K, m], mean growth up to each time of the tangent vectors that grow most until the end.
        residual: [B], how much the last sweep changed the exponents; NaN without two sweeps.
        drift: [B, m], how far the running values of the last half of the time lie from the final ones.
        reasons: For each image, why there are none: what is not finite or vanishes, and when.
        times: [K], of `running`.
    """
    values: Tensor
    running: Tensor
    residual: Tensor
    drift: Tensor
    reasons: tuple[str | None, ...]
    times: Tensor

    def __repr__(self) -> str:
        good = self.values[~self.values[:, 0].isnan(), 0]
        spread = f' ± {good.std():.4f}' if len(good) > 1 else ''
        words = [f'{len(self.values)} images', *[f'largest {good.mean():.4f}{spread} per block'] * (len(good) > 0)]
        if unsettled := len(good) - int((self.residual <= SETTLED).sum()):
            words.append(f'{unsettled} not settled: raise sweeps')
        if missing := list(filter(None, self.reasons)):
            words.append(f'none for {len(missing)}: {missing[0]}')
        return f"Exponents({', '.join(words)})"


def lyapunov_exponents(
        model: Any, images: Images = None, *, count: int = 1, sweeps: int = 50, tokens: str = 'all',
        batch_size: int = 8, seed: int = 0,
) -> Exponents:
    """The leading finite-time Lyapunov exponents of a model, for each image; see `timm_odevit.dynamics`.

    Neighbouring states draw apart (above 0) or together (below 0); the largest is log(s) / T, with the largest singular
    value s of the Jacobian of the whole map. What is added to all channels of a token alike is left out if all maps
    pass it on, as blocks behind LayerNorm do: else no largest exponent could be below 0.

    Args:
        count: Number m of exponents, or the size of the state, if that is less.
        sweeps: How often, at most, tangent vectors go to the end and back, to turn towards the directions that grow
            most; an image is done when its exponents change by at most 1e-4.
        tokens: 'all' for the whole state; 'class' for the class token alone.

    Examples:
        >>> found = lyapunov_exponents(student, images, count=2)
        >>> print(found.values)    # [B, 2]

    Source: Benettin et al., Meccanica 15 (1980), by QR decomposition; Dieci, Russell & Van Vleck, SIAM J. Numer. Anal.
    34 (1997).
    """
    only_class = one_of(('all', 'class'))('tokens', tokens) == 'class'
    count, sweeps = integer(1)('count', count), integer(0)('sweeps', sweeps)
    return over_images(partial(_exponents, count, only_class, sweeps, seed), model, images, batch_size)


def _exponents(count: int, only_class: bool, sweeps: int, seed: int, flow: Flow) -> Exponents:
    if only_class and not flow.class_token:
        raise ValueError("tokens='class' needs a class token. Use tokens='all'.")
    flow = _without_shifts(flow)
    x, states, T = flow.start, flow.states(), flow.times[-1] - flow.times[0]
    B, size = len(x), x[0, :1].numel() if only_class else x[0].numel()
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(size, count, generator=generator, dtype=torch.float64)  # the same for every image
    Q = torch.linalg.qr(first)[0].to(x).expand(B, -1, -1)
    last = residual = torch.full((B,), math.nan, dtype=torch.float64)  # on the CPU: not every device has float64
    turning = torch.ones(B, dtype=torch.bool)
    jacobians = [*map(Jacobian, flow.maps, states)]
    for i in range(sweeps):
        moved, growth = _forwards(jacobians, states, Q)
        exponents = growth.log().sum(dim=1) / T
        if i:
            residual = residual.where(~turning, (exponents - last).abs().amax(dim=1))
            turning = turning & (residual > SETTLED)  # False also for NaN
        if not turning.any():
            break
        for J, state in zip(jacobians[::-1], states[-2::-1], strict=True):  # back to the start
            moved, _ = _orthogonal(_products(J.pull, state, moved))
        last, Q = exponents, torch.where(turning.to(x.device)[:, None, None], moved, Q)
    else:
        _, growth = _forwards(jacobians, states, Q)
    times = flow.clock()[1:]
    elapsed = times - flow.times[0]
    good = (growth > 0).all(dim=2)  # False also for NaN
    running = (growth.log().cumsum(dim=1) / elapsed[:, None]).where(good.all(dim=1)[:, None, None], torch.nan)
    drift = (running[:, elapsed >= T / 2] - running[:, -1:]).abs().amax(dim=1)
    reasons = tuple(None if each.all() else 'the state or its tangent vectors vanish or are not finite at '
                    f't = {times[~each][0]:g}' for each in good)
    return Exponents(running[:, -1], running, residual, drift, reasons, times)


def _without_shifts(flow: Flow) -> Flow:
    """The flow of tokens with a mean of 0 over the channels, if all maps pass on what is added to that mean."""
    x = flow.start
    if x.ndim < 3:
        return flow
    spread = x.flatten(1).std(dim=1)
    spread = spread.where(spread.isfinite() & (spread > 0), 1.)  # else any length will do
    shift = noise(x[..., :1]) * along(spread, x)
    for step, (before, after) in zip(flow.maps, pairwise(flow.states()), strict=True):
        missed = norms(step(before + shift) - after - shift) / norms(shift.expand_as(x))
        if (missed > (0.05 if torch.finfo(x.dtype).bits == 16 else 1e-3)).any():  # what rounding may lose
            return flow
    return replace(flow, start=_centred(x), path=(),
                   maps=tuple(partial(_centred, step=step) for step in flow.maps))


def _centred(x: Tensor, step: Callable[[Tensor], Tensor] = torch.Tensor.clone) -> Tensor:
    x = step(x)
    return x - x.mean(dim=-1, keepdim=True)


def _forwards(jacobians: list[Jacobian], states: list[Tensor], Q: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [B, n, m] at the end, and how much each step stretched them [B, K, m]."""
    growth = []
    product = torch.eye(Q.shape[-1], dtype=torch.float64).expand(len(Q), -1, -1)
    for J, (before, after) in zip(jacobians, pairwise(states), strict=True):
        moved = _products(J.push, before, Q)
        finite = moved.isfinite().flatten(1).all(dim=1) & after.isfinite().flatten(1).all(dim=1)
        Q, R = _orthogonal(moved)
        growth.append(R.diagonal(dim1=-2, dim2=-1).abs().where(finite.cpu()[:, None], torch.nan))
        product = R @ product
        product = product / product.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-300)
    # by growth, largest first, also where two are close
    return Q @ torch.linalg.svd(product)[0].to(Q), torch.stack(growth, dim=1)


def _products(product: Callable[[Tensor], Tensor], state: Tensor, Q: Tensor) -> Tensor:
    """Products with tangent vectors [B, n, m]; those of the class token alone are 0 in the other tokens."""
    B, size, _ = Q.shape
    zeros = Q.new_zeros(B, state[0].numel() - size)
    return torch.stack([product(torch.cat([v, zeros], dim=1).view_as(state)).flatten(1)[:, :size]
                        for v in Q.unbind(-1)], dim=-1)


def _orthogonal(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of vectors [B, n, m], and the vectors in it [B, m, m], in float64 on the CPU."""
    wide = vectors.cpu().to(torch.promote_types(vectors.dtype, torch.float32))
    Q, R = torch.linalg.qr(torch.nan_to_num(wide, posinf=0., neginf=0.))
    return Q.to(vectors), R.double()


@dataclass(frozen=True, repr=False)
class LipschitzConstants(PerImage):
    """Of the field, for B images.

    Attributes:
        values: [B, K], at the start of each step; NaN where the state is not finite.
        times: [K], of the starts.
    """
    values: Tensor
    times: Tensor


def lipschitz_constants(
        model: Any, images: Images = None, *, iterations: int = 30, batch_size: int = 16,
) -> LipschitzConstants:
    """The largest singular value of the Jacobian of a model's field, at the states that the model passes through.

    The field is the increment of the state over a step, per unit of time; see `timm_odevit.dynamics`.

    Args:
        iterations: Of the power method; the values converge from below.

    Examples:
        >>> found = lipschitz_constants(student, images)
        >>> print(found.values.mean(dim=0))    # [K]

    Source: the power method, Golub & Van Loan, Matrix Computations, 8.2.
    """
    iterations = integer(1)('iterations', iterations)

    def measure(flow: Flow) -> LipschitzConstants:
        vector = noise(flow.start)
        values = []
        for step, h, x in zip(flow.maps, flow.clock().diff().tolist(), flow.states()[:-1], strict=True):
            J, moved = Jacobian(step, x), vector
            for _ in range(iterations):
                vector = vector / along(norms(vector).clamp_min(torch.finfo(vector.dtype).tiny), vector)
                moved = J.push(vector) - vector
                vector = J.pull(moved) - moved
            size = norms(vector)
            vector = torch.where(along((size > 0) & size.isfinite(), vector), vector, noise(x))  # else it stays so
            values.append(norms(moved) / h)
        return LipschitzConstants(torch.stack(values, 1), flow.clock()[:-1])
    return over_images(measure, model, images, batch_size)


def log_softmax_bound(attention: Tensor) -> Tensor:
    """log g_1 for rows of probabilities [..., N], in nats [...].

    g_1 = p (1 - p + q), with the largest two, bounds the eigenvalues of the Jacobian of softmax, diag(p) - p p^T, from
    above. Source: JaSMin, arXiv 2507.07814.
    """
    p, q = F.pad(attention, (0, 1)).topk(2, dim=-1).values.unbind(-1)  # of a single token, q = 0
    return (p * (1 - p + q)).clamp_min(torch.finfo(p.dtype).tiny).log()


@torch.no_grad()
def spectral_norms(model: nn.Module) -> dict[str, float]:
    """The largest singular value of every weight matrix in the blocks of a model, by the name of the weight, behind the
    number of its block, of several.

    A joint projection counts as three matrices, such as 'attn.qkv.weight (queries)'.

    Examples:
        >>> norms = spectral_norms(student)
        >>> print(norms['attn.proj.weight'])
    """
    blocks = own_blocks(model)
    values: dict[str, float] = {}
    for i, block in enumerate(blocks):
        for name, module in block.named_modules():
            p = getattr(module, 'weight', None)  # as computed, if it is
            if not isinstance(p, Tensor) or p.ndim != 2 or '_pos' in name or 'cpb_mlp' in name:  # position biases
                continue
            label = f'{name}.weight'.replace('.base_layer.', '.').removeprefix('block.')  # in which peft holds layers
            label = label if len(blocks) == 1 else f'blocks.{i}.{label}'
            parts = [' (queries)', ' (keys)', ' (values)'] if label.endswith('qkv.weight') else ['']
            for what, part in zip(parts, p.chunk(len(parts)), strict=True):
                values[label + what] = float(torch.linalg.matrix_norm(part.float().cpu(), ord=2))
    return values
