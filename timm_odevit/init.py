"""The shared block's weights, from the base's blocks."""
import copy
from typing import Any, Callable, List, Sequence

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from .fields import Field, LipschitzField, NativeField

__all__ = ['build_field', 'spectral_']


def build_field(field: str, init: str, blocks: Sequence[nn.Module]) -> Field:
    """Build the shared field of an ODE-ViT; the base's blocks are read, not changed.

    Args:
        field: 'native' or 'lipschitz'.
        init: 'mean', 'block:<i>' or 'spectral'.
        blocks: Pre-norm transformer blocks of the base, all of one structure.

    Returns:
        A field with weights of its own, on the device, in the dtype and in the mode of the first block. A parameter
        is trainable where it is in any of the blocks.
    """
    index = int(init.split(':')[1]) if init.startswith('block:') else None
    chosen = blocks if index is None else [blocks[index]]
    build = _native if field == 'native' else _lipschitz
    with torch.no_grad():
        return build(chosen, blocks, init == 'spectral')


def spectral_(weight: Tensor, parts: int = 1) -> Tensor:
    """Fill a matrix with random values and scale it to spectral norm 1, in place.

    Args:
        weight: Matrix [M, D].
        parts: Number of equal row blocks that are matrices of their own, 3 for a joint q, k, v projection.

    Source: ODE-ViT, arXiv 2511.16501 (spectral initialisation).
    """
    with torch.no_grad():
        nn.init.normal_(weight)
        if not weight.is_meta:
            for part in weight.chunk(parts):
                dtype = torch.promote_types(part.dtype, torch.float32)
                part.div_(torch.linalg.matrix_norm(part.to(dtype), ord=2).to(part.dtype))
    return weight


def _native(chosen: Sequence[nn.Module], blocks: Sequence[nn.Module], spectral: bool) -> NativeField:
    block = copy.deepcopy(chosen[0])
    for name, parameter in block.named_parameters():
        parameter.copy_(_mean([b.get_parameter(name) for b in chosen]))
        parameter.requires_grad_(any(b.get_parameter(name).requires_grad for b in blocks))
    rate = _drop_path_rate(blocks)
    for name in ('drop_path1', 'drop_path2'):
        setattr(block, name, _drop_path(rate, block.training))
    if spectral:
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                spectral_(module.weight, 3 if name.endswith('qkv') else 1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif hasattr(module, 'reset_parameters'):
                module.reset_parameters()
    return NativeField(block)


def _lipschitz(chosen: Sequence[Any], blocks: Sequence[Any], spectral: bool) -> LipschitzField:
    first = blocks[0]
    attn, mlp, weight = first.attn, first.mlp, first.attn.qkv.weight
    field = LipschitzField(
        dim=weight.shape[1],
        num_heads=attn.num_heads,
        head_dim=weight.shape[0] // (3 * attn.num_heads),
        hidden=mlp.fc2.in_features,
        act=copy.deepcopy(mlp.act),
        attn_drop=attn.attn_drop.p,
        proj_drop=attn.proj_drop.p,
        drop_path=_drop_path_rate(blocks),
        device=weight.device,
        dtype=weight.dtype,
    ).train(first.training)
    if spectral:
        for linear, parts in ((field.qkv, 3), (field.proj, 1), (field.fc1, 1), (field.fc2, 1)):
            spectral_(linear.weight, parts)
    else:
        # LayerScale multiplies the rows of the projection before it; a field without LayerScale takes it in there.
        sources: List[tuple[Tensor, Callable[[Any], Tensor]]] = [
            (field.norm1.weight, lambda b: b.norm1.weight), (field.norm1.bias, lambda b: b.norm1.bias),
            (field.qkv.weight, lambda b: b.attn.qkv.weight),
            (field.proj.weight, lambda b: _scaled(b.attn.proj.weight, b.ls1)),
            (field.norm2.weight, lambda b: b.norm2.weight), (field.norm2.bias, lambda b: b.norm2.bias),
            (field.fc1.weight, lambda b: b.mlp.fc1.weight),
            (field.fc2.weight, lambda b: _scaled(b.mlp.fc2.weight, b.ls2)),
        ]
        for target, source in sources:
            target.copy_(_mean([source(b) for b in chosen]))
    trainable = any(p.requires_grad for b in blocks for p in b.parameters())
    return field.requires_grad_(trainable)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(dtype)
    for tensor in tensors[1:]:
        total = total + tensor.to(dtype)
    return total / len(tensors)


def _scaled(weight: Tensor, layer_scale: nn.Module) -> Tensor:
    gamma = getattr(layer_scale, 'gamma', None)
    return weight if gamma is None else weight * gamma[:, None]


def _drop_path_rate(blocks: Sequence[Any]) -> float:
    return sum(getattr(b.drop_path1, 'drop_prob', 0.) or 0. for b in blocks) / len(blocks)


def _drop_path(rate: float, training: bool) -> nn.Module:
    return (DropPath(rate) if rate > 0. else nn.Identity()).train(training)
