"""The order of heads and MLP neurons is arbitrary: bring those of several blocks into a common order."""
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Attention, Mlp
from torch import Tensor

__all__ = ['Orders', 'aligning_orders', 'permuted']

# By parameter: the order of its rows and of its columns; None keeps them as they are
Orders = dict[str, tuple[Tensor | None, Tensor | None]]
ROUNDS = 3


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
