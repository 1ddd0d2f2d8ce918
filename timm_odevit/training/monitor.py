"""What surrounds the loop of `fit`: the first batch, validation, where a loss diverged, TensorBoard."""
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings
from ..hooks import autocast, check_images, evaluating, watch_blocks
from ..ode.blocks import find_ode_blocks, with_steps
from ..settings import one_line
from .resume import models_of

__all__ = ['check_loss_is_finite', 'must_fit', 'scalars', 'score_of', 'try_one_batch', 'unfused_in_bfloat16',
           'validate', 'words_of']


def validate(task: Any, model: nn.Module, loader: Any, dtype: torch.dtype | None) -> dict[str, float]:
    """Accuracy; without labels, how near the outputs are to the teacher's."""
    embedding = getattr(task, 'embedding', False)
    if not embedding and getattr(task, 'labelled', True):
        top = evaluate(model, loader, amp_dtype=dtype).results[-1]
        return {'val_top1': top.top1, 'val_top5': top.top5, 'val_loss': top.loss}
    result: Any = evaluate_embeddings(model, loader, teacher=task.teacher, amp_dtype=dtype).results[-1]
    measures = ('cosine', 'error', 'neighbours') if embedding else ('error',)
    return {f'val_{key}': getattr(result, key) for key in measures if getattr(result, key) is not None}


def score_of(record: dict[str, Any] | None, default: float = -math.inf) -> float:
    """What chooses the best state: the accuracy, the cosine with the teacher's embeddings, or less error."""
    record = record or {}
    return record.get('val_top1', record.get('val_cosine', -record['val_error'] if 'val_error' in record else default))


def words_of(record: dict[str, float]) -> str:
    """What `score_of` compares, in words."""
    if 'val_top1' in record:
        return f"top-1 {record['val_top1']:.1f} %"
    name, what = ('val_cosine', 'cosine') if 'val_cosine' in record else ('val_error', 'squared error')
    return f'{what} {record[name]:.4g}'


def try_one_batch(val_loader: Any, task: Any, dtype: torch.dtype | None) -> float:
    """Validate one batch; returns the seconds that another such batch takes."""
    for batch in val_loader:
        if isinstance(batch, (tuple, list)) and len(batch) and not len(batch[0]):
            continue  # none of its images can be read
        model = models_of(task)['model']
        with must_fit('val_loader', batch, task):
            validate(task, model, [batch], dtype)
            started = time.perf_counter()
            validate(task, model, [batch], dtype)
        return time.perf_counter() - started
    raise ValueError('val_loader is empty. Give at least one batch, or None.')


@contextmanager
def must_fit(name: str, batch: Any, task: Any) -> Iterator[None]:
    """If a first batch does not fit the model, say why, and restore the task's buffers and modes."""
    buffers = [(buffer, buffer.clone()) for buffer in task.buffers()]
    modes = [(module, module.training) for module in task.modules()]
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    try:
        if len(parts) != 2:
            what = f'{len(parts)} items' if parts is batch else f'a {type(batch).__name__}'
            raise ValueError(f'it must give batches (images, labels); got {what}')
        check_images(parts[0])
        _check_labels(name, parts[1], task)
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as e:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, mode in modes:
            module.training = mode
        given = [f'{x.dtype} {list(x.shape)}' if isinstance(x, Tensor) else type(x).__name__ for x in parts]
        what = ', '.join(map(' '.join, zip(('images', 'labels'), given, strict=False)))
        raise ValueError(
            f'The first batch of {name} ({what}) does not fit the model: {type(e).__name__}: {one_line(e)}') from e


def _check_labels(name: str, labels: Tensor, task: Any) -> None:
    """Labels must be the model's classes, where they count: on a GPU, others stop the process."""
    criterion = getattr(task, 'criterion', None)
    count = not getattr(task, 'embedding', False) and getattr(task, 'labelled', True) and (
        criterion is not None or name == 'val_loader')
    classes = getattr(models_of(task)['model'], 'num_classes', 0) if count else 0
    if classes and labels.ndim == 1 and not labels.is_floating_point():
        wrong = labels[((labels < 0) | (labels >= classes)) & (labels != getattr(criterion, 'ignore_index', -100))]
        if len(wrong):
            raise ValueError(f'it has label {int(wrong[0])}, but the {classes} classes of the model are 0 to '
                             f'{classes - 1}. Create the model with the num_classes of the data.')


def check_loss_is_finite(
        parts: dict[str, Tensor], images: Tensor, task: Any, epoch: int, batch: int, dtype: torch.dtype | None,
) -> None:
    """Raise FloatingPointError if the loss is not finite, with the step of an ODE-ViT at which it diverged."""
    if math.isfinite(parts['loss'].item()):
        return
    if not torch.isfinite(images).all():
        raise FloatingPointError(f'Batch {batch + 1} of epoch {epoch + 1} has images that are not finite, so neither '
                                 'is the loss. Check the data.')
    values = ', '.join(f'{key} {part.item():.4g}' for key, part in parts.items())
    raise FloatingPointError(
        f'The loss is not finite in epoch {epoch + 1}, batch {batch + 1} ({values}). '
        f'{_divergence(task, images, dtype)}Lower lr, or use no float16.')


@torch.no_grad()
def _divergence(task: Any, images: Tensor, dtype: torch.dtype | None) -> str:
    """A sentence that says where an ODE-ViT's state stops being finite, if it does."""
    model = models_of(task)['model']
    odes = find_ode_blocks(model)
    if not odes or odes[0].config.adaptive:
        return ''
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        return 'The weights of the model are not finite. '
    for steps in getattr(task, 'drawn', [[ode.steps for ode in odes]]):
        view = with_steps(model, steps)
        odes = find_ode_blocks(view)
        with evaluating(view), watch_blocks([list(ode.solver) for ode in odes]) as seen, autocast(
                images.device, dtype):
            view(images)
        for ode, (states, _) in zip(odes, seen, strict=True):
            for i, (step, state) in enumerate(zip(ode.solver, states[1:], strict=False)):
                if not torch.isfinite(state).all():
                    return (f'The field diverges: the state is not finite after step {i + 1} of {ode.steps}, from t = '
                            f'{step.t:g} to {step.t + step.h:g}. ')
    return ''


@contextmanager
def unfused_in_bfloat16(task: nn.Module, device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Attention by its own operations on a CPU in bfloat16, where PyTorch's fused kernel trains slower."""
    slow = device.type == 'cpu' and dtype is torch.bfloat16
    fused: list[Any] = [module for module in task.modules() if slow and getattr(module, 'fused_attn', False)]
    try:
        for module in fused:
            module.fused_attn = False
        yield
    finally:
        for module in fused:
            module.fused_attn = True


@contextmanager
def scalars(folder: Path | None) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yields a function that adds the record of an epoch to `folder/tensorboard`, if TensorBoard is installed."""
    @cache
    def writer(path: Path) -> Any:
        from torch.utils.tensorboard import SummaryWriter
        return stack.enter_context(SummaryWriter(path))  # type: ignore[no-untyped-call]

    def add(record: dict[str, float]) -> None:
        if folder is not None and find_spec('tensorboard') is not None:
            for name in record.keys() - {'epoch'}:
                writer(folder / 'tensorboard').add_scalar(name, record[name], record['epoch'])
            writer(folder / 'tensorboard').flush()
    with ExitStack() as stack:
        yield add
