"""What surrounds the loop of `fit`: checks of the first batches, validation, where a loss diverged, TensorBoard."""
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timm.optim import muon
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..convert.refusals import check_images
from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings
from ..hooks import autocast, evaluating, random_states_kept, surely, watch_blocks
from ..ode.blocks import find_ode_blocks
from ..ode.with_steps import with_steps
from .loaders import loader_chain
from .resume import models_of

__all__ = ['check_batch', 'check_loss_is_finite', 'loader_state_kept', 'muon_in_float32', 'must_fit', 'scalars',
           'score_of', 'try_one_batch', 'unfused_in_bfloat16', 'validate']


def validate(task: Any, model: nn.Module, loader: Any, dtype: torch.dtype | None) -> dict[str, float]:
    """Accuracy; of a task that follows embeddings, how near they are to the teacher's."""
    if not getattr(task, 'embedding', False):
        top = evaluate(model, loader, amp_dtype=dtype).results[-1]
        return {'val_top1': top.top1, 'val_top5': top.top5, 'val_loss': top.loss}
    found: Any = evaluate_embeddings(model, loader, teacher=task.teacher, amp_dtype=dtype).results[-1]
    return {f'val_{key}': getattr(found, key) for key in ('cosine', 'error', 'neighbours')
            if getattr(found, key) is not None}


def score_of(record: dict[str, Any], default: float) -> float:
    """What chooses the best epoch, of its record: the accuracy, or the cosine with the teacher's embeddings."""
    return record.get('val_top1', record.get('val_cosine', default))


def try_one_batch(val_loader: Any, task: TrainingTask, dtype: torch.dtype | None) -> None:
    """Validate one batch, and leave everything as it was."""
    with loader_state_kept(val_loader, task.device):
        for batch in val_loader:
            if isinstance(batch, (tuple, list)) and len(batch) and not len(batch[0]):
                continue  # none of its images can be read
            images, labels = check_batch('val_loader', batch, task)
            with must_fit('val_loader', images, labels, task):
                validate(task, models_of(task)['model'], [(images, labels)], dtype)
            return
    raise ValueError('val_loader is empty. Give at least one batch, or None.')


@contextmanager
def loader_state_kept(loader: Any, device: torch.device) -> Iterator[None]:
    """Restore what an extra iteration changes: random states, and the persistent workers of a DataLoader."""
    parts = loader_chain(loader)
    owners = [owner for part in parts for owner in (
        part, getattr(part, 'sampler', None), getattr(part, 'batch_sampler', None),
        getattr(getattr(part, 'batch_sampler', None), 'sampler', None))]
    found = [getattr(owner, 'generator', None) for owner in owners]
    states = [(generator, generator.get_state()) for generator in found if isinstance(generator, torch.Generator)]
    workers = [(part, part._iterator) for part in parts if isinstance(part, DataLoader)]
    with random_states_kept(device):
        try:
            for part, _ in workers:
                part._iterator = None
            yield
        finally:
            for part, kept in workers:
                part._iterator = kept
            for generator, state in states:
                generator.set_state(state)


def check_batch(name: str, batch: Any, task: TrainingTask) -> Any:
    """The images and labels of a first batch.

    Raises:
        ValueError: It is not a batch, or a label is not one of the model's classes.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = f'{len(batch)} items' if isinstance(batch, (tuple, list)) else f'a {type(batch).__name__}'
        raise ValueError(f'{name} must give batches (images, labels); got {found}.')
    images, labels = batch
    try:
        check_images(images)
    except ValueError as e:
        raise ValueError(f'{name}: {e}') from None
    if not isinstance(labels, Tensor):
        raise ValueError(f'{name}: labels must be a tensor; got {type(labels).__name__}. Where they do not count, any '
                         'will do.')
    criterion = getattr(task, 'criterion', None)
    classes = 0 if getattr(task, 'embedding', False) else getattr(models_of(task)['model'], 'num_classes', 0)
    used = classes and (criterion is not None or name == 'val_loader')  # some tasks ignore labels
    if used and labels.ndim == 1 and not labels.is_floating_point():
        wrong = labels[((labels < 0) | (labels >= classes)) & (labels != getattr(criterion, 'ignore_index', -100))]
        if len(wrong):
            raise ValueError(f'{name} has label {int(wrong[0])}, but the {classes} classes of the model are 0 to '
                             f'{classes - 1}. Create the model with the num_classes of the data.')
    return images, labels


@contextmanager
def must_fit(name: str, images: Tensor, labels: Any, task: TrainingTask) -> Iterator[None]:
    """If a batch does not fit the model, say why, and restore the task's buffers and modes."""
    buffers = [(buffer, buffer.clone()) for buffer in task.buffers()]
    modes = [(module, module.training) for module in task.modules()]
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as e:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, mode in modes:
            module.training = mode
        found = [f'{x.dtype} {list(x.shape)}' if isinstance(x, Tensor) else type(x).__name__ for x in (images, labels)]
        raise ValueError(f'The first batch of {name} (images {found[0]}, labels {found[1]}) does not fit the model: '
                         f'{type(e).__name__}: {" ".join(str(e).split())}') from e


def check_loss_is_finite(
        parts: dict[str, Tensor], images: Tensor, task: Any, epoch: int, batch: int, dtype: torch.dtype | None,
) -> None:
    """Raise FloatingPointError if the loss is not finite, with the step of an ODE-ViT at which it diverged."""
    if math.isfinite(parts['loss'].item()):
        return
    if not torch.isfinite(images).all():
        raise FloatingPointError(f'Batch {batch + 1} of epoch {epoch + 1} has images that are not finite, so neither '
                                 'is the loss. Check the data.')
    found = ', '.join(f'{key} {part.item():.4g}' for key, part in parts.items())
    raise FloatingPointError(
        f'The loss is not finite in epoch {epoch + 1}, batch {batch + 1} ({found}). '
        f'{_divergence(task, images, dtype)}Lower lr, or use amp bfloat16 or None and a model that is not in float16.')


@torch.no_grad()
def _divergence(task: Any, images: Tensor, dtype: torch.dtype | None) -> str:
    """A sentence that says where an ODE-ViT's state stops being finite; empty for other models and other causes."""
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


_lock, _fits = threading.Lock(), 0  # in progress, in all threads
_newtonschulz: Any = None  # timm's own, during these


@contextmanager
def muon_in_float32() -> Iterator[None]:
    """Make timm's Muon multiply in float32 on a CPU: most CPUs emulate bfloat16, which is 30 times slower."""
    global _fits, _newtonschulz
    with _lock:
        if _fits == 0:
            _newtonschulz = muon.zeropower_via_newtonschulz
            muon.zeropower_via_newtonschulz = _in_float32
        _fits += 1
    try:
        yield
    finally:
        with _lock:
            _fits -= 1
            if _fits == 0:
                muon.zeropower_via_newtonschulz = _newtonschulz


def _in_float32(G: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _newtonschulz(G, *args, **({'dtype': torch.float32, **kwargs} if G.device.type == 'cpu' else kwargs))


@contextmanager
def unfused_in_bfloat16(task: nn.Module, device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Attention by its own operations, for training on a CPU in bfloat16, where PyTorch's fused kernel is slower."""
    slow = device.type == 'cpu' and dtype is torch.bfloat16
    fused: list[Any] = [module for module in task.modules() if slow and getattr(module, 'fused_attn', False)]

    def put_back() -> None:
        for module in fused:
            module.fused_attn = True
    try:
        for module in fused:
            module.fused_attn = False
        yield
    finally:
        surely(put_back)


@contextmanager
def scalars(folder: Path | None) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yields a function that adds the record of an epoch to `folder/tensorboard`, if TensorBoard is installed."""
    writer: Any = None

    def add(record: dict[str, float]) -> None:
        nonlocal writer
        if folder is None or find_spec('tensorboard') is None:
            return
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(folder / 'tensorboard')  # type: ignore[no-untyped-call]
        for name, value in record.items():
            if name != 'epoch':
                writer.add_scalar(name, value, record['epoch'])
        writer.flush()
    try:
        yield add
    finally:
        if writer is not None:
            writer.close()
