"""Halting: images whose answer no longer changes leave the batch before the last step."""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .fields import Context
from .tokens import carry_groups

__all__ = ['HALTING', 'Readout', 'run_halting']

Readout = Callable[[Tensor], Tensor]  # logits [B, classes] for a state [B, N, D]


class Rule:
    """The score of each image after each step; an image halts when its score is at most the threshold.

    `readout` is the model's norm and head; rules that need none may get None.
    """
    needs_head = False

    def __init__(self, readout: Readout | None = None) -> None:
        self.readout: Any = readout

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Tensor:
        """The dimensionless scores [B] after a step of length h from one state [B, N, D] to another."""
        raise NotImplementedError

    def keep(self, images: Tensor) -> None:
        """Keep only some of the images of the batch, by index [B']."""


class Entropy(Rule):
    """The entropy of the class probabilities, relative to log(classes).

    Source: Loop-ViT, arXiv 2602.02156.
    """
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

    Returns the last state of each image [B, N, D], and how many steps it took [B]. Under torch.compile, torch.export
    and tracing, shapes cannot depend on values: every image goes through all steps, with the same result.
    """
    for name, value in steps[0][1].block_kwargs.items():
        if isinstance(value, Tensor) and (value.ndim > 2 or name == 'attn_mask'):
            raise ValueError(f'The model passes its blocks a {name} for the whole batch, so images cannot leave it '
                             'early. Set halting=None.')
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _run_all(steps, x, rule, threshold)
    taken = torch.full((len(x),), len(steps), device=x.device)
    active, ended = torch.arange(len(x), device=x.device), x
    for i, (step, context) in enumerate(steps):
        before, x = x, step(x, context)
        if i == len(steps) - 1:
            break
        done = rule(before, x, step.h) <= threshold
        if done.any():
            where, stay = active[done], (~done).nonzero()[:, 0]
            taken[where] = i + 1
            ended = ended.index_copy(0, where, x[done])
            x, active = carry_groups(x, x[stay], stay), active[stay]
            if not len(active):
                break
            rule.keep(stay)
    return ended.index_copy(0, active, x), taken


def _run_all(
        steps: Sequence[tuple[Any, Context]], x: Tensor, rule: Rule, threshold: float) -> tuple[Tensor, Tensor]:
    # len(x) would fix the number of images in an export
    taken = torch.full((x.shape[0],), len(steps), device=x.device)
    halted = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    for i, (step, context) in enumerate(steps):
        stepped = step(x, context)
        after = carry_groups(stepped, torch.where(halted.view(-1, *[1] * (x.ndim - 1)), x, stepped))
        if i < len(steps) - 1:
            done = rule(x, after, step.h) <= threshold
            taken = torch.where(done & ~halted, i + 1, taken)
            halted = halted | done
        x = after
    return x, taken
