"""Training for some minutes: a loader in epochs of any length, how many updates fit, and how much there is to learn."""
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from timm.task import TrainingTask
from torch import nn

from ..distributed import in_first_process, over_processes
from ..evaluation.accuracy import AMP_DTYPES
from ..hooks import autocast, evaluating
from .fit import fit
from .loaders import set_epoch
from .monitor import must_fit

__all__ = ['EPOCHS', 'Stream', 'faster_amp', 'loss_before', 'updates_in']

EPOCHS = 10  # into which a part that takes some minutes is divided, for the progress bar and for validation
TRIED = 3  # updates by which their time is found
PASSES = 10_000  # over the data in an epoch, at most, that each have an order of their own


class Stream:
    """A loader in epochs of `count` batches, each from a new order of the data, over and over if it has fewer."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count, self.epoch = loader, count, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the data."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._endless(), self.count)

    def _endless(self) -> Iterator[Any]:
        for i in count(self.epoch * PASSES):
            set_epoch(self.loader, i)
            empty = True
            for batch in self.loader:
                empty = False
                yield batch
            if empty:
                return


def updates_in(
        minutes: Sequence[float], model: nn.Module, loader: Any, parts: Sequence[Callable[[nn.Module], TrainingTask]],
        options: Sequence[dict[str, Any]],
) -> list[int]:
    """How many updates of each part take its minutes, by trying a few on a copy.

    The time spent here is taken from the minutes. More than EPOCHS updates are a multiple of EPOCHS. Of several
    processes, which train together here, too, the first decides.

    Args:
        minutes: Minutes of each part.
        model: The student.
        loader: Its images.
        parts: For each part, what makes its task of a student.
        options: For each part, keywords of `fit`.
    """
    started = time.perf_counter()
    trial = copy.deepcopy(model)
    seconds: list[float] = []
    for make, chosen in zip(parts, options, strict=True):
        _, record = fit(make(trial), Stream(loader, TRIED), epochs=2, progress=False, **chosen)  # the first warms up
        seconds.append(record['seconds'] / TRIED)
    left = max(0., 1. - (time.perf_counter() - started) / 60. / sum(minutes))
    updates = [max(1, math.floor(60. * given * left / each)) for given, each in zip(minutes, seconds, strict=True)]
    found: list[int] = in_first_process(lambda: [n if n < EPOCHS else EPOCHS * (n // EPOCHS) for n in updates])
    return found


def faster_amp(
        model: nn.Module, loader: Any, make: Callable[[nn.Module], TrainingTask], options: dict[str, Any],
) -> str | None:
    """'bfloat16' if a copy's updates take less time in it, as on GPUs and on processors with AMX; else None."""
    seconds = {}
    for amp in (None, 'bfloat16'):
        _, record = fit(make(copy.deepcopy(model)), Stream(loader, 1), epochs=2, progress=False,
                        **{**options, 'amp': amp})
        seconds[amp] = record['seconds']
    found: str | None = in_first_process(lambda: min(seconds, key=seconds.__getitem__))
    return found


@torch.no_grad()
def loss_before(task: TrainingTask, batches: Iterable[Any], amp: str | None = None) -> float:
    """A task's mean loss on a few batches: for a StepwiseTask, 0 if there is nothing to learn, 1 if everything.

    Args:
        task: Task.
        batches: Pairs of images [B, C, H, W] and labels.
        amp: As for `fit`.
    """
    device, losses = torch.device(task.device), []
    module: Any = task.trainable_module
    with evaluating(module):
        for images, labels in batches:
            with must_fit('train_loader', images, labels, task), autocast(device, AMP_DTYPES[amp]):
                losses.append(over_processes(task(images.to(device), labels)['loss']))
    return torch.stack(losses).mean().item() if losses else 1.
