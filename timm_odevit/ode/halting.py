"""Fewer steps: images whose answer is settled leave the batch, by the rules in HALTING."""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .fields import Context, Groups
from .tokens import carry, groups_of

Readout = Callable[[Tensor], Tensor]  # logits [B, classes] for a state [B, N, D]


class Rule:
    """Called with the states [B, N, D] before and after a step of length h: a score of each image [B]."""
    needs_head = False

    def __init__(self, readout: Readout | None = None) -> None:
        self.readout: Any = readout

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Any: ...

    def keep(self, images: Tensor) -> None:
        """Keep only some of the images of the batch, by index [B']."""


class Entropy(Rule):
    """The entropy of the class probabilities, relative to log(classes). Source: Loop-ViT, arXiv 2602.02156."""
    needs_head = True

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Tensor:
        p = self.readout(after).softmax(dim=-1, dtype=torch.float32)
        return torch.special.entr(p).sum(dim=-1) / math.log(max(p.shape[-1], 2))


class Acceleration(Rule):
    """The change of the velocity from one step to the next, the larger of the last two, relative to the state."""
    velocity: Tensor | None = None
    change: Tensor | None = None

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Tensor:
        velocity = ((after - before) / h).flatten(1).float()
        norm = after.flatten(1).float().norm(dim=-1)
        never = torch.full_like(norm, torch.inf)
        change = never if self.velocity is None else (velocity - self.velocity).norm(dim=-1) / norm
        score = never if self.change is None else torch.maximum(change, self.change)
        self.velocity, self.change = velocity, change
        return score

    def keep(self, images: Tensor) -> None:
        if self.velocity is not None and self.change is not None:
            self.velocity, self.change = self.velocity[images], self.change[images]


HALTING: dict[str, type[Rule]] = {'entropy': Entropy, 'acceleration': Acceleration}


def run_halting(
        steps: Sequence[tuple[Any, Context]], x: Tensor, rule: Rule, threshold: float) -> tuple[Tensor, Tensor]:
    """Run the steps, each with its context; an image whose score is at most the threshold leaves the batch.

    Returns the last state of each image [B, N, D], and how many steps it took [B].
    """
    for name, value in steps[0][1].block_kwargs.items():
        if isinstance(value, Tensor) and (value.ndim > 2 or name == 'attn_mask'):
            raise ValueError(f'The model passes its blocks a {name} for the whole batch, so no image can leave early. '
                             'Set halting=None.')
    taken = torch.full((x.shape[0],), len(steps), device=x.device)  # len(x) would fix it in a graph
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _run_all(steps, x, rule, threshold, taken)
    active, ended = torch.arange(len(x), device=x.device), x
    for i, (step, context) in enumerate(steps, 1):
        before, x = x, step(x, context)
        if i == len(steps):
            break
        done = rule(before, x, step.h) <= threshold
        if done.any():
            taken[active[done]] = i
            ended = ended.index_copy(0, active[done], x[done])
            stay = (~done).nonzero()[:, 0]
            if not len(stay):
                return ended, taken
            groups, active = groups_of(x), active[stay]
            x = carry(groups and Groups(*(of[stay] for of in groups)), x[stay])
            rule.keep(stay)
    return ended.index_copy(0, active, x), taken


def _run_all(steps: Sequence[tuple[Any, Context]], x: Tensor, rule: Rule, threshold: float,
             taken: Tensor) -> tuple[Tensor, Tensor]:
    # shapes must not depend on values: every image goes through all steps
    halted = torch.zeros_like(taken, dtype=torch.bool)
    for i, (step, context) in enumerate(steps, 1):
        before, x = x, step(x, context)
        x = carry(groups_of(x), torch.where(halted.view(-1, *[1] * (x.ndim - 1)), before, x))
        if i < len(steps):
            done = rule(before, x, step.h) <= threshold
            taken = torch.where(done & ~halted, i, taken)
            halted = halted | done
    return x, taken
