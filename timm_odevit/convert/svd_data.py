"""What svd_data needs: moments of the inputs of linear layers, and one order of heads and neurons for all layers."""
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Attention, Mlp
from torch import Tensor, nn

from ..hooks import evaluating, hooked

__all__ = ['Moments', 'Orders', 'aligning_orders', 'check_images', 'input_moments', 'permuted']

Moments = dict[tuple[int, str], Tensor]  # second moment of the inputs of a linear layer, by layer and parameter name
# By parameter: the order of its rows and of its columns; None keeps them as they are
Orders = dict[str, tuple[Tensor | None, Tensor | None]]
ROUNDS = 3


def check_images(images: Any) -> None:
    """Raise ValueError for anything but a batch of images [B, C, H, W]."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point() or not len(images):
        found = f'{images.dtype} {list(images.shape)}' if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f'images must be a floating-point tensor [N, C, H, W], normalised for the model; got {found}.')
    if not images.is_meta and not torch.isfinite(images).all():
        raise ValueError('images must be finite; some values are not.')


def input_moments(model: nn.Module, blocks: Sequence[nn.Module], images: Tensor, first: int = 0) -> Moments:
    """Second moment x^T x / n [N, N] of the inputs of every linear layer of the blocks.

    Args:
        model: Any timm model.
        blocks: Consecutive blocks of the model.
        images: Calibration images [B, C, H, W].
        first: Layer of the first block.

    Returns:
        The moments by layer and parameter name, such as (3, 'block.mlp.fc1.weight').
    """
    moments: Moments = {}

    def watch(key: tuple[int, str]):
        def hook(_: nn.Module, args: Any) -> None:
            x = args[0].flatten(0, -2).float()
            moments[key] = moments.get(key, torch.zeros((), device=x.device)) + x.T @ x / len(x)
        return hook
    linears = [((first + i, f'block.{name}.weight'), module) for i, block in enumerate(blocks)
               for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    with hooked(*((module, 'before', watch(key)) for key, module in linears)):
        with evaluating(model), torch.no_grad():
            try:
                model(images)
            except (RuntimeError, AssertionError) as e:  # as timm says it, of channels or of sizes
                raise ValueError(f'images {list(images.shape)} do not fit this model: {e}') from e
    return moments


def aligning_orders(layers: Sequence[dict[str, Tensor]], block: Any) -> list[Orders]:
    """Find orders of heads and neurons that bring blocks closest together without changing what each computes.

    In several rounds, layer by layer, heads and neurons are assigned to those of the mean of the other layers so as to
    maximise the inner product of the weights (a linear assignment).

    Args:
        layers: Parameters of each block, by their name in the field ('block.attn.qkv.weight', ...).
        block: One of the blocks; anything but plain attention and a plain MLP is left in its order.

    Returns:
        For each layer, orders for `permuted`; empty if there is nothing to reorder.

    Source: weight matching, Git Re-Basin, arXiv 2209.04836.
    """
    attn, mlp = getattr(block, 'attn', None), getattr(block, 'mlp', None)
    orders: list[Orders] = [{} for _ in layers]
    if len(layers) < 2:
        return orders
    if type(attn) is Attention and isinstance(attn.norm, torch.nn.Identity) and getattr(attn, 'gate', None) is None:
        _align_heads(layers, orders, attn.num_heads)
    if type(mlp) is Mlp and isinstance(mlp.norm, torch.nn.Identity):
        _align_neurons(layers, orders)
    return orders


def permuted(p: Tensor, order: tuple[Tensor | None, Tensor | None] | None) -> Tensor:
    """A vector or a matrix with its rows and columns in another order."""
    if order is None:
        return p
    rows, columns = order
    if rows is not None:
        p = p[rows]
    return p if columns is None else p[:, columns]


def _align_neurons(layers: Sequence[dict[str, Tensor]], orders: list[Orders]) -> None:
    def features(values: dict[str, Tensor]) -> Tensor:
        parts = [values['block.mlp.fc1.weight'], values['block.mlp.fc2.weight'].T]
        bias = values.get('block.mlp.fc1.bias')
        return torch.cat(parts if bias is None else [*parts, bias[:, None]], dim=1).float()
    for order, found in zip(orders, _match([features(values) for values in layers]), strict=True):
        order['block.mlp.fc1.weight'] = order['block.mlp.fc1.bias'] = (found, None)
        order['block.mlp.fc2.weight'] = (None, found)


def _align_heads(layers: Sequence[dict[str, Tensor]], orders: list[Orders], heads: int) -> None:
    def features(values: dict[str, Tensor]) -> Tensor:
        qkv, proj = values['block.attn.qkv.weight'], values['block.attn.proj.weight']
        parts = [*(part.reshape(heads, -1) for part in qkv.chunk(3)), proj.T.reshape(heads, -1)]
        return torch.cat(parts, dim=1).float()
    for values, order, found in zip(layers, orders, _match([features(values) for values in layers]), strict=True):
        width = values['block.attn.proj.weight'].shape[1]
        channels = torch.arange(width, device=found.device).view(heads, -1)[found].flatten()
        rows = torch.cat([channels + i * width for i in range(3)])
        order['block.attn.qkv.weight'] = order['block.attn.qkv.bias'] = (rows, None)
        order['block.attn.proj.weight'] = (None, channels)


def _match(features: list[Tensor]) -> list[Tensor]:
    """For each layer, the order of its units [n] that brings their features [n, f] closest to the other layers'."""
    from scipy.optimize import linear_sum_assignment  # comes with torchdiffeq
    orders = [torch.arange(len(f), device=f.device) for f in features]
    total = torch.stack(features).sum(0)
    for _ in range(ROUNDS):
        for i, f in enumerate(features):
            others = total - f[orders[i]]
            found = linear_sum_assignment((others @ f.T).cpu().numpy(), maximize=True)[1]
            orders[i] = torch.as_tensor(found, device=f.device)
            total = others + f[orders[i]]
    return orders
