"""Checks of the first batches, before anything is trained; they change nothing."""
from contextlib import contextmanager
from typing import Any, Iterator, Optional

import torch
from timm.task import TrainingTask
from torch import Tensor
from torch.utils.data import DataLoader

from ..convert.measure import check_images
from ..hooks import random_states_kept
from .loaders import chain
from .resume import models_of
from .validation import validate

__all__ = ['checked', 'fitting', 'look_at', 'undisturbed']


@contextmanager
def undisturbed(loader: Any, device: torch.device) -> Iterator[None]:
    """Restore what an extra iteration changes: random states, and the persistent workers of a DataLoader."""
    parts = chain(loader)
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


def look_at(val_loader: Any, task: TrainingTask, dtype: Optional[torch.dtype]) -> None:
    """Validate one batch, and leave everything as it was."""
    with undisturbed(val_loader, task.device):
        for batch in val_loader:
            images, labels = checked('val_loader', batch, task)
            with fitting('val_loader', images, labels, task):
                validate(task, models_of(task)['model'], [(images, labels)], dtype)
            return
    raise ValueError('val_loader is empty. Give at least one batch, or None.')


def checked(name: str, batch: Any, task: TrainingTask) -> Any:
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
    given, criterion = getattr(labels, 'labels', labels), getattr(task, 'criterion', None)
    classes = 0 if getattr(task, 'embedding', False) else getattr(models_of(task)['model'], 'num_classes', 0)
    used = classes and (criterion is not None or name == 'val_loader')  # some tasks ignore labels
    if used and isinstance(given, Tensor) and given.ndim == 1 and not given.is_floating_point():
        wrong = given[((given < 0) | (given >= classes)) & (given != getattr(criterion, 'ignore_index', -100))]
        if len(wrong):
            raise ValueError(f'{name} has label {int(wrong[0])}, but the {classes} classes of the model are 0 to '
                             f'{classes - 1}. Create the model with the num_classes of the data.')
    return images, labels


@contextmanager
def fitting(name: str, images: Tensor, labels: Any, task: TrainingTask) -> Iterator[None]:
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
        labels = getattr(labels, 'labels', labels)
        found = [f'{x.dtype} {list(x.shape)}' if isinstance(x, Tensor) else type(x).__name__ for x in (images, labels)]
        raise ValueError(f'The first batch of {name} (images {found[0]}, labels {found[1]}) does not fit the model: '
                         f'{type(e).__name__}: {" ".join(str(e).split())}') from e
