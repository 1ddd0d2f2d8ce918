"""How much a field amplifies small changes of the state: its local Lipschitz constant, and that of its softmax."""
from dataclasses import dataclass, field
from typing import Any, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..settings import checks_keywords, whole
from .attention import attention_maps
from .flow import Flow, Images, Jacobian, PerImage, noise, norms, over_images, unit

__all__ = ['LipschitzConstants', 'SoftmaxBounds', 'largest_singular_value', 'lipschitz_constants', 'log_softmax_bound',
           'softmax_bounds']


@dataclass(frozen=True, repr=False)
class LipschitzConstants(PerImage):
    """Local Lipschitz constants along the way of some images.

    Attributes:
        values: The constant at the start of each step [B, K].
        times: The times at which the steps start [K].
    """
    values: Tensor
    times: Tensor = field(metadata={'shared': True})

    def __repr__(self) -> str:
        mean, largest = self.values.mean(), self.values.max()
        return f'LipschitzConstants({len(self.values)} images, {mean:.3f}, at most {largest:.3f})'


@checks_keywords
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
        model: timm model with one sequence of blocks, an ODE-ViT or an ordinary ViT; or a Flow, without images.
        images: Images [B, C, H, W], normalised for the model, on its device; or a loader of such batches.
        of: 'field', in 1/time; or 'step' for the map of each step itself, which brings states together if its constant
            is below 1.
        iterations: Iterations of the power method; the values converge from below.
        batch_size: Images at a time.

    Returns:
        LipschitzConstants; NaN where the state is not finite.

    Raises:
        TypeError: The model has no single sequence of blocks.
        ValueError: There are no images, or the method is adaptive.
    """
    if of not in ('field', 'step'):
        raise ValueError(f"of must be 'field' or 'step'; got {of!r}.")
    iterations = whole(1)('iterations', iterations)
    shift = 1. if of == 'field' else 0.

    def measure(flow: Flow) -> LipschitzConstants:
        vector = noise(flow.start, torch.Generator().manual_seed(0))
        found: List[Tensor] = []
        for step, h, x in zip(flow.maps, flow.lengths(), flow.states(), strict=False):
            sigma, vector = largest_singular_value(step, x, vector, shift, iterations)
            found.append(sigma / h if of == 'field' else sigma)
        return LipschitzConstants(torch.stack(found, 1), torch.tensor(flow.times[:-1], dtype=torch.float64))
    return over_images(measure, model, images, batch_size)


def largest_singular_value(
        step: Any, state: Tensor, vector: Tensor, shift: float, iterations: int,
) -> Tuple[Tensor, Tensor]:
    """The largest singular value of J - shift I, for the Jacobian J of a map at a state [B, ...], and its vector.

    Args:
        step: The map.
        state: State [B, ...].
        vector: Where to start [B, ...].
        shift: Multiple of the identity that is taken away.
        iterations: Iterations of the power method.

    Returns:
        The singular values [B], and the right singular vectors [B, ...].
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


@dataclass(frozen=True, repr=False)
class SoftmaxBounds(PerImage):
    """JaSMin's bound on the Jacobian of softmax.

    Attributes:
        values: The largest g_k over the query rows [B, K, heads], between 0 and 1/2.
        times: The times at which the steps start [K].
    """
    values: Tensor
    times: Tensor = field(metadata={'shared': True})

    def __repr__(self) -> str:
        return f'SoftmaxBounds({len(self.values)} images, {self.values.mean():.4f}, at most {self.values.max():.4f})'


@checks_keywords
def softmax_bounds(model: Any, images: Images, *, k: int = 1, batch_size: int = 64) -> SoftmaxBounds:
    """JaSMin's g_k of each attention head, at the start of each step; see `log_softmax_bound`.

    Args:
        model: timm model with one sequence of blocks, whose attention gives its maps.
        images: Images [B, C, H, W], normalised for the model; or a loader of such batches.
        k: Which eigenvalue is bounded, the largest first.
        batch_size: Images at a time.

    Returns:
        SoftmaxBounds.

    Raises:
        TypeError: The model has no single sequence of blocks.
        ValueError: k is out of range, or the blocks do not provide attention maps.
    """
    def measure(flow: Flow) -> SoftmaxBounds:
        found: List[Tensor] = []
        for attention in attention_maps(flow):
            if type(k) is not int or not 1 <= k <= attention.shape[-1]:
                raise ValueError(f'k must be 1 to {attention.shape[-1]}, the number of tokens; got {k!r}.')
            found.append(log_softmax_bound(attention, k)[..., k - 1].amax(dim=-1).exp())
        return SoftmaxBounds(torch.stack(found, 1), torch.tensor(flow.times[:-1], dtype=torch.float64))
    return over_images(measure, model, images, batch_size)
