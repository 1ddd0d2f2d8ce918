"""Accuracy of a model, ODE-ViT or not, over several step counts."""
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.preprocessing import renormalisation
from ..settings import shown
from .passes import NO_CLASS, check_labels, check_same_images, in_batches, run_batches, views
from .results import Evaluation, Result

__all__ = ['evaluate']


def evaluate(
        model: nn.Module,
        loader: Iterable[Any],
        *,
        steps: int | Sequence[int] | None = None,
        teacher: nn.Module | None = None,
        amp_dtype: torch.dtype | None = None,
        progress: bool = False,
        data: str = '',
        trained_at: Sequence[int] = (),
) -> Evaluation[Result]:
    """Measure accuracy per image, at several step counts, on the model's device.

    The model is not changed: each other number of steps is that of a view, and modes are restored.

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
    measured = views(model, steps)
    loader = in_batches(loader, len(measured) + (teacher is not None))
    classes = [getattr(each, 'num_classes', None) for each in (model, model if teacher is None else teacher)]
    if None not in classes and classes[0] != classes[1]:
        raise ValueError(f'The teacher has {classes[1]} classes, the model {classes[0]}. Give a teacher with the same '
                         'classes.')
    common: dict[str, Any] = dict(amp_dtype=amp_dtype, progress=progress)
    results: list[Result] = []
    taught, marks = torch.empty(0), torch.empty(0)
    if teacher is not None:
        found, taught, marks = _measure(
            teacher, loader, name='teacher', normalisation=renormalisation(model, teacher), **common)
        results.append(Result(model='teacher', agreement=None, kept=100., **found))
    for name, view in measured:
        found, predicted, seen = _measure(view, loader, name=name, **common)
        agreement = kept = None
        if teacher is not None:
            check_same_images(marks, seen)
            agreement = 100 * ((predicted == taught) & (predicted != NO_CLASS)).double().mean().item()
            kept = 100 * found['top1'] / results[0].top1 if results[0].top1 else None
        results.append(Result(
            model='model' if teacher is None else 'student', agreement=agreement, kept=kept, **found))
    return Evaluation(tuple(results), data, tuple(trained_at))


def _measure(model: nn.Module, loader: Iterable[Any], name: str, **options: Any) -> tuple[dict, Tensor, Tensor]:
    """What a Result says of a model; the class of each image [N], and the images' marks [N]."""
    top: list[Tensor] = []  # [B, 5], best first
    right: list[Tensor] = []
    loss = 0.

    def each(logits: Tensor, labels: Tensor) -> None:
        nonlocal loss
        labels = check_labels(labels, logits.shape[1])
        nan = logits.isnan().any(dim=1, keepdim=True)  # topk takes NaN for the largest
        best = logits.topk(min(5, logits.shape[1])).indices.masked_fill(nan, NO_CLASS)
        top.append(best.cpu())
        right.append(best.eq(labels[:, None]).cpu())
        loss += F.cross_entropy(logits, labels, reduction='sum').item()
    about, marks = run_batches(model, loader, each, name=name, **options)
    predicted, hits = torch.cat(top)[:, 0], torch.cat(right)
    n, without = len(predicted), int((predicted == NO_CLASS).sum())
    if without:
        warnings.warn(f'{name}: the logits of {without} of {n} images are NaN. They count as wrong.', RuntimeWarning,
                      stacklevel=3)
    return dict(top1=100 * hits[:, 0].sum().item() / n, top5=100 * hits.sum().item() / n, loss=loss / n,
                **about), predicted, marks
