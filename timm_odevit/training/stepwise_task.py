"""StepwiseTask: each solver step learns on its own, from the teacher's state to the teacher's next state."""
from functools import partial
from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..convert.block_kinds import find_sites
from ..distributed import over_processes
from ..ode.blocks import find_ode_blocks
from ..recording import Seen, state_at, watch_blocks
from ..settings import checks_keywords, flag
from .student_teacher import Renormalised, StudentTask, TrainingPass, check_student, check_teacher

__all__ = ['StepwiseTask', 'check_converted_from']


class StepwiseTask(StudentTask):
    """Teach each solver step on its own: from the teacher's state at its start to the teacher's state at its end.

    Nothing is unrolled, so the error of one step does not reach the next, and no gradient passes through more than one
    step. Between two layers, the teacher's state is interpolated linearly in t. Works for every model that `convert_`
    accepts.

    Args:
        student: Converted model.
        teacher: The model that it was converted from; it is frozen and kept in eval mode.
        embedding: The models' outputs are embeddings, not logits; always so for models without classes.
        device: Device of the task; by default the student's.
        verbose: Log timm's messages.

    Raises:
        TypeError: The student is not an ODE-ViT, or the teacher is not an unconverted model.
        ValueError: Student and teacher do not match, or share parameters.
    """

    title = 'stepwise'

    @checks_keywords
    def __init__(
            self,
            student: nn.Module,
            teacher: nn.Module,
            *,
            embedding: bool = False,
            device: Optional[torch.device] = None,
            verbose: bool = True,
    ) -> None:
        check_converted_from(student, teacher)
        super().__init__(device=device or next(student.parameters()).device, verbose=verbose)
        self.runs: List[List[Any]] = [site.blocks for site in find_sites(teacher)]
        for ode, blocks in zip(find_ode_blocks(student), self.runs, strict=True):
            kept = len(ode.before) + len(ode.after)
            if kept + ode.config.grid[1] != len(blocks):
                raise ValueError(
                    f'The student runs over {ode.config.grid[1]:g} units of time plus {kept} kept layers, but the '
                    f'teacher has {len(blocks)} layers, so the steps do not end at its states. Convert with T=None.')
        self.embedding = flag('embedding', embedding) or getattr(student, 'num_classes', None) == 0
        self.for_teacher = Renormalised(student, teacher, self.device)
        self.teacher = teacher.requires_grad_(False).eval()
        self.trainable_module: Any = _Steps(student)

    def forward(self, input: Tensor, target: Any = None) -> Dict[str, Tensor]:
        """Compute the loss of one batch.

        Args:
            input: Images [B, C, H, W], normalised for the student.
            target: A Recorded batch with the teacher's states; anything else is ignored.

        Returns:
            'loss', the squared error of a step relative to the squared distance that the teacher moves in that time,
            averaged over the steps (dimensionless, 1 for a step that does nothing), and 'output', the teacher's logits.
        """
        recorded = hasattr(target, 'states')
        with torch.no_grad(), watch_blocks(self.runs) as seen:
            images = self.for_teacher(input[:1] if recorded else input)  # one image shows what the blocks are passed
            output = self.teacher(images)
        if recorded:
            output, seen = target.output, [(target.states, seen[0][1])]
        return {'loss': self.trainable_module(seen), 'output': output}

    def _leaves_parameters_unused(self) -> bool:
        return True  # everything outside the blocks


class _Steps(TrainingPass):
    """All steps of a student, each from a given state."""

    def forward(self, seen: Sequence[Seen]) -> Tensor:
        losses = []
        again = torch.is_grad_enabled() and any(getattr(m, 'grad_checkpointing', False) for m in self.student.modules())
        for ode, (states, handed) in zip(find_ode_blocks(self.student), seen, strict=True):
            for i, step in enumerate(ode.solver):
                if step.merging is not None:  # it would go on where the step before it ended
                    step = ode.solver[i]
                start, end = (state_at(states, range(len(states)), t) for t in (step.t, step.t + step.h))
                args, kwargs = handed[int(step.t + 1e-6)]  # a base may pass different arguments to each layer
                run = partial(checkpoint, step, use_reentrant=False) if again else step
                error = (run(start, *args, **kwargs) - end).float().square().mean()
                moved = over_processes((end - start).float().square().mean())
                losses.append(error / moved.clamp_min(1e-12))
        return torch.stack(losses).mean()


def check_converted_from(student: Any, teacher: Any) -> None:
    check_student(student)
    if not isinstance(teacher, nn.Module):
        raise TypeError(f'The teacher must be a model; got {type(teacher).__name__}. Build it with timm.create_model.')
    check_teacher(student, teacher)
    outside = [{name: tuple(p.shape) for name, p in m.named_parameters() if '.blocks.' not in f'.{name}'}
               for m in (student, teacher)]
    if type(student) is not type(teacher) or outside[0] != outside[1]:
        names = [name for name in {**outside[0], **outside[1]} if outside[0].get(name) != outside[1].get(name)]
        found = f': {names[0]} is {outside[0].get(names[0])} and {outside[1].get(names[0])}' if names else (
            f': a {type(student).__name__} and a {type(teacher).__name__}')
        raise ValueError(f'The student was not converted from this teacher{found}. Give the original model.')
