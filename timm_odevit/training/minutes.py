"""Training for some minutes: a loader in epochs of any length, how many updates fit, and how much there is to learn."""
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from operator import mul
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

__all__ = ['EPOCHS', 'Stream', 'loss_before', 'seconds_per_update', 'share_minutes', 'updates_in']

EPOCHS = 10  # into which a part that takes some minutes is divided, for the progress bar and for validation
TRIED = 2  # updates by which their time is found, at least
PASSES = 10_000  # over the data in an epoch, at most, that each have an order of their own


class Stream:
    """A loader in epochs of `count` batches, each from a new order of the data, over and over if it has fewer.

    The orders begin with that of the epoch `first`.
    """

    def __init__(self, loader: Any, count: int, first: int = 0) -> None:
        self.loader, self.count, self.first, self.epoch = loader, count, first, first

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the data."""
        self.epoch = self.first + epoch

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


def seconds_per_update(
        model: nn.Module, loader: Any, make: Callable[[nn.Module], TrainingTask], options: dict[str, Any],
) -> float:
    """Seconds that an update takes, by trying a few on a copy; of several processes, the first decides.

    `make` makes the task of a student; `options` are keywords of `fit`.
    """
    trial = copy.deepcopy(model)
    updates = max(TRIED, len(getattr(make(trial), 'counts', [None])[0] or ()))  # each number of steps has its turn
    seconds = []
    for n in (1, 1, updates + 1):  # the first warms up, the second says how long a loader takes to start
        batches = Stream(loader, n * options.get('accumulate', 1))
        record, = fit(make(trial), batches, epochs=1, progress=False, **options)
        seconds.append(record['seconds'])
    _, one, more = seconds
    found: float = in_first_process(lambda: (more - one) / updates if more > one else more / (updates + 1))
    return found


def updates_in(minutes: float, seconds: float) -> int:
    """How many updates of so many seconds fit into minutes, at least 1; more than EPOCHS are a multiple of EPOCHS."""
    n = max(1, int(60. * minutes / seconds))
    return n if n < EPOCHS else EPOCHS * (n // EPOCHS)


def share_minutes(minutes: float, epochs: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """How many epochs of each stage take so many minutes together, in proportion to those given.

    They are whole, and rounded down unless less than a tenth is missing, except for a part of one; what is left goes to
    the next stage.

    Args:
        minutes: Minutes of all stages.
        epochs: Epochs of each stage, in proportion.
        seconds: Seconds of an epoch of each stage.
    """
    left, found = 60. * minutes, []
    for i, (n, each) in enumerate(zip(epochs, seconds, strict=True)):
        share = n * left / sum(map(mul, epochs[i:], seconds[i:]))
        found.append(int(share + 0.1) if share >= 1 else max(share, 0.))
        left -= found[-1] * each
    return found


@torch.no_grad()
def loss_before(task: TrainingTask, batches: Iterable[Any], amp: str | None = None) -> float:
    """A task's mean loss on a few batches: for a StepwiseTask, 0 if there is nothing to learn, 1 if everything."""
    device, losses = torch.device(task.device), []
    module: Any = task.trainable_module
    with evaluating(module):
        for images, labels in batches:
            with must_fit('train_loader', images, labels, task), autocast(device, AMP_DTYPES[amp]):
                losses.append(over_processes(task(images.to(device), labels)['loss']))
    return torch.stack(losses).mean().item() if losses else 1.
