"""Weights in a few bits: matrices rounded in groups, each with a scale and a zero point."""
from collections.abc import Mapping
from contextlib import ExitStack
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import check_images, evaluating

BITS = 4  # of what is stored
GROUP = 32  # consecutive numbers of a tensor
SMALL = 1024  # a tensor with fewer numbers, and a vector, keeps 16 bits
ENOUGH = 128  # images to round by
_EAGER = Lock()  # of the stance, in which hooks run: all threads share it


class Coded(NamedTuple):
    """A tensor as scale * (codes - zero)."""
    codes: Tensor  # uint8 [groups, 32]
    scale: Tensor  # float16 [groups, 1]
    zero: Tensor  # uint8 [groups, 1]

    def values(self, shape: Any) -> Tensor:
        of_groups = self.scale.float() * (self.codes.float() - self.zero.float())
        return of_groups.flatten()[:torch.Size(shape).numel()].view(shape)


def is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and SMALL <= tensor.numel() > tensor.shape[-1] and tensor.shape[-1] % 2 == 0


def in_groups(tensor: Tensor, bits: int = BITS) -> Coded:
    flat, top = tensor.detach().flatten().float(), 2 ** bits - 1
    groups = F.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / top).clamp(2. ** -24, 65504.).half()  # what float16 holds
    zero = (-low / scale.float()).round().clamp(max=top)
    codes = (groups / scale.float() + zero).round().clamp(0, top)
    codes += (codes == top - 1) & (groups == high)  # so that what is rounded has the same scale
    return Coded(codes.byte(), scale, zero.byte())


def packed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with 4 bits for each number of a matrix, and 16 for all others."""
    small: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if is_rounded(tensor):
            codes, scale, zero = in_groups(tensor)
            *rows, last = tensor.shape
            small[f'{name}.codes'] = _pairs(codes.flatten()[:tensor.numel()]).view(*rows, last // 2)
            small[f'{name}.scale'] = scale[:, 0].contiguous()
            small[f'{name}.zero'] = _pairs(F.pad(zero[:, 0], (0, len(zero) % 2)))
        else:
            small[name] = (tensor.clamp(-65504, 65504).half() if tensor.is_floating_point() else tensor).contiguous()
    return small


def unpacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of which `packed` made this, with rounded numbers; any other one as it is."""
    large = dict(state)
    for stem in [name.removesuffix('.codes') for name, tensor in state.items()
                 if name.endswith('.codes') and tensor.dtype is torch.uint8]:
        codes, scale, zero = (large.pop(f'{stem}.{part}') for part in ('codes', 'scale', 'zero'))
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


def quantize_(model: nn.Module, images: Tensor, bits: int = 4) -> None:
    """Round the matrices of a model's layers in place, such that these compute almost the same on some images.

    Those of a shared block are rounded for its inputs in all steps. `save_pretrained` and `export_model` with bits=4
    store 4 bits as they are, and round to nearest what is left: other bits, position embeddings, and matrices by which
    no layer multiplies (qkv of BEiT and Swin V2).

    Source: GPTQ, arXiv 2210.17323: the columns of a matrix that are left make up for the errors of those rounded.

    Args:
        images: [N, C, H, W], normalised for the model; 128 are enough.
        bits: For each number, from 2 to 8.

    Raises ValueError, and leaves the model as it is, for other images or bits, or if what its layers see is not finite.

    Examples:
        >>> quantize_(student, images)
        >>> path = save_pretrained(student, 'small', bits=4)
    """
    check_images(images)
    if bits not in range(2, 9):
        raise ValueError(f'Give 2 to 8 bits; got {bits}.')
    moments: dict[Tensor, Any] = {}  # of the inputs of each matrix

    def collect(layer: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].float()
        if isinstance(layer, nn.Conv2d):
            x = F.unfold(x, layer.kernel_size, stride=layer.stride).mT
        x = x.flatten(0, -2)
        moments[layer.weight] = moments.get(layer.weight, 0.) + x.T @ x

    like = next(model.parameters())
    with (_EAGER, torch.compiler.set_stance('force_eager'), torch.no_grad(), evaluating(model),
          torch.autocast(like.device.type, enabled=False), ExitStack() as hooks):
        for layer in model.modules():
            patches = isinstance(layer, nn.Conv2d) and layer.kernel_size == layer.stride and layer.groups == 1
            if (isinstance(layer, nn.Linear) or patches) and 'weight' in layer._parameters:  # not computed
                hooks.enter_context(layer.register_forward_pre_hook(collect))
        for batch in images.to(like).split(32):
            model(batch)
        if not all(of.isfinite().all() for of in moments.values()):
            raise ValueError('The images give values that are not finite.')
        for p, values in [(p, _compensated(p, of, bits)) for p, of in moments.items() if is_rounded(p)]:
            p.copy_(values)


def _compensated(weight: Tensor, moments: Tensor, bits: int) -> Tensor:
    nearest = in_groups(weight, bits).values(weight.shape)
    if len(moments) % GROUP:
        return nearest
    left = weight.flatten(1).float().clone()
    step = (nearest.flatten(1).abs().amax(1) / 64).clamp_min(1e-12)  # of int8, in which a file may compute
    damped = (moments + (0.01 * moments.diag().mean() + 1e-8).expand(len(moments)).diag()).cpu()  # MPS lacks these
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).to(left)
    for start in range(0, len(moments), GROUP):
        part, rows = left[:, start:start + GROUP], inverse[start:start + GROUP]
        codes, scale, zero = (of.float() for of in in_groups(part, bits))
        ends = (codes == codes.amin(1, keepdim=True)) | (codes == codes.amax(1, keepdim=True))
        errors = torch.empty_like(part)
        for i in range(GROUP):
            code = (part[:, i] / scale[:, 0] + zero[:, 0]).round().clamp(0, 2 ** bits - 1)
            value = scale[:, 0] * (torch.where(ends[:, i], codes[:, i], code) - zero[:, 0])
            stored = (value / step).round() * step if bits == BITS else value
            errors[:, i] = (part[:, i] - stored) / rows[i, start + i]
            part[:, i:] -= errors[:, i:i + 1] * rows[i, start + i:start + GROUP]
            part[:, i] = value
        left[:, start + GROUP:] -= errors @ rows[:, start + GROUP:]
    return left.view_as(weight)
