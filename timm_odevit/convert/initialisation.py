"""The shared blocks' weights, from the base's blocks."""
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..hooks import random_states_kept
from ..ode.config import FIELDS, OdeConfig
from ..ode.fields import Field, NativeField
from ..ode.time_dependence import PiecewiseField, TimeField, matrix_shape, residual_key
from .block_kinds import PER_LAYER, field_class, kinds
from .svd_data import Layers, Moments, aligned

__all__ = ['assignment', 'build_field', 'factors', 'set_per_layer', 'spectral_']


def assignment(config: OdeConfig, blocks: Sequence[nn.Module], first: int = 0) -> list[int]:
    """For each block, the index of the shared block that replaces it, with those of its kind within its span."""
    if isinstance(config.boundaries, tuple):
        starts = [b - first for b in config.boundaries]
    else:
        count = min(config.phases, len(blocks))
        starts = [round(i * len(blocks) / count) for i in range(1, count)]
    groups = [(sum(i >= start for start in starts), kind) for i, kind in enumerate(kinds(blocks))]
    order = sorted(set(groups), key=groups.index)
    return [order.index(group) for group in groups]


def build_field(
        config: OdeConfig, blocks: Sequence[nn.Module], first: int = 0, moments: Moments | None = None) -> Field:
    """Build the vector field, with weights of its own, that replaces consecutive blocks of the base.

    A parameter is trainable if it is trainable in any of the blocks that it replaces. `first` is the layer of the first
    block; `moments` are for init 'svd_data'.
    """
    assigned = assignment(config, blocks, first)
    with torch.no_grad(), random_states_kept(next(blocks[0].parameters()).device):
        fields = [_build(config, {first + i: blocks[i] for i, o in enumerate(assigned) if o == index}, moments or {})
                  for index in range(max(assigned) + 1)]
    if len(fields) == 1:
        return fields[0]
    return PiecewiseField(fields, range(first, first + len(blocks)), assigned).train(fields[0].training)


def spectral_(weight: Tensor, parts: int = 1) -> Tensor:
    """Fill a matrix [M, D] with random values and scale each of its parts (q, k, v) to spectral norm 1, in place.

    Source: ODE-ViT, arXiv 2511.16501.
    """
    with torch.no_grad():
        nn.init.normal_(weight)
        if not weight.is_meta:
            for part in weight.chunk(parts):
                part.div_(torch.linalg.matrix_norm(_precise(part), ord=2).to(part.dtype))
    return weight


def set_per_layer(block: nn.Module, others: Sequence[nn.Module]) -> None:
    """Give a block the mean of the constants that timm sets by depth in others, such as stochastic-depth rates."""
    constants = [{(name, key): getattr(module, key) for name, module in other.named_modules() for key in PER_LAYER
                  if isinstance(getattr(module, key, None), float)} for other in others]
    for name, key in set().union(*constants):
        value = sum(by_name.get((name, key), 0.) for by_name in constants) / len(others)
        if key == 'drop_prob':
            parent, _, own = name.rpartition('.')
            module = DropPath(value) if value > 0. else nn.Identity()
            setattr(block.get_submodule(parent), own, module.train(block.training))
        else:
            setattr(block.get_submodule(name), key, value)


def _build(config: OdeConfig, blocks: dict[int, Any], moments: Moments) -> Field:
    """The field that replaces the blocks of some layers."""
    cls, originals = FIELDS[config.field], list(blocks.values())
    base = (field_class(originals[0]) if cls is NativeField else cls).like(originals).train(originals[0].training)
    if isinstance(base, NativeField):
        set_per_layer(base.block, originals)
    layers: Layers = {}
    statistics = [(name, buffer) for name, buffer in base.named_buffers()  # running means and variances, not counts
                  if name in base.state_dict() and buffer.is_floating_point()]
    if config.init == 'spectral':
        _spectral_init(base)
    else:
        layers = {layer: cls.values(block) for layer, block in blocks.items()}
        if config.init == 'svd_data':
            layers, moments = aligned(layers, originals[0], moments)
        for name, tensor in (*base.named_parameters(), *statistics):
            tensor.copy_(torch.stack([_precise(values[name]) for values in layers.values()]).mean(0))
    if config.time == 'autonomous':
        return base
    field = TimeField(base, list(blocks), config.rank).train(base.training)
    for row, (layer, values) in enumerate(layers.items()):
        for name, parameter in base.named_parameters():
            key = residual_key(name)
            if key in field.vectors:
                field.vectors[key][row] = values[name] - parameter
            elif key in field.up and config.init != 'mean':
                residual = (values[name] - parameter).reshape(matrix_shape(parameter))
                field.up[key][row], field.down[key][row] = factors(
                    residual, field.up[key].shape[-1], moments.get((layer, name)))
    for name, buffer in statistics if layers else ():
        field.add_statistics(name, torch.stack([values[name] - buffer for values in layers.values()]))
    return field


def _spectral_init(field: Field) -> None:
    for name, module in field.named_modules():
        if isinstance(module, nn.Linear):
            spectral_(module.weight, 3 if name.endswith('qkv') else 1)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, 'reset_parameters') and not list(module.children()):
            module.reset_parameters()


def factors(residual: Tensor, rank: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Factors [M, r] and [r, N] of the best approximation of a residual [M, N] by a matrix of rank r.

    Best in the Frobenius norm or, given the second moment of the inputs x [N, N], in the mean of |error x|^2.
    """
    M, N = residual.shape
    if rank == N:  # nothing to truncate
        return residual, torch.eye(N, dtype=residual.dtype, device=residual.device)
    if rank == M:
        return torch.eye(M, dtype=residual.dtype, device=residual.device), residual
    R = _precise(residual)
    if moment is not None:
        values, vectors = torch.linalg.eigh(moment.to(R))
        # directions that never occur keep a little weight
        values = values.clamp_min(1e-6 * values.max() + 1e-30).sqrt()
        R = R @ (vectors * values)
    Q = None
    if 8 * rank < min(M, N):  # the range of R, from a sketch: Halko et al., arXiv 0909.4061, algorithm 4.4
        sketch = torch.randn(N, 2 * rank + 8, generator=torch.Generator().manual_seed(0)).to(R)
        Q = torch.linalg.qr(R @ sketch).Q
        for _ in range(4):
            Q = torch.linalg.qr(R @ torch.linalg.qr(R.T @ Q).Q).Q
    U, S, Vh = torch.linalg.svd(R if Q is None else Q.T @ R, full_matrices=False)
    U, root, Vh = (U if Q is None else Q @ U)[:, :rank], S[:rank].sqrt(), Vh[:rank]
    up, down = U * root, root[:, None] * Vh
    if moment is not None:
        down = down @ (vectors / values).T
    return up.to(residual), down.to(residual)


def _precise(tensor: Tensor) -> Tensor:
    """A tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
