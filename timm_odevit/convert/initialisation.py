"""The shared blocks' weights, from the base's blocks."""
from bisect import bisect_right
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..hooks import random_states_kept
from ..ode.config import OdeConfig
from ..ode.fields import FIELDS, Field, NativeField, PiecewiseField
from .block_kinds import PER_LAYER, field_class, kinds

Blocks = dict[int, Any]  # by layer


def borders(config: OdeConfig, blocks: Blocks) -> list[int]:
    """The layers at which a span begins, except the first."""
    layers = list(blocks)
    phases = min(config.phases, len(layers))
    return [layers[round(i * len(layers) / phases)] for i in range(1, phases)]


def assignment(config: OdeConfig, blocks: Blocks) -> list[int]:
    """For each block, the index of the shared block that replaces it, with those of its kind within its span."""
    starts = borders(config, blocks)
    groups = [(bisect_right(starts, layer), kind) for layer, kind in zip(blocks, kinds(blocks.values()), strict=True)]
    order = [*dict.fromkeys(groups)]
    return [order.index(group) for group in groups]


def build_field(config: OdeConfig, blocks: Blocks) -> Field:
    """With weights of its own; its mode is to be set."""
    assigned = assignment(config, blocks)
    with torch.no_grad(), random_states_kept(next(next(iter(blocks.values())).parameters()).device):
        fields = [_build(config, [block for block, index in zip(blocks.values(), assigned, strict=True) if index == i])
                  for i in range(max(assigned) + 1)]
    return fields[0] if len(fields) == 1 else PiecewiseField(fields, list(blocks), assigned, borders(config, blocks))


def spectral_(weight: Tensor, parts: int) -> Tensor:
    """Fill a matrix [M, D] with random values and scale each of its parts (q, k, v) to spectral norm 1, in place."""
    nn.init.normal_(weight)
    if not weight.is_meta:
        for part in weight.chunk(parts):
            part.div_(torch.linalg.matrix_norm(_precise(part).cpu(), ord=2).to(part))
    return weight


def _build(config: OdeConfig, originals: list[Any]) -> Field:
    cls = FIELDS[config.field]
    base = (field_class(originals[0]) if cls is NativeField else cls).like(originals)
    if isinstance(base, NativeField):  # its block gets the mean of the constants that timm sets by depth
        constants = [{(name, key): getattr(module, key) for name, module in other.named_modules() for key in PER_LAYER
                      if isinstance(getattr(module, key, None), float)} for other in originals]
        for name, key in set().union(*constants):
            value = sum(by_name.get((name, key), 0.) for by_name in constants) / len(originals)
            if key == 'drop_prob':
                parent, _, own = name.rpartition('.')
                setattr(base.block.get_submodule(parent), own, DropPath(value) if value > 0. else nn.Identity())
            else:
                setattr(base.block.get_submodule(name), key, value)
    if config.init == 'spectral':
        for name, module in base.named_modules():
            if isinstance(module, nn.Linear):
                spectral_(module.weight, 3 if name.endswith('qkv') else 1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif hasattr(module, 'reset_parameters') and not list(module.children()):
                module.reset_parameters()
        return base
    layers = [cls.values(block) for block in originals]
    statistics = ((name, buffer) for name, buffer in base.named_buffers()  # running means and variances, not counts
                  if name in base.state_dict() and buffer.is_floating_point())
    for name, tensor in (*base.named_parameters(), *statistics):
        tensor.copy_(torch.stack([_precise(values[name]) for values in layers]).mean(0))
    return base


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
