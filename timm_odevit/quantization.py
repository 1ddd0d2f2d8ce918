"""Weights in a few bits: matrices rounded to nearest in groups, each with a scale and a zero point."""
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BITS = 4  # of what is stored
GROUP = 32  # consecutive numbers of a tensor
SMALL = 1024  # a tensor with fewer numbers, and a vector, keeps 16 bits
_PARTS = ('codes', 'scale', 'zero')


class Coded(NamedTuple):
    """A tensor as scale * (codes - zero)."""
    codes: Tensor  # uint8 [groups, 32]
    scale: Tensor  # float16 [groups, 1]
    zero: Tensor  # uint8 [groups, 1]

    def values(self, shape: Any) -> Tensor:
        """The tensor, in float32."""
        of_groups = self.scale.float() * (self.codes.float() - self.zero.float())
        return of_groups.flatten()[:torch.Size(shape).numel()].view(shape)


def is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor of a model is rounded; the others keep 16 bits."""
    return tensor.is_floating_point() and SMALL <= tensor.numel() > tensor.shape[-1] and tensor.shape[-1] % 2 == 0


def in_groups(tensor: Tensor, bits: int = BITS) -> Coded:
    flat, top = tensor.detach().flatten().float(), 2 ** bits - 1
    groups = F.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / top).clamp(2. ** -24, 65504.).half()  # what float16 holds
    zero = (-low / scale.float()).round().clamp(max=top)
    codes = (groups / scale.float() + zero).round().clamp(0, top)
    return Coded(codes.to(torch.uint8), scale, zero.to(torch.uint8))


def packed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with 4 bits for each number of a matrix, and 16 for all others."""
    small: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if is_rounded(tensor):
            codes, scale, zero = in_groups(tensor)
            *rows, last = tensor.shape
            for part, value in zip(_PARTS, (
                    _pairs(codes.flatten()[:tensor.numel()]).view(*rows, last // 2), scale[:, 0],
                    _pairs(F.pad(zero[:, 0], (0, len(zero) % 2)))), strict=True):
                small[f'{name}.{part}'] = value.contiguous()
        else:
            small[name] = (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
    return small


def unpacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of which `packed` made this, with rounded numbers; any other one as it is."""
    stems = [name.removesuffix('.codes') for name, tensor in state.items()
             if name.endswith('.codes') and tensor.dtype is torch.uint8]
    large = {name: tensor for name, tensor in state.items()
             if name.rpartition('.')[0] not in stems or name.rpartition('.')[2] not in _PARTS}
    for stem in stems:
        codes, scale, zero = (state[f'{stem}.{part}'] for part in _PARTS)
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        flat = _singles(codes.flatten())
        groups = F.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
        large[stem] = Coded(groups, scale[:, None], _singles(zero)[:len(scale), None]).values(shape)
    return large


def _pairs(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte, the first in its upper half."""
    return codes[::2] << 4 | codes[1::2]


def _singles(pairs: Tensor) -> Tensor:
    return torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten()


@contextmanager
def rounded(model: nn.Module, bits: int | None) -> Iterator[None]:
    """The model with its matrices rounded: gradients taken inside pass straight through to the numbers outside.

    Source: straight-through estimator, arXiv 1308.3432.
    """
    kept = [(p, p.detach().clone()) for p in model.parameters() if is_rounded(p)] if bits else []
    try:
        with torch.no_grad():
            for p, value in kept:
                p.copy_(in_groups(value, bits or BITS).values(p.shape))
        yield
    finally:
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)
