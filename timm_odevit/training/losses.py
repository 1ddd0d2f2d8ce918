"""The parts of the loss, and the passes of the student that give them: what DDP and torch.compile wrap."""
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import group_parameters
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..distributed import over_processes, rank_and_world
from ..dynamics.stability import log_softmax_bound
from ..hooks import BlockRecord, state_at, watch_blocks
from ..ode.blocks import find_ode_blocks
from .config import LossConfig
from .matching import hidden_states, is_one_sequence

__all__ = ['Pass', 'StepwisePass', 'TrainingPass', 'TrajectoryPass', 'embedding_loss', 'jasmin_loss', 'logit_loss',
           'trajectory_loss']


# outputs, states after some steps of each stage, the JaSMin loss if any, and outputs at the exits
Pass = tuple[Tensor, list[Tensor], Tensor | None, list[Tensor]]


class TrainingPass(nn.Module):
    """A student's training pass in one `forward`, so that DistributedDataParallel can wrap it."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student: Any = student

    def no_weight_decay(self) -> set[str]:
        return {f'student.{name}' for name in getattr(self.student, 'no_weight_decay', set)()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
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
                call = partial(checkpoint, step, use_reentrant=False) if again else step
                error = (call(start, *args, **kwargs) - end).float().square().mean()
                moved = over_processes((end - start).float().square().mean())
                losses.append(error / moved.clamp_min(1e-12))
        return torch.stack(losses).mean()


class TrajectoryPass(TrainingPass):
    """A student's outputs, and its states along the way, with one or several numbers of steps."""

    def __init__(self, student: nn.Module, config: LossConfig) -> None:
        super().__init__(student)
        self.config, self.one_sequence = config, is_one_sequence(student)

    def forward(self, students: Sequence[Any], images: Tensor, steps: Sequence[Sequence[Sequence[int]]]) -> list[Pass]:
        """A pass of the student, or of each of several views of it."""
        return [self._follow(student, images, of) for student, of in zip(students, steps, strict=True)]

    def _follow(self, student: Any, images: Tensor, steps: Sequence[Sequence[int]]) -> Pass:
        if not self.one_sequence:
            with watch_blocks([list(ode) for ode in find_ode_blocks(student)]) as seen:
                output = student(images)
            return output, [after[i + 1] for (after, _), of in zip(seen, steps, strict=False) for i in of], None, []
        blocks, along = student.blocks, steps[0] if steps else ()
        first, last = len(blocks.before), len(blocks.before) + blocks.steps - 1
        exits = [min(max(first + round(t * blocks.steps) - 1, first), last - 1) for t in self.config.exits
                 ] if last > first else []
        # steps after which attention is recomputed: the first and the last but one
        starts = sorted({first, max(last - 1, first)}) if self.config.jasmin_weight > 0 else []
        indices = sorted({*along, *starts, *exits})
        features, states = hidden_states(student, images, indices)
        state = dict(zip(indices, states, strict=True))
        maps = []
        for i in starts:  # with the weights of a step that starts there
            t, h = blocks[i].t + blocks[i].h, blocks[i].h
            maps.append(blocks.shared.attention_map(t, state[i], None if blocks[i].interval is None else (t, t + h)))
        jasmin = torch.stack([jasmin_loss(m) for m in maps]).mean() if maps else None
        early = [student.forward_head(student.norm(state[i])) for i in exits]
        return student.forward_head(features), [state[i] for i in along], jasmin, early


def trajectory_loss(
        student: Tensor, teacher: Tensor, num_prefix_tokens: int, has_class_token: bool, weights: Sequence[float],
) -> Tensor:
    """Squared error of hidden states [B, N, D], relative to the teacher's variance over the batch of all processes.

    The weighted mean over class token, registers and patches, which come in this order, as far as there are any: 0 for
    equal states, 1 for a student that explains nothing.
    """
    bounds = 0, int(has_class_token), num_prefix_tokens, student.shape[1]
    loss, total = student.new_zeros((), dtype=torch.float32), 0.
    for (start, stop), weight in zip(pairwise(bounds), weights, strict=True):
        if stop > start and weight > 0:
            s, t = student[:, start:stop].float(), teacher[:, start:stop].float()
            loss = loss + weight * F.mse_loss(s, t) / _variance(t).clamp_min(1e-12)
            total += weight
    if total == 0.:
        raise ValueError('The weights are 0 for all tokens that the model has; set patch_weight above 0.')
    return loss / total


def _variance(x: Tensor) -> Tensor:
    if rank_and_world()[1] == 1:
        return x.var(correction=0)
    moments = over_processes(torch.stack([x.mean(), x.square().mean()]).double())
    return (moments[1] - moments[0].square()).float()


def logit_loss(student: Tensor, teacher: Tensor, temperature: float = 1.) -> Tensor:
    """KL divergence of logits [B, C] in nats per image, times temperature squared (Hinton et al., arXiv 1503.02531)."""
    s = F.log_softmax(student.float() / temperature, dim=-1)
    t = F.log_softmax(teacher.float() / temperature, dim=-1)
    return F.kl_div(s, t, reduction='batchmean', log_target=True) * temperature ** 2


def embedding_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """One minus the cosine of embeddings [B, E], plus their squared error relative to the teacher's variance.

    The variance is one number for all dimensions, so that they keep their proportions, as in PHI-S (arXiv 2410.01680).
    """
    s, t = student.float().flatten(1), teacher.float().flatten(1)
    angle = 1. - F.cosine_similarity(s, t, dim=-1)
    spread = _variance(t - over_processes(t.mean(dim=0)))
    return angle.mean() + F.mse_loss(s, t) / spread.clamp_min(1e-12)


def jasmin_loss(attention: Tensor) -> Tensor:
    """JaSMin with k = 0 (arXiv 2507.07814) of probabilities [..., heads, N, N]: the Jacobian of their rows, in nats."""
    return log_softmax_bound(attention, 1)[..., 0].amax(dim=-1).mean()
