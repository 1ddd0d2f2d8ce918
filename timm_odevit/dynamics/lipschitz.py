"""How much a model amplifies: products with Jacobians, Lipschitz constants, the bound of JaSMin, spectral norms."""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..ode.blocks import find_ode_blocks
from ..ode.time_dependence import TimeField, bare_name
from ..settings import integer
from .flow import Flow, Images, PerImage, check_derivatives, noise, norms, over_images, unit

__all__ = ['Jacobian', 'LipschitzConstants', 'PlainAttention', 'lipschitz_constants', 'log_softmax_bound',
           'spectral_norms']

_SOFTMAX = (torch.softmax, F.softmax, torch.Tensor.softmax, F.scaled_dot_product_attention)


@dataclass(frozen=True, repr=False)
class LipschitzConstants(PerImage):
    """Local Lipschitz constants `values` [B, K] at the start of each step, and the `times` of these starts [K]."""
    values: Tensor
    times: Tensor


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
    tokens as one vector. The power method needs only products with the Jacobian and its transpose.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.
        of: 'field', in 1/time; or 'step' for the map of each step, which brings states together below 1.
        iterations: Iterations of the power method; the values converge from below.

    Returns:
        LipschitzConstants; NaN where the state is not finite.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> found = lipschitz_constants(student, images)
        >>> print(found.values.mean(dim=0))    # [K]

    Source: the power method, Golub & Van Loan, Matrix Computations, 8.2.
    """
    if of not in ('field', 'step'):
        raise ValueError(f"of must be 'field' or 'step'; got {of!r}.")
    iterations = integer(1)('iterations', iterations)
    shift = 1. if of == 'field' else 0.

    def measure(flow: Flow) -> LipschitzConstants:
        vector = noise(flow.start, torch.Generator().manual_seed(0))
        values: list[Tensor] = []
        for step, h, x in zip(flow.maps, flow.lengths(), flow.states(), strict=False):
            J, moved = Jacobian(step, x), vector
            for _ in range(iterations):
                vector = unit(vector)
                moved = J.push(vector) - shift * vector
                vector = J.pull(moved) - shift * moved
            vector = torch.nan_to_num(vector)
            values.append(norms(moved) / (h if of == 'field' else 1.))
        return LipschitzConstants(torch.stack(values, 1), flow.clock(last=-1))
    return over_images(measure, model, images, batch_size)


def log_softmax_bound(attention: Tensor, k: int) -> Tensor:
    """log g_1, ..., log g_max(k, 1) for rows of probabilities [..., N], in nats [..., max(k, 1)].

    g_k = p_k (1 - p_k + p_k+1), with p in descending order, is an upper bound on the k-th eigenvalue of
    diag(p) - p p^T, the Jacobian of softmax. Source: JaSMin, arXiv 2507.07814.
    """
    p = F.pad(attention, (0, 1)).topk(max(k, 1) + 1, dim=-1).values  # p_n+1 = 0
    return (p[..., :-1] * (1 - p[..., :-1] + p[..., 1:])).clamp_min(torch.finfo(p.dtype).tiny).log()


class Jacobian:
    """Products of the Jacobian J of a map at a state [B, ...] with vectors [B, ...]; the map runs once for all.

    J v comes from the transposed Jacobian of J^T u, which is linear in u.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], state: Tensor) -> None:
        check_derivatives(state)
        with PlainAttention(state), torch.enable_grad():
            self._before = state.detach().requires_grad_()
            self._after = step(self._before.clone())  # the map may change its input in place

    @cached_property
    def _transposed(self) -> tuple[Tensor, Tensor]:
        u = torch.zeros_like(self._after, requires_grad=True)
        return u, _product(self._after, self._before, u, create_graph=True)

    def push(self, vector: Tensor) -> Tensor:
        u, product = self._transposed
        return _product(product, u, vector)

    def pull(self, vector: Tensor) -> Tensor:
        return _product(self._after, self._before, vector)


def _product(outputs: Tensor, inputs: Tensor, vector: Tensor, create_graph: bool = False) -> Tensor:
    """The gradient of <outputs, vector> with respect to the inputs; 0 for constant outputs."""
    if not outputs.requires_grad:
        return torch.zeros_like(inputs)
    return torch.autograd.grad(
        outputs, inputs, vector, retain_graph=True, create_graph=create_graph, allow_unused=True,
        materialize_grads=True)[0]


class PlainAttention(TorchFunctionMode):  # of one thread
    """Attention as two products and a softmax: fused kernels cannot be differentiated twice.

    `found` are the first probabilities over all tokens of the state x [B, ..., D].
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.shape = (len(x), *x.shape[1:-1], *x.shape[1:-1])  # but for the heads
        self.found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            probabilities, value = plain_attention(*args, **kwargs)
            out: Any = probabilities @ value
        elif func is F.multi_head_attention_forward and not kwargs.get('need_weights', True):
            out = func(*args, **{**kwargs, 'need_weights': True})[0], None  # with weights, it uses no fused kernel
        else:
            out = probabilities = func(*args, **kwargs)
        if self.found is None and func in _SOFTMAX and probabilities.ndim == 4 and (
                probabilities.shape[0], *probabilities.shape[2:]) == self.shape:
            self.found = probabilities.float()
        return out


def plain_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.,
        is_causal: bool = False, scale: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:
    """The two factors of `F.scaled_dot_product_attention`: probabilities and values."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
    return scores.softmax(dim=-1), value


@torch.no_grad()
def spectral_norms(model: nn.Module) -> dict[str, float]:
    """The largest singular value of every weight matrix in the blocks of a model.

    A joint projection to queries, keys and values counts as three matrices. With a residual for each layer, a weight's
    norm is the largest over the layers.

    Args:
        model: ODE-ViT, or any model with `blocks`.

    Returns:
        The norms by the name of the weight, such as 'attn.qkv.weight (queries)' or 'blocks.3.mlp.fc1.weight'.

    Raises:
        TypeError: The model has no blocks with weight matrices.

    Examples:
        >>> norms = spectral_norms(student)
        >>> print(norms['attn.proj.weight'])
    """
    odes = find_ode_blocks(model)
    blocks: list[Any] = [phase for ode in odes for phase in ode.shared.phases] or list(getattr(model, 'blocks', ()))
    values: dict[str, float] = {}
    for i, block in enumerate(blocks):
        layers = [block.at(layer) for layer in block.layers] if isinstance(block, TimeField) else []
        for name, p in (block.base if layers else block).named_parameters():
            if p.ndim != 2 or 'bias' in name:  # tables of position bias are no maps
                continue
            weight = torch.stack([layer.get(name, p) for layer in layers]) if layers else p[None]  # [layers, M, N]
            short = bare_name(name).removeprefix('block.')
            label = short if len(blocks) == 1 else f'blocks.{i}.{short}'
            parts = {label: weight}
            if short.endswith('qkv.weight'):
                parts = {f'{label} ({what})': part for what, part in zip(
                    ('queries', 'keys', 'values'), weight.chunk(3, dim=1), strict=True)}
            values.update({key: float(torch.linalg.matrix_norm(part.float(), ord=2).max())
                           for key, part in parts.items()})
    if not values:
        raise TypeError(f'A {type(model).__name__} has no blocks with weight matrices.')
    return values
