"""The shared blocks' weights, from the base's blocks."""
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from timm.layers import Attention, DropPath, Mlp
from torch import Tensor, nn

from ..hooks import evaluating, hooked, random_states_kept
from ..ode.config import FIELDS, OdeConfig
from ..ode.fields import Field, NativeField
from ..ode.time_dependence import PiecewiseField, TimeField, matrix_shape, residual_key
from .block_kinds import PER_LAYER, field_class, kinds

__all__ = ['aligned', 'assignment', 'build_field', 'factors', 'input_moments', 'spectral_']

Blocks = dict[int, Any]  # by layer
Moments = dict[tuple[int, str], Tensor]  # second moment of the inputs of a linear layer, by layer and parameter name
Layers = dict[int, dict[str, Tensor]]  # for each layer, its tensors by their name in the field ('block.mlp.fc1.weight')


def borders(config: OdeConfig, layers: Iterable[int]) -> list[int]:
    """The layers at which a span begins, except the first."""
    layers = list(layers)
    phases = min(config.phases, len(layers))
    return [layers[round(i * len(layers) / phases)] for i in range(1, phases)]


def assignment(config: OdeConfig, blocks: Blocks) -> list[int]:
    """For each block, the index of the shared block that replaces it, with those of its kind within its span."""
    starts = borders(config, blocks)
    groups = [(bisect_right(starts, layer), kind) for layer, kind in zip(blocks, kinds(blocks.values()), strict=True)]
    order = [*dict.fromkeys(groups)]
    return [order.index(group) for group in groups]


def build_field(config: OdeConfig, blocks: Blocks, moments: Moments | None = None) -> Field:
    """The field, with weights of its own, that replaces consecutive blocks of the base; its mode is to be set."""
    assigned = assignment(config, blocks)
    groups: dict[int, Blocks] = {}
    for (layer, block), index in zip(blocks.items(), assigned, strict=True):
        groups.setdefault(index, {})[layer] = block
    with torch.no_grad(), random_states_kept(next(next(iter(blocks.values())).parameters()).device):
        fields = [_build(config, group, moments or {}) for group in groups.values()]
    if len(fields) == 1:
        return fields[0]
    return PiecewiseField(fields, list(blocks), assigned, borders(config, blocks))


def spectral_(weight: Tensor, parts: int = 1) -> Tensor:
    """Fill a matrix [M, D] with random values and scale each of its parts (q, k, v) to spectral norm 1, in place."""
    with torch.no_grad():
        nn.init.normal_(weight)
        if not weight.is_meta:
            for part in weight.chunk(parts):
                part.div_(torch.linalg.matrix_norm(_precise(part), ord=2).to(part.dtype))
    return weight


def _set_per_layer(block: nn.Module, others: Sequence[nn.Module]) -> None:
    """Give a block the mean of the constants that timm sets by depth in others."""
    constants = [{(name, key): getattr(module, key) for name, module in other.named_modules() for key in PER_LAYER
                  if isinstance(getattr(module, key, None), float)} for other in others]
    for name, key in set().union(*constants):
        value = sum(by_name.get((name, key), 0.) for by_name in constants) / len(others)
        if key == 'drop_prob':
            parent, _, own = name.rpartition('.')
            setattr(block.get_submodule(parent), own, DropPath(value) if value > 0. else nn.Identity())
        else:
            setattr(block.get_submodule(name), key, value)


def _build(config: OdeConfig, blocks: Blocks, moments: Moments) -> Field:
    """The field that replaces the blocks of some layers."""
    cls, originals = FIELDS[config.field], list(blocks.values())
    base = (field_class(originals[0]) if cls is NativeField else cls).like(originals)
    if isinstance(base, NativeField):
        _set_per_layer(base.block, originals)
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
    field = TimeField(base, list(blocks), config.rank)
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
    if rank in (M, N):  # nothing to truncate
        one = torch.eye(rank, dtype=residual.dtype, device=residual.device)
        return (residual, one) if rank == N else (one, residual)
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


def input_moments(model: nn.Module, blocks: Blocks, images: Tensor) -> Moments:
    """Second moment x^T x / n [N, N] of the inputs of every linear layer of some blocks."""
    moments: Moments = {}

    def watch(key: tuple[int, str]):
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0].flatten(0, -2).float()
            moments[key] = moments.get(key, torch.zeros((), device=x.device)) + x.T @ x / len(x)
        return hook
    linears = [((layer, f'block.{name}.weight'), module) for layer, block in blocks.items()
               for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    with hooked(*((module, 'before', watch(key)) for key, module in linears)), evaluating(model), torch.no_grad():
        model(images)
    return moments


def aligned(layers: Layers, block: Any, moments: Moments) -> tuple[Layers, Moments]:
    """Bring heads and neurons of several layers into one order, without changing what each layer computes.

    In rounds, layer by layer, they are assigned to those of the mean of the other layers so that the inner product of
    the weights is largest. What is not plain in `block`, one of the blocks, is left. Source: arXiv 2209.04836.
    """
    layers, moments = {layer: dict(values) for layer, values in layers.items()}, dict(moments)
    attn, mlp = getattr(block, 'attn', None), getattr(block, 'mlp', None)
    if type(attn) is Attention and isinstance(attn.norm, nn.Identity) and getattr(attn, 'gate', None) is None:
        _align(layers, moments, 'block.attn.qkv', 'block.attn.proj', 3, attn.num_heads)
    if type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity):
        _align(layers, moments, 'block.mlp.fc1', 'block.mlp.fc2', 1, block.mlp.fc1.out_features)
    return layers, moments


def _align(layers: Layers, moments: Moments, first: str, second: str, parts: int, units: int) -> None:
    """Reorder the units between two linear layers: rows of the first, in `parts` parts, and columns of the second."""
    weight, bias, after = f'{first}.weight', f'{first}.bias', f'{second}.weight'
    features = []  # of the units of each layer
    for values in layers.values():
        columns = [*values[weight].reshape(parts, units, -1), values[after].T.reshape(units, -1)]
        if parts == 1 and bias in values:  # in attention, the biases of the keys do nothing
            columns.append(values[bias][:, None])
        features.append(torch.cat(columns, dim=1).float())
    for (layer, values), order in zip(layers.items(), _match(features), strict=True):
        width = values[after].shape[1]
        moved = torch.arange(width, device=order.device).view(units, -1)[order].flatten()
        rows = torch.cat([moved + part * width for part in range(parts)])
        values.update({name: values[name][rows] for name in (weight, bias) if name in values})
        values[after] = values[after][:, moved]
        if (layer, after) in moments:
            moments[layer, after] = moments[layer, after][moved][:, moved]


def _match(features: list[Tensor]) -> list[Tensor]:
    """For each layer, the order of its units [n] that brings their features [n, f] closest to the others'."""
    from scipy.optimize import linear_sum_assignment  # comes with torchdiffeq
    orders = [torch.arange(len(f), device=f.device) for f in features]
    total = torch.stack(features).sum(0)
    for _ in range(3 if len(features) > 1 else 0):
        for i, f in enumerate(features):
            others = total - f[orders[i]]
            order = linear_sum_assignment((others @ f.T).cpu().numpy(), maximize=True)[1]
            orders[i] = torch.as_tensor(order, device=f.device)
            total = others + f[orders[i]]
    return orders
