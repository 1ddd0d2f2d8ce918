"""A budget of minutes: how many updates fit into it on this machine."""
import copy
import math
import statistics
import time
from itertools import chain, islice, pairwise
from typing import Any, Callable, Dict, Iterator, List, Sequence, Union

import torch
from timm.utils import random_seed
from torch import nn

from ..distributed import rank_and_world
from ..hooks import random_states_kept
from .fit import fit
from .loaders import set_epoch

__all__ = ['EPOCHS', 'Stream', 'updates_in']

EPOCHS = 10  # into which a part is cut, so that it can be resumed
TRIED = 5  # updates


class Stream:
    """The batches of a loader, over and over: `count` of them at a time, the next ones each time.

    Each pass over the loader is an epoch of the loader, whose order depends on the seed and on the number of the pass
    alone (unless the loader has a generator of its own), so that a run can be resumed in the middle of it.

    Args:
        loader: Loader with a length.
        count: Batches at a time.
        seed: Seed of the orders.
        device: Device on which the loader draws random numbers, besides the CPU.
    """

    def __init__(self, loader: Any, count: int, seed: int = 0, device: Union[str, torch.device] = 'cpu') -> None:
        self.loader, self.count, self.seed, self.device = loader, count, seed, device
        self.rest: Iterator[Any] = iter(())
        self.taken = self.passes = 0  # batches; passes that have begun
        self.yielded: List[float] = []  # when each of the last batches was asked for, in seconds

    def set_epoch(self, epoch: int) -> None:
        """Go on after `epoch` times `count` batches, also where a run ended that this one resumes."""
        if self.taken != epoch * self.count:
            self.taken = epoch * self.count
            self.passes, given = divmod(self.taken, max(1, len(self.loader)))
            self.rest = self._pass(given)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        self.yielded = []
        while len(self.yielded) < self.count:
            batch = next(self.rest, None)
            if batch is None:
                self.rest = self._pass()
                batch = next(self.rest, None)
            if batch is None:
                return  # an empty loader
            self.yielded.append(time.perf_counter())
            self.taken += 1
            yield batch

    def _pass(self, given: int = 0) -> Iterator[Any]:
        """The batches of the next pass, without those that were given before."""
        set_epoch(self.loader, self.passes)
        with random_states_kept(self.device):
            rank, world = rank_and_world()
            random_seed((self.seed * 10_007 + self.passes) * world % 2 ** 31, rank)
            rest = iter(self.loader)
            for _ in islice(rest, given):
                pass
            begun = list(islice(rest, 0 if given else 1))  # most loaders draw their order with the first batch
        self.passes += 1
        return chain(begun, rest)


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
