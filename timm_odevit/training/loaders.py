"""The loaders of a recipe, the chain of loaders behind one, and a sample of their images."""
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..convert.refusals import check_images
from ..data.read import classes_of

__all__ = ['Unlabelled', 'count_classes', 'label_names']


def _chain(loader: Any) -> list[Any]:
    """A loader, and the loaders that it takes its batches from."""
    parts: list[Any] = []
    while loader is not None:
        parts.append(loader)
        loader = getattr(loader, 'loader', getattr(loader, 'source', None))
    return parts


def count_classes(data: str | Path) -> int:
    """The number of classes of a folder of images or of an .npz."""
    return classes_of(data)[1]


def label_names(loader: Any) -> list[str] | None:
    """The names of the classes, in the order of their labels: those of an .npz, or of the folders."""
    plain = _chain(loader)[-1]
    if hasattr(plain, 'label_names'):
        return plain.label_names
    labels = plain.dataset.reader.class_to_idx
    return sorted(labels, key=labels.__getitem__)


class Unlabelled:
    """Batches (images, dummy labels) from a tensor or a loader, whose own labels do not count."""

    def __init__(self, images: Tensor | Iterable[Any], batch_size: int) -> None:
        self.source: Any = images
        if isinstance(images, Tensor):
            check_images(images)
            self.batch_size = min(batch_size, len(images))
        elif not hasattr(images, '__len__') or not hasattr(images, '__iter__') or hasattr(images, 'dtype'):
            raise ValueError(
                f'images must be a tensor [N, C, H, W], or a loader with a length; got {type(images).__name__}.')

    def __len__(self) -> int:
        return len(self.source) // self.batch_size if isinstance(self.source, Tensor) else len(self.source)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(self.source, Tensor):
            order = torch.randperm(len(self.source))
            batches = (self.source[order[i * self.batch_size:(i + 1) * self.batch_size]] for i in range(len(self)))
        else:
            batches = (batch[0] if isinstance(batch, (list, tuple)) else batch for batch in self.source)
        for batch in batches:
            yield batch, torch.zeros(len(batch), dtype=torch.long)
