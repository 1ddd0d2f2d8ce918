"""The losses, and the pass of a student that computes them."""
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import group_parameters
from torch import Tensor, nn

from ..convert.block_kinds import has_class_token, prefix_tokens
from ..distributed import over_processes, rank_and_world
from ..dynamics.stability import log_softmax_bound
from ..hooks import BlockRecord, watch_blocks
from ..ode.blocks import find_ode_blocks
from .config import LossConfig
from .matching import is_one_sequence, targets


class TrajectoryPass(nn.Module):
    """The loss and its parts in one `forward`, so that DistributedDataParallel can wrap it.

    `times` are those of the teacher's states, by stage.
    """

    def __init__(self, student: nn.Module, config: LossConfig, times: list[list[float]]) -> None:
        super().__init__()
        self.student: Any = student
        self.config, self.times = config, times
        self.distance = embedding_loss if config.embedding else logit_loss
        self.prefix = prefix_tokens(student) if is_one_sequence(student) else 0
        self.has_cls = self.prefix > 0 and has_class_token(student)

    def no_weight_decay(self) -> set[str]:
        return {f'student.{name}' for name in getattr(self.student, 'no_weight_decay', set)()}

    def group_matcher(self, coarse: bool = False) -> Any:
        groups = group_parameters(self.student, self.student.group_matcher(coarse=coarse), reverse=True)
        return lambda name: groups[name[len('student.'):]]

    def forward(
            self, views: Sequence[Any], images: Tensor, seen: Sequence[BlockRecord], wanted: Tensor | None, labels: Any,
            criterion: Any,
    ) -> dict[str, Tensor]:
        """For views of the student, whose output is to be near `wanted`, what TrajectoryDistillationTask returns."""
        def judged(output: Tensor) -> dict[str, Tensor]:  # the last one, or that of an exit
            kd = {} if wanted is None else {'kd': self.distance(output, wanted)}
            return {**kd, 'task': criterion(output, labels)} if self.config.task_weight > 0 else kd
        passes = [self._parts(view, images, seen, judged) for view in views]
        outputs, found = zip(*passes, strict=True)
        names = dict.fromkeys(name for parts in found for name in parts)  # a pass of one step has no exits
        parts = {name: torch.stack([parts[name] for parts in found if name in parts]).mean() for name in names}
        if others := outputs[1:]:
            parts['consistency'] = torch.stack([self.distance(each, outputs[0].detach()) for each in others]).mean()
        loss, weights = outputs[0].new_zeros(()), self.config.weights
        for name, part in parts.items():
            if weights[name] > 0:
                loss = loss + weights[name] * part
            else:
                parts[name] = part.detach()
        return {'loss': loss, 'output': outputs[0], **{f'{name}_loss': part for name, part in parts.items()}}

    def _parts(self, student: Any, images: Tensor, seen: Any, judged: Any) -> tuple[Tensor, dict[str, Tensor]]:
        config, odes = self.config, find_ode_blocks(student)
        ode = odes[0]  # the only one, if there are exits or JaSMin
        first, last = len(ode.before), len(ode.before) + ode.steps - 1
        exits = [min(max(first + round(t * ode.steps) - 1, first), last - 1) for t in config.exits
                 ] if last > first else []
        # steps after which attention is recomputed: first and last but one
        starts = sorted({first, max(last - 1, first)}) if config.jasmin_weight > 0 else []
        theirs = [targets(ode, times, states) for ode, times, (states, _) in zip(odes, self.times, seen, strict=True)]
        after = {*theirs[0], *starts, *exits}, *theirs[1:]
        with watch_blocks([list(ode) if of else [] for ode, of in zip(odes, after, strict=True)]) as paths:
            features = student.forward_features(images)
        ours = [states[1:] for states, _ in paths]  # after each block
        # as a step that starts where step i ends would attend
        jasmin = [jasmin_loss(ode.shared.attention_map(ode[i].t + ode[i].h, ours[0][i])) for i in starts]
        early = [student.forward_head(student.norm(ours[0][i])) for i in exits]
        output = student.forward_head(features)
        shares = config.cls_weight, config.register_weight, config.patch_weight
        errors = [trajectory_loss(states[i], target, self.prefix, self.has_cls, shares)
                  for states, of in zip(ours, theirs, strict=True) for i, target in of.items()]
        known = {'trajectory': errors, 'jasmin': jasmin}
        parts = {name: torch.stack(values).mean() for name, values in known.items() if values} | judged(output)
        losses = [config.weights[name] * part for each in early
                  for name, part in judged(each).items() if config.weights[name] > 0]
        if losses:
            parts['exit'] = torch.stack(losses).sum() / len(early)
        return output, parts


def trajectory_loss(
        student: Tensor, teacher: Tensor, num_prefix_tokens: int, has_class_token: bool, weights: Sequence[float],
) -> Tensor:
    """Squared error of hidden states [B, N, D], relative to the variance of all the teacher's numbers in a batch.

    The weighted mean over class token, registers and patches, which come in this order, as far as there are any: 0 for
    equal states; the mean over images instead of each has 0.2 to 0.8 (DeiT-tiny).
    """
    if student.shape != teacher.shape:
        raise ValueError(f'The student has states {list(student.shape)}, the teacher {list(teacher.shape)}. Build both '
                         'with patch_drop_rate=0; the loss has a patch_drop for both.')
    bounds = 0, int(has_class_token), num_prefix_tokens, student.shape[1]
    loss, total = student.new_zeros((), dtype=torch.float32), 0.
    for (start, stop), weight in zip(pairwise(bounds), weights, strict=True):
        if stop > start and weight > 0:
            s, t = student[:, start:stop].float(), teacher[:, start:stop].float()
            loss = loss + weight * F.mse_loss(s, t) / _variance(t).clamp_min(1e-12)
            total += weight
    return loss / (total or 1.)


def _variance(x: Tensor) -> Tensor:
    if rank_and_world()[1] == 1:
        return x.var(correction=0)
    mean, square = over_processes(torch.stack([x.mean(), x.square().mean()]).double())
    return (square - mean.square()).float()


def logit_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """KL divergence of logits [B, C] in nats per image (Hinton et al., arXiv 1503.02531)."""
    s, t = (F.log_softmax(logits.float(), dim=-1) for logits in (student, teacher))
    return F.kl_div(s, t, reduction='batchmean', log_target=True)


def embedding_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """One minus the cosine of embeddings [B, E], plus their squared error relative to the teacher's variance.

    The variance is one number for all dimensions, so that they keep their proportions, as in PHI-S (arXiv 2410.01680).
    """
    s, t = student.float().flatten(1), teacher.float().flatten(1)
    mean = over_processes(t.mean(dim=0))
    spread = _variance(t - mean if len(t) * rank_and_world()[1] > 1 else t)
    return (1. - F.cosine_similarity(s, t, dim=-1)).mean() + F.mse_loss(s, t) / spread.clamp_min(1e-12)


def jasmin_loss(attention: Tensor) -> Tensor:
    """JaSMin with k = 0 (arXiv 2507.07814) of probabilities [..., heads, N, N]: the Jacobian of their rows, in nats."""
    return log_softmax_bound(attention).amax(dim=-1).mean()
