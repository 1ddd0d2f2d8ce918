"""Accuracy of a model over several step counts; the timed passes over a data set that every evaluation makes."""
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import read_batches
from ..data.preprocessing import renormalisation
from ..hooks import AMP_DTYPES, autocast, evaluating
from ..ode.blocks import count_parameters, find_ode_blocks, with_steps
from ..settings import shown
from .results import Evaluation, Result

__all__ = ['AMP_DTYPES', 'NO_CLASS', 'Pass', 'check_labels', 'evaluate', 'passes', 'run_batches',
           'views']

NO_CLASS = -1  # the class of an image whose outputs are not finite, which is never right


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

    Args:
        model: Model to measure, [B, C, H, W] to logits [B, classes]. It does not change: other numbers of steps run on
            views of it (see `with_steps`).
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
        ValueError: The model has no classes, a single output, or no steps to set; the loader is empty or shuffled; or
            labels do not fit the classes.

    Examples:
        >>> found = evaluate(student, loader, steps=(6, 12, 24), teacher=teacher)
        >>> print(found)
    """
    if getattr(model, 'num_classes', None) == 0:
        raise ValueError(f'This {type(model).__name__} has no classes, so it has no accuracy. Measure its embeddings '
                         'with evaluate_embeddings.')
    classes = [getattr(each, 'num_classes', None) for each in (model, model if teacher is None else teacher)]
    if None not in classes and classes[0] != classes[1]:
        raise ValueError(f'The teacher has {classes[1]} classes, the model {classes[0]}. Give a teacher with the same '
                         'classes.')
    results: list[Result] = []
    taught = torch.empty(0)
    for run in passes(model, loader, _score, steps=steps, teacher=teacher, amp_dtype=amp_dtype, progress=progress):
        best, right, losses = run.columns
        predicted, count = best[:, 0], len(best)
        if without := int((predicted == NO_CLASS).sum()):
            warnings.warn(f'{run.name}: the logits of {without} of {count} images are NaN. They count as wrong.',
                          RuntimeWarning, stacklevel=2)
        top1, top5 = (100 * hits.sum().item() / count for hits in (right[:, 0], right))
        agreement = kept = None
        if run.kind == 'teacher':
            taught, kept = predicted, 100.
        elif teacher is not None:
            agreement = 100 * ((predicted == taught) & (predicted != NO_CLASS)).double().mean().item()
            kept = 100 * top1 / results[0].top1 if results[0].top1 else None
        results.append(Result(model=run.kind, top1=top1, top5=top5, loss=losses.double().mean().item(),
                              agreement=agreement, kept=kept, **run.about))
    return Evaluation(tuple(results), data, tuple(trained_at))


def _score(logits: Tensor, labels: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of each image, the five likeliest classes [B, 5], which of them is right [B, 5], and the cross-entropy [B]."""
    labels = check_labels(labels, logits.shape[1])
    nan = logits.isnan().any(dim=1, keepdim=True)  # topk takes NaN for the largest
    best = logits.topk(min(5, logits.shape[1])).indices.masked_fill(nan, NO_CLASS)
    return best, best == labels[:, None], F.cross_entropy(logits, labels, reduction='none')


def check_labels(labels: Tensor, classes: int | None = None) -> Tensor:
    """Labels [B] in int64; raises ValueError unless a model can tell classes apart, and all labels are among them."""
    if classes == 1:
        raise ValueError('The model has one output (num_classes=1), so every image has the same class, and any other '
                         'model agrees. Compare its outputs with evaluate_embeddings (odevit evaluate --embedding).')
    if labels.is_floating_point():
        raise ValueError(f'Labels must be whole numbers; got {labels.dtype}.')
    labels = labels.long()
    for label in (int(labels.min()), int(labels.max())):
        if label < 0 or (classes is not None and label >= classes):
            what = 'labels count from 0' if classes is None else f'the model has {classes} classes'
            raise ValueError(f'The data has label {label}, but {what}. Create the model with the num_classes of the '
                             'data.')
    return labels


class Pass(NamedTuple):
    """One or two data sets through one model.

    Attributes:
        kind: 'teacher', 'student' or 'model'.
        name: The model in words.
        columns: What was computed of each image: tensors [N, ...] on the CPU.
        others: The same of the images of another loader; None without one.
        about: What every Result says.
    """
    kind: str
    name: str
    columns: list[Tensor]
    others: list[Tensor] | None
    about: dict[str, Any]


def passes(
        model: nn.Module, loader: Any, each: Callable[[Tensor, Any], tuple[Tensor, ...]], *,
        steps: int | Sequence[int] | None, teacher: nn.Module | None, others: Any = None, **options: Any,
) -> Iterator[Pass]:
    """Run data sets through the teacher, if any, and through a model with each number of steps.

    `each` computes tensors [B, ...] of the outputs and the labels of a batch; options are those of `run_batches`.
    """
    for what, value in (('model', model), ('teacher', teacher)):
        if not isinstance(value, nn.Module) and not (what == 'teacher' and value is None):
            raise TypeError(f'{what} must be a timm model; got {shown(value)}. Build it with timm.create_model.')
    runs: list[Any] = [('model' if teacher is None else 'student', *view, None) for view in views(model, steps)]
    if teacher is not None:
        runs.insert(0, ('teacher', 'teacher', teacher, renormalisation(model, teacher)))
    for source in (loader, others):
        if isinstance(source, Iterator) and len(runs) > 1:
            raise ValueError(f'loader is a {type(source).__name__}, which gives its batches only once, but it is read '
                             'for each number of steps and for the teacher. Give a list of batches, or a DataLoader.')
    first = None
    for kind, name, view, normalisation in runs:
        options.update(name=name, normalisation=normalisation)
        about, marks, columns = run_batches(view, loader, each, **options)
        first = marks if first is None else first
        if marks.shape != first.shape or not torch.allclose(marks, first, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError('The loader does not give the same images in the same order each time. Make it with '
                             'shuffle=False and without augmentation.')
        also = None if others is None else run_batches(view, others, each, **options)[2]
        yield Pass(kind, name, columns, also, about)


def views(model: nn.Module, steps: int | Sequence[int] | None) -> list[tuple[str, nn.Module]]:
    """A name and a view of the model for each of the step counts; the model itself for None."""
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


def run_batches(
        model: nn.Module,
        loader: Any,
        each: Callable[[Tensor, Any], tuple[Tensor, ...] | None],
        *,
        labels: bool = True,
        amp_dtype: torch.dtype | None = None,
        progress: bool = False,
        name: str = '',
        normalisation: Callable[[Tensor], Tensor] | None = None,
) -> tuple[dict[str, Any], Tensor, list[Tensor]]:
    """Run a data set through a model in eval mode, once, on the model's device.

    `each` is called with the outputs in float32 [B, ...] and the labels [B] of each batch; `name` is for the bar.

    Returns:
        What a Result says of the pass; the mean of each image [N], by which a shuffled loader is noticed; and the
        tensors that `each` returned, of all images [N, ...], on the CPU.
    """
    parameter = next(model.parameters())
    device, stages = parameter.device, find_ode_blocks(model)
    halts = len(stages) == 1 and stages[0].config.halting is not None
    varies = any(ode.config.adaptive or ode.config.halting for ode in stages)
    marks: list[Tensor] = []
    timed: list[tuple[int, float]] = []  # images and seconds of each batch
    taken: list[Tensor] = []  # steps of each image
    evaluations = 0.
    rows: list[Any] = []
    with evaluating(model), torch.inference_mode(), autocast(device, amp_dtype):
        for images, truth in read_batches(loader, labels, bar=name if progress else ''):
            marks.append(images.float().flatten(1).mean(dim=1).cpu())
            images = images.to(device, parameter.dtype if amp_dtype is None else images.dtype)
            if normalisation is not None:
                images = normalisation(images)
            for ode in stages:
                ode.steps_taken = None  # and so it stays if the host runs the steps one by one
            _wait_for(device)
            start = time.perf_counter()
            outputs = model(images)
            _wait_for(device)
            timed.append((len(images), time.perf_counter() - start))
            evaluations += len(images) * sum(ode.evaluations for ode in stages)
            if halts:
                steps = stages[0].steps_taken
                taken.append(torch.full((len(images),), stages[0].steps) if steps is None else steps.cpu())
            rows.append(each(outputs.float(), None if truth is None else truth.to(device)) or ())
    count = sum(map(len, marks))
    later, seconds = map(sum, zip(*(timed[1:] or timed), strict=True))  # the first batch is slower than the others
    halted = None
    if halts:
        halted = tuple((100 * torch.cat(taken).bincount(minlength=stages[0].steps + 1)[1:] / count).tolist())
    return dict(
        steps=sum(ode.steps for ode in stages) if stages else None,
        nfe=None if not stages else evaluations / count if varies else round(evaluations / count), halted=halted,
        images=count, parameters=count_parameters(model), images_per_second=later / seconds,
    ), torch.cat(marks), [torch.cat(column).cpu() for column in zip(*rows, strict=True)]


def _wait_for(device: torch.device) -> None:
    if device.type not in ('cpu', 'meta'):
        torch.accelerator.synchronize(device)
