"""Halting: images whose answer no longer changes leave the batch before the last step."""
import math
from typing import Any, Callable, Iterable, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .adaptive import Measured
from .config import WITH_HEAD, OdeConfig
from .fields import Context
from .methods import METHODS

__all__ = ['Halts', 'Readout', 'Scores', 'run_halting']

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

    def __init__(self, rule: str, readout: Optional[Readout]) -> None:
        self.rule, self.readout = rule, readout
        self.velocity: Optional[Tensor] = None
        self.change: Optional[Tensor] = None

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
        steps: Sequence[Tuple[Any, Context]],
        x: Tensor,
        config: OdeConfig,
        readout: Optional[Readout],
) -> Tuple[Tensor, Tensor]:
    """Run the steps; an image whose score is at most the threshold keeps its state and leaves the batch.

    Under torch.compile, torch.export and tracing, shapes cannot depend on values: every image then goes through all
    steps, with the same result, and no time is saved.

    Args:
        steps: Bound steps, each with its context.
        x: State before the first step [B, N, D].
        config: The rule and the threshold.
        readout: Logits [B, classes] for a state [B, N, D]; needed by 'entropy' and 'confidence'.

    Returns:
        The last state of each image [B, N, D], and how many steps it took [B].
    """
    for name, value in steps[0][1].passed.items():
        if isinstance(value, Tensor) and (value.ndim > 2 or name == 'attn_mask'):
            raise ValueError(
                f'Images cannot leave a batch for which the model passes its blocks a {name}. Set halting=None.')
    scores = Scores(str(config.halting), readout)
    fixed = torch.compiler.is_compiling() or torch.jit.is_tracing()
    B = x.shape[0]
    taken = torch.full((B,), len(steps), device=x.device)
    halted = torch.zeros(B, dtype=torch.bool, device=x.device)
    running, ended = torch.arange(B, device=x.device), x
    for i, (step, context) in enumerate(steps):
        after = step(x, context)
        if fixed:
            after = torch.where(halted.view(-1, *[1] * (x.ndim - 1)), x, after)
        if i == len(steps) - 1:
            x = after
            break
        done = scores(x, after, step.h) <= config.halting_threshold
        x = after
        if fixed:
            taken = torch.where(done & ~halted, i + 1, taken)
            halted = halted | done
        elif done.any():
            where, stay = running[done], (~done).nonzero()[:, 0]
            taken[where] = i + 1
            ended = ended.index_copy(0, where, x[done])
            x, running = x[stay], running[stay]
            if not len(running):
                break
            scores.keep(stay)
            if step.shared_by_pass is not None:
                step.shared_by_pass.keep(stay)
    return (x, taken) if fixed else (ended.index_copy(0, running, x), taken)


class Halts:
    """Blocks whose images may halt, and which know after how many steps they did."""
    _measured: Measured

    @property
    def settings(self) -> OdeConfig:
        """The settings that apply."""
        raise NotImplementedError

    @property
    def evaluations(self) -> float:
        """Field evaluations of this thread's last forward pass, on average over its images.

        A pass in which the host calls the steps one by one, as for intermediate states, does not count.
        """
        settings = self.settings
        if settings.adaptive:
            return self._measured.evaluations
        taken = self.steps_taken if settings.halting is not None else None
        steps = settings.grid[0] if taken is None or not len(taken) else float(taken.float().mean())
        return steps * METHODS[settings.method].evaluations

    @property
    def steps_taken(self) -> Optional[Tensor]:
        """Steps of each image [B] in this thread's last forward pass in which images could halt; may be set to None."""
        return self._measured.steps

    @steps_taken.setter
    def steps_taken(self, steps: Optional[Tensor]) -> None:
        self._measured.steps = steps

    def can_halt(self, steps: Iterable[Any], x: Any) -> bool:
        """Whether images may halt in a pass: not in training mode, under FX, or while a step has a hook.

        If not, the steps that they took in an earlier pass are forgotten.
        """
        if self.settings.halting is None or isinstance(x, torch.fx.Proxy):
            return False
        if not any(step.training or step.hooked for step in steps):
            return True
        if not torch.compiler.is_compiling():
            self._measured.steps = None
        return False

    def run_halting(
            self,
            steps: Sequence[Tuple[Any, Context]],
            x: Tensor,
            config: OdeConfig,
            readout: Optional[Readout],
    ) -> Tensor:
        """See `run_halting`."""
        x, taken = run_halting(steps, x, config, readout)
        if not torch.compiler.is_compiling():
            self._measured.steps = taken
        return x
