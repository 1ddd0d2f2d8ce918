"""Halting: images whose answer no longer changes leave the batch before the last step."""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import WITH_HEAD, OdeConfig
from .fields import Context
from .tokens import keep_groups

__all__ = ['Readout', 'Scores', 'run_halting']

Readout = Callable[[Tensor], Tensor]


class Scores:
    """The score of each image after each step, by one rule; an image halts when its score is at most the threshold.

    All scores are dimensionless: 'entropy' is that of the class probabilities, relative to log(classes); 'confidence'
    is one minus the largest probability; 'residual' is the length of the step per unit of time, relative to the norm of
    the state; 'acceleration' is the change of this velocity from one step to the next, the larger one of the last two.

    Args:
        rule: One of HALTING.
        readout: Logits [B, classes] for a state [B, N, D]; needed by 'entropy' and 'confidence'.

    Source: entropy of the head along the way: Loop-ViT, arXiv 2602.02156.
    """

    def __init__(self, rule: str, readout: Readout | None) -> None:
        self.rule, self.readout = rule, readout
        self.velocity: Tensor | None = None
        self.change: Tensor | None = None

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Tensor:
        """The scores [B] after a step of length h from one state [B, N, D] to another."""
        if self.rule in WITH_HEAD:
            assert self.readout is not None
            p = self.readout(after).softmax(dim=-1, dtype=torch.float32)
            if self.rule == 'confidence':
                return 1. - p.amax(dim=-1)
            return torch.special.entr(p).sum(dim=-1) / math.log(max(p.shape[-1], 2))
        velocity = ((after - before) / h).flatten(1).float()
        norm = after.flatten(1).float().norm(dim=-1)
        if self.rule == 'residual':
            return velocity.norm(dim=-1) / norm
        never = torch.full_like(norm, torch.inf)
        change = never if self.velocity is None else (velocity - self.velocity).norm(dim=-1) / norm
        score = never if self.change is None else torch.maximum(change, self.change)
        self.velocity, self.change = velocity, change
        return score

    def keep(self, images: Tensor) -> None:
        """Keep only some of the images [B', as indices] of the batch."""
        if self.velocity is not None and self.change is not None:
            self.velocity, self.change = self.velocity[images], self.change[images]


def run_halting(
        steps: Sequence[tuple[Any, Context]],
        x: Tensor,
        config: OdeConfig,
        readout: Readout | None,
) -> tuple[Tensor, Tensor]:
    """Run the steps; an image whose score is at most the threshold keeps its state and leaves the batch.

    Under torch.compile, torch.export and tracing, shapes cannot depend on values: every image then goes through all
    steps, with the same result, and no time is saved.

    Args:
        steps: The steps, each with its context.
        x: State before the first step [B, N, D].
        config: The rule and the threshold.
        readout: Logits [B, classes] for a state [B, N, D]; needed by 'entropy' and 'confidence'.

    Returns:
        The last state of each image [B, N, D], and how many steps it took [B].

    Raises:
        ValueError: The model passes its blocks something for each image, such as an attention mask.
    """
    for name, value in steps[0][1].block_kwargs.items():
        if isinstance(value, Tensor) and (value.ndim > 2 or name == 'attn_mask'):
            raise ValueError(
                f'The model passes its blocks a {name} for the whole batch, so images cannot leave it early. Set '
                'halting=None.')
    scores = Scores(str(config.halting), readout)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _run_all(steps, x, scores, config.halting_threshold)
    taken = torch.full((len(x),), len(steps), device=x.device)
    active, ended = torch.arange(len(x), device=x.device), x
    for i, (step, context) in enumerate(steps):
        before, x = x, step(x, context)
        if i == len(steps) - 1:
            break
        done = scores(before, x, step.h) <= config.halting_threshold
        if done.any():
            where, stay = active[done], (~done).nonzero()[:, 0]
            taken[where] = i + 1
            ended = ended.index_copy(0, where, x[done])
            whole, x, active = x, x[stay], active[stay]
            if not len(active):
                break
            scores.keep(stay)
            keep_groups(whole, x, stay)
    return ended.index_copy(0, active, x), taken


def _run_all(
        steps: Sequence[tuple[Any, Context]], x: Tensor, scores: Scores, threshold: float) -> tuple[Tensor, Tensor]:
    """The same result in shapes that do not depend on values; len(x) would fix the number of images in an export."""
    taken = torch.full((x.shape[0],), len(steps), device=x.device)
    halted = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    for i, (step, context) in enumerate(steps):
        stepped = step(x, context)
        after = torch.where(halted.view(-1, *[1] * (x.ndim - 1)), x, stepped)
        keep_groups(stepped, after)
        if i < len(steps) - 1:
            done = scores(x, after, step.h) <= threshold
            taken = torch.where(done & ~halted, i + 1, taken)
            halted = halted | done
        x = after
    return x, taken
