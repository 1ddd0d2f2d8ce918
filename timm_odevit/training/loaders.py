"""The loaders of a recipe, the chain of loaders behind one, and a sample of their images."""
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.arrays import ArrayLoader
from ..data.batches import Mapped
from ..data.batches import set_epoch as set_epoch_of
from ..data.config import DataConfig
from ..data.read import classes_of, read_data
from ..hooks import check_images

__all__ = ['Unlabelled', 'count_classes', 'draw', 'label_names', 'loader_chain', 'loaders', 'set_epoch']


def loaders(
        config: DataConfig,
        data: str | Path,
        model: Any,
        *,
        limit: int | None = None,
        seed: int = 0,
        any_classes: bool = False,
) -> tuple[Any, Any]:
    """The loader of the training images, and that of the images held out for validation."""
    found = read_data(data, model, config, limit=limit, seed=seed, any_classes=any_classes)
    found.unaugmented.label_names = None if found.classes is None else list(found.classes)
    plain = found.train.loader if isinstance(found.train, Mapped) else found.train
    plain.label_names = found.unaugmented.label_names
    for loader in (plain, found.val):
        if not isinstance(loader, ArrayLoader):
            loader.dataset.reader = loader.dataset
    return found.train, found.val


def loader_chain(loader: Any) -> list[Any]:
    """A loader, and the loaders that it takes its batches from."""
    parts: list[Any] = []
    while loader is not None:
        parts.append(loader)
        loader = getattr(loader, 'loader', getattr(loader, 'source', None))
    return parts


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader and those it takes its batches from which epoch comes next."""
    for part in loader_chain(loader):
        set_epoch_of(part, epoch)


def count_classes(data: str | Path) -> int:
    """The number of classes of a folder of images or of an .npz."""
    return classes_of(data)[1]


def label_names(loader: Any) -> list[str] | None:
    """The names of the classes, in the order of their labels: those of an .npz, or of the folders."""
    plain = loader_chain(loader)[-1]
    if hasattr(plain, 'label_names'):
        return plain.label_names
    labels = plain.dataset.reader.class_to_idx
    return sorted(labels, key=labels.__getitem__)


def draw(source: Any, most: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """At most so many random images of arrays or of a data set, of those that can be read, and their labels."""
    arrays = isinstance(source, ArrayLoader)
    order = torch.randperm(len(source.labels if arrays else source), generator=torch.Generator().manual_seed(seed))
    if arrays:
        index = order[:most].to(source.images.device)
        return source.prepare(source.images[index]).cpu(), source.labels[index].cpu()
    found = list(islice(((image, label) for image, label in map(source.__getitem__, order.tolist())
                         if int(label) >= 0), most))
    if not found:
        raise ValueError('None of the images can be read. Give others.')
    return torch.stack([image for image, _ in found]), torch.tensor([int(label) for _, label in found])


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
