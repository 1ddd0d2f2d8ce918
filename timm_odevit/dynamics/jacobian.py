"""Products with the Jacobian of a map, and attention that can be differentiated twice."""
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ['Jacobian', 'plain_attention']


class Jacobian:
    """The Jacobian J of a map at a state [B, ...], which is never built: its products with vectors [B, ...].

    The map is run once for all products. J v is a product with a transposed Jacobian, too: that of J^T u, which is
    linear in u. Forward-mode AD takes as long for one product, and repeats the map for each.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], state: Tensor) -> None:
        if torch.is_inference_mode_enabled() or state.is_inference():
            raise RuntimeError('Derivatives cannot be computed in inference mode. Use torch.no_grad() instead.')
        with _PlainAttention(), torch.enable_grad():
            self._before = state.detach().requires_grad_()
            self._after = step(self._before.clone())  # the map may change its input in place

    @cached_property
    def _transposed(self) -> tuple[Tensor, Tensor]:
        u = torch.zeros_like(self._after, requires_grad=True)
        return u, _product(self._after, self._before, u, create_graph=True)

    def push(self, vector: Tensor) -> Tensor:
        """J v."""
        u, product = self._transposed
        return _product(product, u, vector)

    def pull(self, vector: Tensor) -> Tensor:
        """J^T v."""
        return _product(self._after, self._before, vector)


def _product(outputs: Tensor, inputs: Tensor, vector: Tensor, create_graph: bool = False) -> Tensor:
    """The gradient of <outputs, vector> with respect to the inputs; 0 for constant outputs."""
    if not outputs.requires_grad:
        return torch.zeros_like(inputs)
    return torch.autograd.grad(
        outputs, inputs, vector, retain_graph=True, create_graph=create_graph, allow_unused=True,
        materialize_grads=True)[0]


class _PlainAttention(TorchFunctionMode):  # of one thread
    """Attention as two products and a softmax: the fused kernels cannot be differentiated twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            probabilities, value = plain_attention(*args, **(kwargs or {}))
            return probabilities @ value
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not kwargs.get('need_weights', True):
            out, _ = func(*args, **{**kwargs, 'need_weights': True})  # with weights, it uses no fused kernel
            return out, None
        return func(*args, **kwargs)


def plain_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.,
        is_causal: bool = False, scale: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:
    """The attention probabilities and the values that `F.scaled_dot_product_attention` multiplies."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
    return scores.softmax(dim=-1), value
