"""The shared blocks' weights, from the base's blocks."""
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..hooks import random_states_kept
from ..ode.config import FIELDS, OdeConfig
from ..ode.fields import Field, NativeField
from ..ode.time_dependence import PiecewiseField, TimeField, matrix_shape, residual_key
from .block_kinds import field_class, kinds, per_layer
from .svd_data import Moments, aligning_orders, permuted

__all__ = ['assignment', 'build_field', 'factors', 'set_per_layer', 'spectral_']


def assignment(config: OdeConfig, blocks: Sequence[nn.Module], first: int = 0) -> list[int]:
    """For each of the blocks, the index of the shared block that replaces it.

    A shared block serves the blocks of one kind within one span; config.boundaries are layers or 'uniform'.
    """
    if isinstance(config.boundaries, tuple):
        starts = [b - first for b in config.boundaries]
    else:
        count = min(config.phases, len(blocks))
        starts = [round(i * len(blocks) / count) for i in range(1, count)]
    groups = [(sum(i >= start for start in starts), kind) for i, kind in enumerate(kinds(blocks))]
    order = sorted(set(groups), key=groups.index)
    return [order.index(group) for group in groups]


def build_field(
        config: OdeConfig,
        blocks: Sequence[nn.Module],
        first: int = 0,
        moments: Moments | None = None,
) -> Field:
    """Build the vector field of an ODE-ViT; the base's blocks are read, not changed.

    Args:
        config: Field, time dependence, phases (boundaries given or uniform) and initialisation.
        blocks: Consecutive transformer blocks of the base.
        first: Layer of the first block.
        moments: For init 'svd_data', the second moment of the inputs of each linear layer.

    Returns:
        A field with weights of its own, and with the device, dtype and mode of the blocks. A parameter is trainable if
        it is trainable in any of the blocks that it replaces.
    """
    assigned = assignment(config, blocks, first)
    device = next(blocks[0].parameters()).device
    with torch.no_grad(), random_states_kept(device):
        fields = [_build([i for i, o in enumerate(assigned) if o == index], config, blocks, first, moments)
                  for index in range(max(assigned) + 1)]
    if len(fields) == 1:
        return fields[0]
    return PiecewiseField(fields, range(first, first + len(blocks)), assigned).train(fields[0].training)


def spectral_(weight: Tensor, parts: int = 1) -> Tensor:
    """Fill a matrix with random values and scale it to spectral norm 1, in place.

    Args:
        weight: Matrix [M, D].
        parts: Number of equal row blocks, each scaled separately; 3 for a joint q, k, v projection.

    Source: ODE-ViT, arXiv 2511.16501 (spectral initialisation).
    """
    with torch.no_grad():
        nn.init.normal_(weight)
        if not weight.is_meta:
            for part in weight.chunk(parts):
                dtype = torch.promote_types(part.dtype, torch.float32)
                part.div_(torch.linalg.matrix_norm(part.to(dtype), ord=2).to(part.dtype))
    return weight


def set_per_layer(block: nn.Module, others: Sequence[nn.Module]) -> None:
    """Give a block the mean over `others` of the constants that timm sets by depth, such as stochastic-depth rates."""
    found = [per_layer(other) for other in others]
    for name, key in {pair for constants in found for pair in constants}:
        value = sum(constants.get((name, key), 0.) for constants in found) / len(found)
        parent = block.get_submodule(name.rpartition('.')[0])
        if key == 'drop_prob':
            module = DropPath(value) if value > 0. else nn.Identity()
            setattr(parent, name.rpartition('.')[2], module.train(block.training))
        else:
            setattr(block.get_submodule(name), key, value)


def _build(
        group: list[int], config: OdeConfig, blocks: Sequence[nn.Module], first: int, moments: Moments | None,
) -> Field:
    """The field for the blocks with the given indices."""
    members = [blocks[i] for i in group]
    base = _structure(config.field, members)
    if config.init == 'spectral':
        _spectral_init(base)
    else:
        layers = [FIELDS[config.field].values(block) for block in members]
        if config.init == 'svd_data' and not next(base.parameters()).is_meta:
            layers, moments = _aligned(layers, members[0], group, first, moments)
        for name, parameter in base.named_parameters():
            parameter.copy_(_mean([values[name] for values in layers]))
        for name, buffer in _statistics(base):
            buffer.copy_(_mean([block.get_buffer(name.removeprefix('block.')) for block in members]))
    if config.time == 'autonomous':
        return base
    field = TimeField(base, [first + i for i in group], config.rank).train(base.training)
    if config.init != 'spectral':
        _fill_residuals(field, layers, config, moments)
        for name, buffer in _statistics(base):
            inner = name.removeprefix('block.')
            field.add_statistics(name, torch.stack([block.get_buffer(inner) - buffer for block in members]))
    return field


def _aligned(
        layers: list[dict[str, Tensor]], block: nn.Module, group: list[int], first: int, moments: Moments | None,
) -> tuple[list[dict[str, Tensor]], Moments]:
    """The layers' values and the moments of their inputs, with heads and neurons in a common order."""
    orders = aligning_orders(layers, block)
    moments = dict(moments or {})
    for index, order in zip(group, orders, strict=True):
        for name, (_, columns) in order.items():
            if columns is not None and (first + index, name) in moments:
                moments[first + index, name] = permuted(moments[first + index, name], (columns, columns))
    return [{name: permuted(p, order.get(name)) for name, p in values.items()}
            for values, order in zip(layers, orders, strict=True)], moments


def _fill_residuals(
        field: TimeField, layers: list[dict[str, Tensor]], config: OdeConfig, moments: Moments | None) -> None:
    """Set the residuals of a field to the layers' values, those of matrices truncated to the field's rank."""
    for row, (layer, values) in enumerate(zip(field.layers, layers, strict=True)):
        for name, parameter in field.base.named_parameters():
            key = residual_key(name)
            if key in field.vectors:
                field.vectors[key][row] = values[name] - parameter
            elif key in field.up and config.init in ('svd', 'svd_data') and not parameter.is_meta:
                residual = (values[name] - parameter).reshape(matrix_shape(parameter))
                found = factors(residual, field.up[key].shape[-1], (moments or {}).get((layer, name)))
                field.up[key][row], field.down[key][row] = found


def _structure(kind: str, members: Sequence[Any]) -> Field:
    """A field with the structure of some blocks; its weights are still to be filled in."""
    cls = field_class(members[0]) if FIELDS[kind] is NativeField else FIELDS[kind]
    field = cls.like(members).train(members[0].training)
    if isinstance(field, NativeField):
        set_per_layer(field.block, members)
    return field


def _statistics(field: Field) -> list[tuple[str, Tensor]]:
    """Saved buffers that are not counts: running means and variances."""
    saved = field.state_dict()
    return [(name, b) for name, b in field.named_buffers() if name in saved and b.is_floating_point()]


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
    R = residual.to(torch.promote_types(residual.dtype, torch.float32))
    if moment is not None and not moment.any():  # nothing ever reaches the layer
        moment = None
    if moment is not None:
        values, vectors = torch.linalg.eigh(moment.to(R))
        values = values.clamp_min(1e-6 * values.max()).sqrt()  # directions that never occur keep a little weight
        R = R @ (vectors * values)
    if 8 * rank < min(M, N):
        _seed(R.device)  # the sketch is random; a conversion must not be
        U, S, V = torch.svd_lowrank(R, q=min(2 * rank + 8, M, N), niter=4)
        U, S, Vh = U[:, :rank], S[:rank], V[:, :rank].T
    else:
        U, S, Vh = torch.linalg.svd(R, full_matrices=False)
        U, S, Vh = U[:, :rank], S[:rank], Vh[:rank]
    up, down = U * S.sqrt(), S.sqrt()[:, None] * Vh
    if moment is not None:
        down = down @ (vectors / values).T
    return up.to(residual), down.to(residual)


def _seed(device: torch.device) -> None:
    """Seed only the generator that random tensors on a device come from."""
    if device.type in ('cpu', 'meta'):
        torch.default_generator.manual_seed(0)
        return
    backend = torch.get_device_module(device)
    with backend.device(device) if hasattr(backend, 'device') else nullcontext():
        backend.manual_seed(0)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([tensor.to(dtype) for tensor in tensors]).mean(0)
