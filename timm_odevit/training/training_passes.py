"""What of a task runs inside DistributedDataParallel and torch.compile: the passes of the student."""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..distributed import over_processes
from ..hooks import BlockRecord, state_at, watch_blocks
from ..ode.blocks import find_ode_blocks
from .checkpoints import hidden_states
from .config import LossConfig
from .losses import jasmin_loss
from .matching import is_one_sequence

__all__ = ['StepwisePass', 'TrainingPass', 'TrajectoryPass']


class TrainingPass(nn.Module):
    """A student's training pass in one `forward`, so that DistributedDataParallel can wrap it."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student: Any = student

    def no_weight_decay(self) -> set[str]:
        """The student's, for prefixed names."""
        return {f'student.{name}' for name in getattr(self.student, 'no_weight_decay', set)()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The student's, for prefixed names."""
        groups = group_parameters(self.student, self.student.group_matcher(coarse=coarse), reverse=True)
        return lambda name: groups[name[len('student.'):]]


class StepwisePass(TrainingPass):
    """All steps of a student, each from a given state."""

    def forward(self, seen: Sequence[BlockRecord]) -> Tensor:
        losses = []
        again = torch.is_grad_enabled() and any(getattr(m, 'grad_checkpointing', False) for m in self.student.modules())
        for ode, (states, handed) in zip(find_ode_blocks(self.student), seen, strict=True):
            step: Any
            for step in ode.solver:
                start, end = (state_at(states, range(len(states)), t) for t in (step.t, step.t + step.h))
                args, kwargs = handed[int(step.t + 1e-6)]  # a base may pass different arguments to each layer
                if step.merging is not None:  # each step starts a pass of its own
                    args, kwargs = (step.field.context(args, kwargs)._replace(tokens=step.merging.start()),), {}
                call = partial(checkpoint, step, use_reentrant=False) if again else step
                error = (call(start, *args, **kwargs) - end).float().square().mean()
                moved = over_processes((end - start).float().square().mean())
                losses.append(error / moved.clamp_min(1e-12))
        return torch.stack(losses).mean()


class TrajectoryPass(TrainingPass):
    """A student's outputs, and its states along the way."""

    def __init__(self, student: nn.Module, config: LossConfig) -> None:
        super().__init__(student)
        self.config, self.one_sequence = config, is_one_sequence(student)

    def forward(
            self, student: Any, images: Tensor, steps: Sequence[Sequence[int]],
    ) -> tuple[Tensor, list[Tensor], Tensor | None, list[Tensor]]:
        """Outputs, states after `steps` of each stage, the JaSMin loss if it has a weight, and outputs at the exits.

        `student` is the student itself or a view of it.
        """
        if not self.one_sequence:
            with watch_blocks([list(ode) for ode in find_ode_blocks(student)]) as seen:
                output = student(images)
            reached = [after[step + 1] for (after, _), of in zip(seen, steps, strict=False) for step in of]
            return output, reached, None, []
        blocks, along = student.blocks, steps[0] if steps else ()
        first, last = len(blocks.before), len(blocks.before) + blocks.steps - 1
        exits = [min(max(first + round(t * blocks.steps) - 1, first), last - 1) for t in self.config.exits
                 ] if last > first else []
        starts = self._jasmin_states(first, max(last - 1, first))
        indices = sorted({*along, *starts, *exits})
        features, states = hidden_states(student, images, indices)
        state = dict(zip(indices, states, strict=True))
        maps = [blocks.shared.attention_map(blocks[i].t + blocks[i].h, state[i]) for i in starts]
        jasmin = torch.stack([jasmin_loss(m, self.config.jasmin_k) for m in maps]).mean() if maps else None
        early = [student.forward_head(student.norm(state[i])) for i in exits]
        return student.forward_head(features), [state[i] for i in along], jasmin, early

    def _jasmin_states(self, first: int, last: int) -> list[int]:
        """Evenly spaced steps after which attention is recomputed; the last state counts only if it is the only one."""
        if not self.config.jasmin_weight > 0:
            return []
        count = min(self.config.jasmin_evaluations, last - first + 1)
        return torch.linspace(first, last, count).round().int().tolist()
