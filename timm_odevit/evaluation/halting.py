"""calibrate_halting: the threshold at which images may halt without losing more accuracy than allowed."""
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.merge import check_not_merged
from ..data.batches import read_batches
from ..hooks import evaluating, watch_blocks
from ..ode.blocks import find_ode_blocks
from ..ode.config import HALTING
from ..ode.methods import METHODS
from ..settings import number, one_of
from .accuracy import check_labels

__all__ = ['Halting', 'calibrate_halting']

TRIED = 1000  # thresholds


@dataclass(frozen=True)
class Halting:
    """A rule and a threshold for halting, and what they do to the images on which they were chosen.

    Attributes:
        rule: The rule, for `halting` of an OdeConfig.
        threshold: The threshold, for its `halting_threshold`.
        images: Number of images.
        nfe: Mean field evaluations per image.
        full_nfe: Field evaluations without halting.
        top1: Top-1 accuracy in percent; without labels, agreement with the full run.
        full_top1: The same without halting.
        halted: Share of the images that took 1, 2, ... steps, in percent.
    """
    rule: str
    threshold: float
    images: int
    nfe: float
    full_nfe: int
    top1: float
    full_top1: float
    halted: tuple[float, ...]

    def apply_(self, model: nn.Module) -> None:
        """Turn halting on in a model, in place: its settings are saved with it."""
        blocks = _blocks(model)
        blocks.config = replace(blocks.config, halting=self.rule, halting_threshold=self.threshold)

    def __str__(self) -> str:
        return (f'{self.rule}: halts at {self.threshold:.4g} or less; {self.nfe:.2f} evaluations on average instead of '
                f'{self.full_nfe}, top-1 {self.top1:.2f} % instead of {self.full_top1:.2f} % on {self.images:,} images')


def calibrate_halting(
        model: nn.Module,
        loader: Iterable[Any],
        *,
        rule: str = 'entropy',
        max_drop: float = 0.005,
        progress: bool = False,
) -> Halting:
    """Find the threshold with the fewest evaluations that costs at most `max_drop` of the accuracy.

    Each image runs once through all steps; its scores and answers after every step show what any threshold would do.
    Use images that were not trained on. The model does not change; see `Halting.apply_`.

    Args:
        model: ODE-ViT with one sequence of blocks, a fixed-step method and a head with two classes or more.
        loader: Batches (images [B, C, H, W], labels [B]), or one pair of tensors; or batches of images alone, whose
            answers in the full run then count as right.
        rule: 'entropy' or 'acceleration'; see `OdeConfig.halting`.
        max_drop: Largest loss of top-1 accuracy, as a share of all images: 0.005 for half a percentage point.
        progress: Show a progress bar.

    Returns:
        A Halting: print it; call its `apply_(model)` to turn halting on.

    Raises:
        TypeError: The model is not an ODE-ViT with one sequence of blocks.
        ValueError: Its head cannot be applied to the states along the way or has one output, it runs its blocks one by
            one, its method is adaptive, its logits are not finite, labels do not fit the classes, a setting is out of
            range, or there are no images.

    Examples:
        >>> found = calibrate_halting(student, loader, max_drop=0.005)
        >>> print(found)
        >>> found.apply_(student)

    Source: entropy along the way: Loop-ViT, arXiv 2602.02156.
    """
    rule, max_drop = one_of(tuple(HALTING))('rule', rule), number(0., 1.)('max_drop', max_drop)
    blocks, name = _blocks(model), type(model).__name__
    replace(blocks.config, halting=rule)  # refuses an adaptive method
    if blocks.readout is None or blocks.after or not getattr(model, 'num_classes', 0):
        raise ValueError(f'The head of this {name} cannot be applied to the states along the way, so no image can '
                         'halt.')
    if model.num_classes == 1:
        raise ValueError(f'This {name} has one output (num_classes=1), so there is no class that an image could settle '
                         'on, and no threshold can be chosen.')
    with evaluating(model), torch.inference_mode():
        rows = [_scores(model, blocks, *batch, rule)
                for batch in read_batches(loader, labels=None, bar='halting' if progress else '')]
    scores, right = (torch.cat(batches) for batches in zip(*rows, strict=True))
    full = right[:, -1].double().mean().item()
    best = None
    for threshold in _thresholds(scores[:, :-1]):
        done = scores <= threshold
        done[:, -1] = True
        taken = done.int().argmax(dim=1) + 1  # steps of each image
        top1 = right.gather(1, taken[:, None] - 1).double().mean().item()
        if top1 >= full - max_drop - 1e-9 and (best is None or taken.sum() < best[1].sum()):
            best = threshold, taken, top1
    if best is None:
        raise ValueError(f"Even the smallest threshold of '{rule}' costs more than max_drop={max_drop:g}. Use another "
                         'rule, or raise max_drop.')
    threshold, taken, top1 = best
    return Halting(
        rule=rule, threshold=threshold, images=len(right),
        nfe=METHODS[blocks.method].evaluations * taken.double().mean().item(),
        full_nfe=blocks.nfe, top1=100 * top1, full_top1=100 * full,
        halted=tuple((100 * taken.bincount(minlength=blocks.steps + 1)[1:] / len(taken)).tolist()))


def _scores(model: Any, blocks: Any, images: Tensor, labels: Tensor | None, rule: str) -> tuple[Tensor, Tensor]:
    """The scores [B, K] after each step, and whether the answer there is right [B, K]."""
    with watch_blocks([[blocks]]) as [(states, handed)]:  # a hook on a step would keep other threads from halting
        logits = model(images.to(next(model.parameters())))
    if not handed:
        why = ' Call model.set_grad_checkpointing(False) first.' if getattr(model, 'grad_checkpointing', False) else ''
        raise ValueError(f'This {type(model).__name__} runs its blocks one by one, so no image can leave the batch '
                         f'between them.{why}')
    if not logits.isfinite().all():
        raise ValueError(f'The logits of this {type(model).__name__} are not finite for some images.')
    x, (args, kwargs) = states[0], handed[0]
    for block in blocks.before:
        x = block(x, *args, **kwargs)
    path = blocks.trajectory(x, *args, **kwargs)
    score = HALTING[rule](blocks.readout)
    scores = [score(before, after, step.h) for before, after, step in zip(
        path[:-1], path[1:], blocks.solver, strict=True)]
    answers = torch.stack([blocks.readout(state).argmax(dim=-1) for state in path[1:]], dim=1)
    truth = answers[:, -1] if labels is None else check_labels(labels.to(answers.device), logits.shape[1])
    return torch.stack(scores, dim=1).cpu(), (answers == truth[:, None]).cpu()


def _thresholds(scores: Tensor) -> list[float]:
    """0, and thresholds between two scores each, where rounding changes nothing; the last lies above all scores."""
    finite = scores[scores.isfinite()].unique()
    between = torch.cat([(finite[:-1] + finite[1:]) / 2, 1.01 * finite[-1:] + 1e-6])
    return [0., *between[torch.linspace(0, len(between) - 1, min(TRIED, len(between))).long()].tolist()]


def _blocks(model: Any) -> Any:
    stages = find_ode_blocks(model)
    check_not_merged(model)
    if len(stages) != 1:
        raise TypeError('Halting needs an ODE-ViT with one sequence of blocks; this '
                        f'{type(model).__name__} has {len(stages)}.')
    return stages[0]
