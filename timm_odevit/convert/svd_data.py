"""What init 'svd_data' needs: moments of the inputs of linear layers, and one order of heads and neurons."""
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Attention, Mlp
from torch import Tensor, nn

from ..hooks import evaluating, hooked

__all__ = ['Layers', 'Moments', 'aligned', 'input_moments']

Moments = dict[tuple[int, str], Tensor]  # second moment of the inputs of a linear layer, by layer and parameter name
Layers = dict[int, dict[str, Tensor]]  # for each layer, its tensors by their name in the field ('block.mlp.fc1.weight')
ROUNDS = 3


def input_moments(model: nn.Module, blocks: Sequence[nn.Module], images: Tensor, first: int = 0) -> Moments:
    """Second moment x^T x / n [N, N] of the inputs of every linear layer of some blocks, for images [B, C, H, W].

    `first` is the layer of the first block.
    """
    moments: Moments = {}

    def watch(key: tuple[int, str]):
        def hook(_: nn.Module, args: Any) -> None:
            x = args[0].flatten(0, -2).float()
            moments[key] = moments.get(key, torch.zeros((), device=x.device)) + x.T @ x / len(x)
        return hook
    linears = [((first + i, f'block.{name}.weight'), module) for i, block in enumerate(blocks)
               for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    with hooked(*((module, 'before', watch(key)) for key, module in linears)), evaluating(model), torch.no_grad():
        try:
            model(images)
        except (RuntimeError, AssertionError) as e:  # of channels, sizes, dtype or device
            raise ValueError(f'images {list(images.shape)} do not fit this model: {e}') from e
    return moments


def aligned(layers: Layers, block: Any, moments: Moments) -> tuple[Layers, Moments]:
    """Bring heads and neurons of several layers into one order, without changing what each layer computes.

    In several rounds, layer by layer, they are assigned to those of the mean of the other layers so as to maximise the
    inner product of the weights. What is not plain attention or a plain MLP in `block`, one of the blocks, is left.

    Source: weight matching, Git Re-Basin, arXiv 2209.04836.
    """
    layers, moments = {layer: dict(values) for layer, values in layers.items()}, dict(moments)
    attn, mlp = getattr(block, 'attn', None), getattr(block, 'mlp', None)
    if type(attn) is Attention and isinstance(attn.norm, nn.Identity) and getattr(attn, 'gate', None) is None:
        _align(layers, moments, 'block.attn.qkv', 'block.attn.proj', 3, attn.num_heads)
    if type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity):
        units = len(next(iter(layers.values()))['block.mlp.fc1.weight'])
        _align(layers, moments, 'block.mlp.fc1', 'block.mlp.fc2', 1, units)
    return layers, moments


def _align(layers: Layers, moments: Moments, first: str, second: str, parts: int, units: int) -> None:
    """Reorder the units between two linear layers: rows of the first, in `parts` parts, and columns of the second."""
    weight, bias, after = f'{first}.weight', f'{first}.bias', f'{second}.weight'

    def features(values: dict[str, Tensor]) -> Tensor:
        columns = [*values[weight].reshape(parts, units, -1), values[after].T.reshape(units, -1)]
        if parts == 1 and bias in values:  # in attention, the biases of the keys do nothing
            columns.append(values[bias][:, None])
        return torch.cat(columns, dim=1).float()
    orders = _match([features(values) for values in layers.values()])
    for (layer, values), order in zip(layers.items(), orders, strict=True):
        width = values[after].shape[1]
        columns = torch.arange(width, device=order.device).view(units, -1)[order].flatten()
        rows = torch.cat([columns + part * width for part in range(parts)])
        values.update({name: values[name][rows] for name in (weight, bias) if name in values})
        values[after] = values[after][:, columns]
        if (layer, after) in moments:
            moments[layer, after] = moments[layer, after][columns][:, columns]


def _match(features: list[Tensor]) -> list[Tensor]:
    """For each layer, the order of its units [n] that brings their features [n, f] closest to the others'."""
    from scipy.optimize import linear_sum_assignment  # comes with torchdiffeq
    orders = [torch.arange(len(f), device=f.device) for f in features]
    total = torch.stack(features).sum(0)
    for _ in range(ROUNDS if len(features) > 1 else 0):
        for i, f in enumerate(features):
            others = total - f[orders[i]]
            order = linear_sum_assignment((others @ f.T).cpu().numpy(), maximize=True)[1]
            orders[i] = torch.as_tensor(order, device=f.device)
            total = others + f[orders[i]]
    return orders
