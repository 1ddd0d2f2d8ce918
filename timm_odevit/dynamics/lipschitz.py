"""How much a field amplifies small changes of the state: its local Lipschitz constant, and that of its softmax."""
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..settings import integer
from .flow import Flow, Images, PerImage, noise, norms, over_images, unit
from .jacobian import Jacobian

__all__ = ['LipschitzConstants', 'largest_singular_value', 'lipschitz_constants', 'log_softmax_bound']


@dataclass(frozen=True, repr=False)
class LipschitzConstants(PerImage):
    """Local Lipschitz constants along the way of some images.

    Attributes:
        values: The constant at the start of each step [B, K].
        times: The times at which the steps start [K].
    """
    values: Tensor
    times: Tensor = field(metadata={'shared': True})


def lipschitz_constants(
        model: Any,
        images: Images = None,
        *,
        of: str = 'field',
        iterations: int = 30,
        batch_size: int = 16,
) -> LipschitzConstants:
    """The largest singular value of the Jacobian of a model's field, at the states that the model passes through.

    The field is what the deployed method sees: the increment of the state over a step, per unit of time, with all
    tokens as one vector. The Jacobian is never built: the power method needs only products with it and with its
    transpose; it starts from the vector found at the step before.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.
        of: 'field', in 1/time; or 'step' for the map of each step itself, which brings states together if its constant
            is below 1.
        iterations: Iterations of the power method; the values converge from below.

    Returns:
        LipschitzConstants; NaN where the state is not finite.
    """
    if of not in ('field', 'step'):
        raise ValueError(f"of must be 'field' or 'step'; got {of!r}.")
    iterations = integer(1)('iterations', iterations)
    shift = 1. if of == 'field' else 0.

    def measure(flow: Flow) -> LipschitzConstants:
        vector = noise(flow.start, torch.Generator().manual_seed(0))
        found: list[Tensor] = []
        for step, h, x in zip(flow.maps, flow.lengths(), flow.states(), strict=False):
            sigma, vector = largest_singular_value(step, x, vector, shift, iterations)
            found.append(sigma / h if of == 'field' else sigma)
        return LipschitzConstants(torch.stack(found, 1), torch.tensor(flow.times[:-1], dtype=torch.float64))
    return over_images(measure, model, images, batch_size)


def largest_singular_value(
        step: Any, state: Tensor, vector: Tensor, shift: float, iterations: int,
) -> tuple[Tensor, Tensor]:
    """The largest singular values [B] of J - shift I, for the Jacobian J of a map at a state [B, ...], and their right
    singular vectors [B, ...], by the power method from a vector [B, ...].
    """
    J, sigma = Jacobian(step, state), state.new_zeros(len(state))
    for _ in range(iterations):
        vector = unit(vector)
        moved = J.push(vector) - shift * vector
        sigma = norms(moved)
        vector = J.pull(moved) - shift * moved
    return sigma, torch.nan_to_num(vector)


def log_softmax_bound(attention: Tensor, k: int) -> Tensor:
    """log g_1, ..., log g_max(k, 1) for rows of probabilities [..., N], in nats [..., max(k, 1)].

    g_k = p_k (1 - p_k + p_k+1), with p in descending order, is an upper bound on the k-th eigenvalue of
    diag(p) - p p^T, the Jacobian of softmax. Source: JaSMin, arXiv 2507.07814.
    """
    p = F.pad(attention, (0, 1)).topk(max(k, 1) + 1, dim=-1).values  # p_n+1 = 0
    return (p[..., :-1] * (1 - p[..., :-1] + p[..., 1:])).clamp_min(torch.finfo(p.dtype).tiny).log()
