"""Fewer steps: images whose answer is settled, by the entropy of their classes, leave the batch."""
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .fields import Context, Groups
from .tokens import carry, groups_of

Readout = Callable[[Tensor], Tensor]  # logits [B, classes] for a state [B, N, D]


def entropy(logits: Tensor) -> Tensor:
    """The score of each image [...] by its logits [..., classes]: the entropy of its classes, divided by log(classes).

    Source: Loop-ViT, arXiv 2602.02156.
    """
    p = logits.softmax(dim=-1, dtype=torch.float32)
    return torch.special.entr(p).sum(dim=-1) / math.log(p.shape[-1])


def run_halting(
        steps: list[tuple[Any, Context]], x: Tensor, readout: Readout, threshold: float) -> tuple[Tensor, Tensor]:
    """Run the steps, each with its context; an image whose score is at most the threshold leaves the batch.

    Returns the last state of each image [B, N, D], and how many steps it took [B].
    """
    for name, value in steps[0][1].block_kwargs.items():
        if isinstance(value, Tensor) and (value.ndim > 2 or name == 'attn_mask'):
            raise ValueError(f'The model passes its blocks a {name} for the whole batch, so no image can leave early. '
                             'Leave halting at None.')
    taken = torch.full((x.shape[0],), len(steps), device=x.device)  # len(x) would fix it in a graph
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        # shapes must not depend on values: every image goes through all steps
        for i, (step, context) in enumerate(steps, 1):
            going, y = taken >= i, step(x, context)
            x = carry(groups_of(y), torch.where(going.view(-1, *[1] * (x.ndim - 1)), y, x))
            if i < len(steps):
                taken = torch.where(going & (entropy(readout(x)) <= threshold), i, taken)
        return x, taken
    active, ended = torch.arange(len(x), device=x.device), x
    for i, (step, context) in enumerate(steps, 1):
        x = step(x, context)
        if i == len(steps):
            break
        done = entropy(readout(x)) <= threshold
        if count := int(done.sum()):  # one wait for a GPU
            stay, leave = done.int().argsort(stable=True).tensor_split([len(done) - count])
            taken[active[leave]] = i
            ended = ended.index_copy(0, active[leave], x[leave])
            groups, active = groups_of(x), active[stay]
            x = carry(groups and Groups(*(of[stay] for of in groups)), x[stay])
            if not len(x):
                break
    return ended.index_copy(0, active, x), taken
