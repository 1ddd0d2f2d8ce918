"""Accuracy of a model, ODE-ViT or not, over several step counts; the passes of a loader that every evaluation makes."""
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ..data.preprocessing import renormalisation
from ..hooks import autocast, evaluating
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.with_steps import with_steps
from ..settings import shown
from .results import Evaluation, Result

__all__ = ['AMP_DTYPES', 'NO_CLASS', 'check_labels', 'check_same_images', 'evaluate',
           'images_and_labels', 'in_batches', 'is_pair', 'lineup', 'run_batches', 'views', 'wait_for']

AMP_DTYPES = {None: None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}  # by the names that settings use
NO_CLASS = -1  # the class of an image whose outputs are not finite, which is never right
BATCH = 64  # images of a pair of tensors that run at once


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

    The model is not changed: other numbers of steps run on views of it (see `with_steps`), and modes are restored.

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

    Examples:
        >>> found = evaluate(student, loader, steps=(6, 12, 24), teacher=teacher)
        >>> print(found)
    """
    if getattr(model, 'num_classes', None) == 0:
        raise ValueError(f'This {type(model).__name__} has no classes, so it has no accuracy. Measure its embeddings '
                         'with evaluate_embeddings.')
    models, trained_at = lineup(model, steps, teacher), tuple(trained_at)
    loader = in_batches(loader, len(models))
    classes = [getattr(each, 'num_classes', None) for each in (model, model if teacher is None else teacher)]
    if None not in classes and classes[0] != classes[1]:
        raise ValueError(f'The teacher has {classes[1]} classes, the model {classes[0]}. Give a teacher with the same '
                         'classes.')
    results: list[Result] = []
    taught, marks = torch.empty(0), torch.empty(0)
    for kind, name, of, normalisation in models:
        found, predicted, seen = _measure(
            of, loader, name=name, normalisation=normalisation, amp_dtype=amp_dtype, progress=progress)
        agreement = kept = None
        if kind == 'teacher':
            kept, taught, marks = 100., predicted, seen
        elif teacher is not None:
            check_same_images(marks, seen)
            agreement = 100 * ((predicted == taught) & (predicted != NO_CLASS)).double().mean().item()
            kept = 100 * found['top1'] / results[0].top1 if results[0].top1 else None
        results.append(Result(model=kind, agreement=agreement, kept=kept, **found))
    return Evaluation(tuple(results), data, trained_at)


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


def views(model: nn.Module, steps: int | Sequence[int] | None) -> list[tuple[str, nn.Module]]:
    """A name and a view of the model for each of the step counts; the model itself for None.

    Raises:
        TypeError: The model is not an ODE-ViT.
        ValueError: There are no counts, or the model has several stages.
    """
    blocks = find_ode_blocks(model)
    if steps is None:
        return [(f'{blocks[0].steps} steps' if len(blocks) == 1 else 'model', model)]
    counts = [int(steps)] if isinstance(steps, (int, Integral)) else list(dict.fromkeys(steps))
    if not counts:
        raise ValueError('steps is empty. Give step counts, such as steps=(1, 6, 12), or None.')
    if len(blocks) > 1:
        raise ValueError(
            f'steps={counts} is one number for all blocks, but this {type(model).__name__} has {len(blocks)} stages. '
            'Set the steps of each stage on the model, and leave steps out.')
    return [(f'{count} steps', with_steps(model, count)) for count in counts]


def lineup(
        model: nn.Module, steps: int | Sequence[int] | None, teacher: nn.Module | None,
) -> list[tuple[str, str, nn.Module, Callable[[Tensor], Tensor] | None]]:
    """What is measured, in this order: kind ('teacher', 'student' or 'model'), name, model, and its normalisation."""
    for what, given in (('model', model), ('teacher', teacher)):
        if not isinstance(given, nn.Module) and not (what == 'teacher' and given is None):
            raise TypeError(f'{what} must be a timm model; got {shown(given)}. Build it with timm.create_model.')
    taught = [] if teacher is None else [('teacher', 'teacher', teacher, renormalisation(model, teacher))]
    kind = 'model' if teacher is None else 'student'
    return taught + [(kind, name, view, None) for name, view in views(model, steps)]


def check_same_images(marks: Tensor, others: Tensor) -> None:
    """Raise ValueError unless two passes had the same images in the same order, by the mark of each image."""
    if marks.shape != others.shape or not torch.allclose(marks, others, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError('The loader does not give the same images in the same order each time. Make it with '
                         'shuffle=False and without augmentation.')


def check_labels(labels: Tensor, classes: int) -> Tensor:
    """Labels [B] in int64; raises ValueError unless all are classes of the model."""
    if labels.is_floating_point():
        raise ValueError(f'Labels must be whole numbers; got {labels.dtype}.')
    labels = labels.long()
    for label in (int(labels.min()), int(labels.max())) if len(labels) else ():
        if not 0 <= label < classes:
            raise ValueError(f'The data has label {label}, but the model has {classes} classes. Create the model with '
                             'the num_classes of the data.')
    return labels


def is_pair(loader: Any) -> bool:
    """Whether a loader is a pair of tensors, images [N, C, H, W] and labels, and not two batches of images."""
    return (isinstance(loader, (tuple, list)) and len(loader) == 2
            and all(isinstance(part, Tensor) for part in loader) and loader[1].ndim < 4)


def in_batches(loader: Any, passes: int = 1) -> Any:
    """A loader that is read several times, or the batches of a pair of tensors: images [N, C, H, W] and labels [N]."""
    if isinstance(loader, Iterator) and passes > 1:
        raise ValueError(f'loader is a {type(loader).__name__}, which gives its batches only once, but it is read for '
                         'each number of steps and for the teacher. Give a list of batches, or a DataLoader.')
    if isinstance(loader, Tensor):
        raise ValueError('Got images without labels. Give a pair (images, labels), or batches of such pairs; where '
                         'labels do not count, any will do.')
    if not is_pair(loader):
        return loader
    images_and_labels(loader)  # raises if they are not as many
    return list(zip(*(part.split(BATCH) for part in loader), strict=True))


def run_batches(
        model: nn.Module,
        loader: Iterable[Any],
        each: Callable[[Tensor, Tensor], Any],
        *,
        amp_dtype: torch.dtype | None = None,
        progress: bool = False,
        name: str = '',
        normalisation: Callable[[Tensor], Tensor] | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """The batches of a loader through a model in eval mode, on its device; empty batches are skipped.

    `each` is called with the outputs in float32 [B, ...] and the labels [B] of each batch; `name` is for the bar.

    Returns:
        Steps, evaluations, parameters, images, speed, and how many images halted when, as in a Result; and a mark of
        each image [N], by which a shuffled loader is noticed.

    Raises:
        ValueError: The loader gave no images.
    """
    parameter = next(model.parameters())
    cost = _Cost(model, parameter.device)
    marks: list[Tensor] = []
    with evaluating(model), torch.inference_mode(), autocast(parameter.device, amp_dtype):
        for batch in tqdm(loader, desc=name, leave=False, disable=not progress):
            images, labels = images_and_labels(batch)
            if not len(images):
                continue
            marks.append(images.float().flatten(1).mean(dim=1).cpu())
            images = images.to(parameter.device, parameter.dtype if amp_dtype is None else images.dtype)
            if normalisation is not None:
                images = normalisation(images)
            each(cost.forward(images).float(), labels.to(parameter.device))
    if not marks:
        raise ValueError('The loader gave no images.')
    return cost.result(), torch.cat(marks)


class _Cost:
    """What the forward passes of a model take."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.stages: list[Any] = find_ode_blocks(model)
        self.images, self.seconds, self.evaluations = 0, 0., 0.
        self.taken: list[Tensor] = []  # steps of each image, if the only stage can halt

    def forward(self, images: Tensor) -> Tensor:
        for blocks in self.stages:
            blocks.steps_taken = None  # and so it stays if the host runs the steps one by one
        if not self.images:
            self.model(images)  # the first pass is slower than the others, and is not timed
        wait_for(self.device)
        start = time.perf_counter()
        outputs = self.model(images)
        wait_for(self.device)
        self.seconds += time.perf_counter() - start
        self.images += len(images)
        self.evaluations += len(images) * sum(blocks.evaluations for blocks in self.stages)
        if len(self.stages) == 1 and self.stages[0].config.halting is not None:
            steps = self.stages[0].steps_taken
            self.taken.append(torch.full((len(images),), self.stages[0].steps) if steps is None else steps.cpu())
        return outputs

    def result(self) -> dict[str, Any]:
        nfe = self.evaluations / self.images
        varies = any(blocks.config.adaptive or blocks.config.halting for blocks in self.stages)
        halted = None
        if self.taken:
            counts = torch.cat(self.taken).bincount(minlength=self.stages[0].steps + 1)[1:]
            halted = tuple((100 * counts / self.images).tolist())
        return dict(
            steps=sum(blocks.steps for blocks in self.stages) if self.stages else None,
            nfe=None if not self.stages else nfe if varies else round(nfe), halted=halted, images=self.images,
            parameters=count_parameters(self.model), images_per_second=self.images / self.seconds)


def images_and_labels(batch: Any, labelled: bool = True) -> tuple[Tensor, Any]:
    """The images and labels of a batch; None for labels if it has none and needs none; else raises ValueError."""
    if not labelled and isinstance(batch, Tensor) and batch.ndim == 4:
        return batch, None
    if is_pair(batch) and batch[0].ndim == 4 and batch[1].shape == batch[0].shape[:1]:
        return batch[0], batch[1]
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    found = ', '.join(f'{p.dtype} {list(p.shape)}' if isinstance(p, Tensor) else type(p).__name__ for p in parts)
    raise ValueError(f'Expected batches of images [B, C, H, W] and labels [B]; got {found}.')


def wait_for(device: str | torch.device) -> None:
    """Wait until a device has done what it was given."""
    if torch.device(device).type not in ('cpu', 'meta'):
        torch.accelerator.synchronize(device)
