"""A budget of minutes: how many updates fit into it on this machine."""
import copy
import math
import statistics
import time
from itertools import pairwise
from typing import Any, Callable, Dict, Iterator, List, Sequence

from torch import nn

from .fit import fit
from .loaders import set_epoch

__all__ = ['EPOCHS', 'Stream', 'updates_in']

EPOCHS = 10  # into which a part is cut, so that it can be resumed
TRIED = 5  # updates


class Stream:
    """The batches of a loader, over and over: `count` of them at a time, the next ones each time.

    Each pass over the loader is an epoch of the loader, with an order of its own.
    """

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count
        self.rest: Iterator[Any] = iter(())
        self.passes = 0
        self.yielded: List[float] = []  # when each of the last batches was asked for, in seconds

    def set_epoch(self, epoch: int) -> None:
        """Note how many times `count` batches were taken before, also by the run that this one resumes."""
        if self.passes == 0:
            self.passes = epoch * self.count // max(1, len(self.loader))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        self.yielded, fresh = [], False
        while len(self.yielded) < self.count:
            batch = next(self.rest, None)
            if batch is not None:
                fresh = False
                self.yielded.append(time.perf_counter())
                yield batch
            elif fresh:
                return  # an empty loader
            else:
                set_epoch(self.loader, self.passes)
                self.rest, fresh = iter(self.loader), True
                self.passes += 1


def updates_in(
        minutes: float,
        model: nn.Module,
        loader: Any,
        tasks: Sequence[Callable[[nn.Module], Any]],
        shares: Sequence[float],
        options: Sequence[Dict[str, Any]],
) -> List[int]:
    """How many updates of each part of a training take its share of some minutes, by trying a few on a copy.

    Args:
        minutes: All the time there is; what is spent here is taken from it.
        model: The model; it is left as it is.
        loader: Batches to train on.
        tasks: Makes the task of each part for a model.
        shares: Each part's share of the time.
        options: Settings of `fit` for each part.

    Returns:
        For each part, the number of updates, a multiple of EPOCHS or less than it.
    """
    started = time.perf_counter()
    trial = copy.deepcopy(model)
    seconds: List[float] = []
    for make, kwargs in zip(tasks, options, strict=True):
        stream = Stream(loader, TRIED + 1)
        fit(make(trial), stream, epochs=1, **{**kwargs, 'out': None, 'progress': False})
        seconds.append(statistics.median(b - a for a, b in pairwise(stream.yielded)))
    left = max(0., 60 * minutes - (time.perf_counter() - started))
    return [_rounded(share * left / each) for share, each in zip(shares, seconds, strict=True)]


def _rounded(updates: float) -> int:
    return max(1, math.floor(updates)) if updates < EPOCHS else EPOCHS * math.floor(updates / EPOCHS)
