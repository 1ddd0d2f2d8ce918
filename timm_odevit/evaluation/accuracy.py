"""Accuracy of a model, ODE-ViT or not, over several step counts."""
import warnings
from typing import Any, Iterable, List, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.preprocessing import renormalisation
from ..errors import shown
from ..settings import checks_keywords
from .passes import NOTHING, Passes, check_labels, check_same_images, in_batches, step_counts
from .results import Evaluation, Result

__all__ = ['evaluate']


@checks_keywords
def evaluate(
        model: nn.Module,
        loader: Iterable[Any],
        *,
        steps: Optional[Union[int, Sequence[int]]] = None,
        teacher: Optional[nn.Module] = None,
        amp_dtype: Optional[torch.dtype] = None,
        progress: bool = False,
        data: str = '',
        trained_at: Sequence[int] = (),
) -> Evaluation[Result]:
    """Measure accuracy per image, at several step counts, on the model's device.

    Afterwards, or when interrupted, the model's steps with their hooks and both models' modes are restored.

    Args:
        model: Model to measure, [B, C, H, W] to logits [B, classes].
        loader: Batches (images [B, C, H, W], labels [B]), in the same order each time; empty ones are skipped. Or one
            pair of tensors, images [N, C, H, W] and labels [N].
        steps: Step counts to measure; None for the model as it is. Only for an ODE-ViT.
        teacher: Model to compare with; measured first, on the same images, normalised for it.
        amp_dtype: Run under autocast in this dtype, such as torch.bfloat16.
        progress: Show a progress bar.
        data: What the images are, such as 'val/ of photos', for tables and plots.
        trained_at: Step counts that the model was trained with, to be marked in tables and plots.

    Returns:
        One Result for the teacher, if any, and one for each step count. If logits are NaN, a warning says for how many
        images; these count as wrong.

    Raises:
        ValueError: The model has no classes, or no steps to set; the loader is empty or shuffled; or labels do not fit
            the classes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'Expected a timm model; got {shown(model)}. Build it with timm.create_model.')
    if getattr(model, 'num_classes', None) == 0:
        raise ValueError(f'This {type(model).__name__} has no classes, so it has no accuracy. Measure its embeddings '
                         'with evaluate_embeddings.')
    counts = step_counts(model, steps)
    loader = in_batches(loader, len(counts) + (teacher is not None))
    classes = [getattr(each, 'num_classes', None) for each in (model, model if teacher is None else teacher)]
    if None not in classes and classes[0] != classes[1]:
        raise ValueError(f'The teacher has {classes[1]} classes, the model {classes[0]}. Give a teacher with the same '
                         'classes.')
    results: List[Result] = []
    reference = None
    if teacher is not None:
        scale, shift = renormalisation(model, teacher)
        found, reference = _measure(teacher, loader, amp_dtype, progress, 'teacher', scale, shift)
        results.append(Result(model='teacher', agreement=None, kept=100., **found))
    for name, setting in counts:
        with setting():
            found, (marks, predicted) = _measure(model, loader, amp_dtype, progress, name)
        agreement = kept = None
        if reference is not None:
            check_same_images([reference[0], marks])
            agreement = 100 * ((predicted == reference[1]) & (predicted != NOTHING)).double().mean().item()
            kept = 100 * found['top1'] / results[0].top1 if results[0].top1 else None
        results.append(Result(
            model='model' if teacher is None else 'student', agreement=agreement, kept=kept, **found))
    return Evaluation(tuple(results), data, tuple(trained_at))


def _measure(model: nn.Module, loader: Iterable[Any], amp_dtype, progress: bool, name: str, scale=None, shift=None):
    passes = Passes(model, loader, amp_dtype, progress, name, (scale, shift))
    correct1 = correct5 = 0.
    loss = torch.zeros((), dtype=torch.float64)
    predicted: List[Tensor] = []

    def each(logits: Tensor, labels: Tensor) -> None:
        nonlocal correct1, correct5, loss
        check_labels(labels, logits.shape[1])
        nan = logits.isnan().any(dim=1, keepdim=True)  # topk takes NaN for the largest
        top = logits.topk(min(5, logits.shape[1])).indices.masked_fill(nan, NOTHING)
        hits = top.eq(labels[:, None])
        correct1 += hits[:, 0].sum().item()
        correct5 += hits.any(dim=1).sum().item()
        loss += F.cross_entropy(logits, labels, reduction='sum').double().cpu()
        predicted.append(top[:, 0].cpu())
    common = passes.run(each)
    first = torch.cat(predicted)
    n, without = len(first), int((first == NOTHING).sum())
    if without:
        warnings.warn(f'{name}: the logits of {without} of {n} images are NaN. They count as wrong.', RuntimeWarning,
                      stacklevel=4)
    found = dict(top1=100 * correct1 / n, top5=100 * correct5 / n, loss=loss.item() / n, **common)
    return found, (passes.marks, first)
