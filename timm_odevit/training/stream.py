"""A loader in epochs of any length; how many updates fit into minutes."""
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from ..data.batches import set_epoch

__all__ = ['EPOCHS', 'Stream', 'updates_in']

EPOCHS = 10  # into which minutes are divided at least, for the progress bar and for validation
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


def updates_in(seconds: float, update: float, validation: float, most: int) -> tuple[int, int]:
    """How many epochs of how many updates fit, at least one of one.

    Args:
        seconds: Seconds there are.
        update: Seconds of an update.
        validation: Seconds of the validation after each epoch.
        most: Updates of an epoch, at most.
    """
    each = int((seconds / EPOCHS - validation) / update)
    if each < 1:
        return max(1, min(EPOCHS, int(seconds / (update + validation)))), 1
    if each <= most:
        return EPOCHS, each
    return int(seconds / (most * update + validation)), most
