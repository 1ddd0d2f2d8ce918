"""Accuracy of a model over several step counts; the threshold at which images may halt for a given loss of it."""
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..data.batches import read_batches
from ..data.preprocessing import check_labels
from ..hooks import evaluating, watch_blocks
from ..ode.blocks import the_ode, with_steps
from ..ode.halting import entropy
from ..settings import number
from .results import NO_CLASS, Evaluation, Result, passes


def evaluate(
        model: nn.Module, loader: Iterable[Any], *, steps: int | Sequence[int] | None = None,
        teacher: nn.Module | None = None, amp_dtype: torch.dtype | str | None = None, progress: bool = False,
) -> Evaluation[Result]:
    """Measure accuracy per image, at several step counts, on the model's device.

    Args:
        model: [B, C, H, W] to logits [B, classes]; it does not change.
        loader: Batches (images [B, C, H, W], labels [B]), which are read once, or one pair of tensors.
        steps: Step counts of an ODE-ViT; None for the model as it is.
        teacher: Model to compare with; measured first, on the same images, normalised for it.
        amp_dtype: Run under autocast in this dtype, such as 'bfloat16'.

    Returns:
        One Result for the teacher, if any, and one for each step count. Images whose logits are NaN count as wrong,
        with a warning.

    Raises TypeError for steps of what is no ODE-ViT, ValueError if model, teacher and labels do not have the same
    classes, or the loader is empty.

    Examples:
        >>> found = evaluate(student, loader, steps=(6, 12, 24), teacher=teacher)
        >>> print(found)
    """
    classes = [getattr(unwrap_model(each), 'num_classes', None) for each in (model, teacher or model)]
    if classes[0] == 0:
        raise ValueError(f'This {type(model).__name__} has no classes. Measure it with evaluate_embeddings.')
    if None not in classes and classes[0] != classes[1]:
        raise ValueError(f'The teacher has {classes[1]} classes, the model {classes[0]}. Give a teacher with the same '
                         'classes.')
    results: list[Result] = []
    taught = torch.empty(0)
    for about, name, (predicted, right, losses), _ in passes(
            model, loader, _score, steps=steps, teacher=teacher, amp_dtype=amp_dtype, progress=progress):
        if without := int((predicted == NO_CLASS).sum()):
            warnings.warn(f'{name}: the logits of {without} of {len(right)} images are NaN. They count as wrong.',
                          RuntimeWarning, stacklevel=2)
        top1, top5 = (100 * hits.sum().item() / len(right) for hits in (right[:, 0], right))
        agreement = kept = None
        if about['model'] == 'teacher':
            taught, kept = predicted, 100.
        elif teacher is not None:
            agreement = 100 * ((predicted == taught) & (predicted != NO_CLASS)).double().mean().item()
            kept = 100 * top1 / results[0].top1 if results[0].top1 else None
        results.append(Result(top1=top1, top5=top5, loss=losses.double().mean().item(), agreement=agreement, kept=kept,
                              **about))
    return Evaluation(tuple(results))


def _score(logits: Tensor, labels: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of each image, its class [B], which of the five likeliest is right [B, 5], and the cross-entropy [B]."""
    labels = check_labels(labels, logits.shape[1]).to(logits.device)
    nan = logits.isnan().any(dim=1, keepdim=True)  # topk takes NaN for the largest
    best = logits.topk(min(5, logits.shape[1])).indices.masked_fill(nan, NO_CLASS)
    return best[:, 0], best == labels[:, None], F.cross_entropy(logits, labels, reduction='none')


@dataclass(frozen=True)
class Halting:
    """A threshold, and what it does to the images on which it was chosen.

    Attributes:
        threshold: For `halting_threshold` of an OdeConfig.
        nfe: Mean field evaluations per image.
        full_nfe: Those without halting.
        top1: Accuracy in percent; without labels, agreement with the full run.
        full_top1: That without halting.
    """
    threshold: float
    images: int
    nfe: float
    full_nfe: int
    top1: float
    full_top1: float

    def apply_(self, model: nn.Module) -> None:
        """Turn halting on, in place: the settings are saved with the model."""
        blocks = the_ode(model)
        blocks.config = replace(blocks.config, halting='entropy', halting_threshold=self.threshold)

    def __str__(self) -> str:
        return (f'halts at an entropy of {self.threshold:.4g} or less; {self.nfe:.2f} evaluations on average instead '
                f'of {self.full_nfe}, {self.top1:.2f} % right instead of {self.full_top1:.2f} % of {self.images:,} '
                'images')


def calibrate_halting(
        model: nn.Module, loader: Iterable[Any], *, max_drop: float = 0.005, progress: bool = False,
) -> Halting:
    """Find the threshold with the fewest evaluations that costs at most `max_drop` of the accuracy.

    Use images that were not trained on. The model does not change; see `Halting.apply_`.

    Args:
        model: ODE-ViT with one sequence of blocks, a fixed-step method and a head with two classes or more.
        loader: Batches (images [B, C, H, W], labels [B]), or one pair of tensors; of images alone, the answers of the
            full run count as right.
        max_drop: As a share of all images: 0.005 for half a percentage point.

    Raises TypeError for another model, and ValueError if no image can halt in it, or labels do not fit its classes.

    Examples:
        >>> found = calibrate_halting(student, loader, max_drop=0.005)
        >>> print(found)
        >>> found.apply_(student)
    """
    max_drop = number(1.)('max_drop', max_drop)
    model, blocks = unwrap_model(model), the_ode(model)  # dynamo would not see the hook
    blocks.twin().config = replace(blocks.config, halting='entropy')  # refuses what cannot halt
    rows = []  # by image, scores after each step [B, K], and whether each is right [B, K]
    with evaluating(model), torch.inference_mode():
        short = with_steps(model, blocks.fewest_steps)  # enough to see what its blocks are given
        for images, labels in read_batches(loader, labels=None, bar='halting' if progress else ''):
            with watch_blocks([[the_ode(short)]]) as [(states, handed)]:  # not on its steps, which other threads run
                short(images.to(next(model.parameters())))
            if not handed:
                raise ValueError(f'This {type(model).__name__} runs its blocks one by one, so no image can halt. Try '
                                 'model.set_grad_checkpointing(False).')
            x, (args, kwargs) = states[0], handed[0]
            for block in blocks.before:
                x = block(x, *args, **kwargs)
            logits = torch.stack([*map(blocks.readout, blocks.trajectory(x, *args, **kwargs)[1:])], dim=1)
            answers = logits.argmax(dim=-1)
            truth = answers[:, -1] if labels is None else check_labels(labels.to(answers.device), logits.shape[-1])
            rows.append(((score := entropy(logits)).cpu(), ((answers == truth[:, None]) & score.isfinite()).cpu()))
    scores, right = (torch.cat(batches) for batches in zip(*rows, strict=True))
    full = right[:, -1].double().mean().item()
    best = None
    finite = scores[:, :-1][scores[:, :-1].isfinite()].unique()
    # 0, and thresholds between two scores each, where rounding changes nothing; then one above all
    between = torch.cat([(finite[:-1] + finite[1:]) / 2, 1.01 * finite[-1:] + 1e-6])
    some = torch.linspace(0, len(between) - 1, min(1000, len(between))).long()
    for threshold in (0., *between[some].tolist()):
        done = scores <= threshold
        done[:, -1] = True
        taken = done.int().argmax(dim=1) + 1  # steps of each image
        top1 = right.gather(1, taken[:, None] - 1).double().mean().item()
        if top1 >= full - max_drop - 1e-9 and (best is None or taken.sum() < best[1].sum()):
            best = threshold, taken, top1
    if best is None:
        raise ValueError(f'Even the smallest threshold costs more than max_drop={max_drop:g}. Raise max_drop.')
    threshold, taken, top1 = best
    return Halting(
        threshold=threshold, images=len(right),
        nfe=blocks.nfe / blocks.steps * taken.double().mean().item(),
        full_nfe=blocks.nfe, top1=100 * top1, full_top1=100 * full)
