"""Loaders: of images in memory, of image files, and of any other loader; and what is read from each."""
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup, create_loader, create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from ..distributed import rank_and_world
from ..hooks import random_states_kept
from .config import DataConfig, Reading
from .preprocessing import data_config, dtype_of, image_mode, read_image, shuffled

__all__ = ['ArrayLoader', 'FileLoader', 'Mapped', 'Samples', 'is_pair', 'mixed', 'read_batches', 'set_epoch',
           'training_loader', 'unlabelled']

BATCH = 64  # images of tensors that run at once
_UNREADABLE = -1  # the label of an image file that cannot be read
_logger = logging.getLogger(__name__)
Samples = list[tuple[str, int]]  # files and their labels


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader and its sampler which epoch comes next, if they ask for it."""
    each: Any
    for each in (loader, getattr(loader, 'sampler', None)):
        if hasattr(each, 'set_epoch'):
            each.set_epoch(epoch)


def is_pair(source: Any) -> bool:
    """Whether this is a pair of tensors, images [N, C, H, W] and labels, and not two batches of images."""
    return (isinstance(source, (tuple, list)) and len(source) == 2
            and isinstance(source[0], Tensor) and isinstance(source[1], Tensor) and source[1].ndim < 4)


def read_batches(
        source: Any, labels: bool | None = True, *, size: int = BATCH, bar: str = '',
) -> Iterator[tuple[Tensor, Any]]:
    """The images [B, C, H, W] and labels [B] of each batch that is not empty, of a loader, a tensor or a pair of these.

    `labels` says whether they are needed; None takes them where there are any. Without, they are None. Tensors give
    batches of `size`; `bar` names a progress bar.
    """
    if isinstance(source, Tensor):
        source = source.split(size)
    elif is_pair(source):
        source = list(zip_longest(*(part.split(size) for part in source)))
    empty = True
    for batch in tqdm(source, desc=bar, leave=False, disable=not bar):
        images, *rest = parts = batch if isinstance(batch, (tuple, list)) else (batch,)
        bare = labels is False or (labels is None and not rest)
        if not isinstance(images, Tensor) or images.ndim != 4 or not (bare or (
                len(rest) == 1 and isinstance(rest[0], Tensor) and rest[0].shape == images.shape[:1])):
            found = ', '.join(f'{part.dtype} {list(part.shape)}' if isinstance(part, Tensor) else type(part).__name__
                              for part in parts)
            raise ValueError(f"Expected batches of images [B, C, H, W]{' and labels [B]' if labels else ''}; got "
                             f'{found}.')
        if len(images):
            empty = False
            yield images, None if bare else rest[0]
    if empty:
        raise ValueError('The loader gave no images.')


def unlabelled(images: Tensor, _: Any = None) -> tuple[Tensor, Tensor]:
    return images, torch.zeros(len(images), dtype=torch.long, device=images.device)


class Mapped:
    """Batches (images [B, C, H, W], labels [B]) of any loader with a length, changed by a function of both.

    Labels are 0 where the loader gives images only.
    """

    def __init__(
            self, loader: Any, change: Callable[..., tuple[Tensor, Any]] = lambda images, labels: (images, labels),
    ) -> None:
        self.loader, self.change = loader, change
        self.batch_size: int | None = getattr(loader, 'batch_size', None)
        self.count: int = getattr(loader, 'count', len(loader) * (self.batch_size or 1))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for batch in self.loader:
            pair = batch if isinstance(batch, (tuple, list)) else (batch,)
            yield self.change(*(pair if len(pair) != 1 else unlabelled(pair[0])))

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.loader, epoch)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """At most so many random images and their labels; of a loader that cannot choose, its next ones."""
        if hasattr(self.loader, 'sample'):
            return self.change(*self.loader.sample(count, seed))
        batches: list[Any] = []
        with random_states_kept('cpu'):
            torch.manual_seed(seed)
            for batch in self:
                batches.append(batch)
                if sum(len(images) for images, _ in batches) >= count:
                    break
        images, labels = (torch.cat(parts)[:count].cpu() for parts in zip(*batches, strict=True))
        return images, labels

    def sha256(self) -> str:
        return self.loader.sha256() if hasattr(self.loader, 'sha256') else f'{len(self)} batches'


def mixed(loader: Any, classes: int, config: DataConfig) -> Mapped:
    """Batches of an even number of images, mixed by timm's Mixup; labels become probabilities [B, classes]."""
    if loader.batch_size % 2:
        raise ValueError(f'Pairs of images are mixed, so batch_size must be even; got {loader.batch_size}.')
    mixes = config.mixup > 0 or config.cutmix > 0
    prob = (1. if config.prob is None else config.prob) if mixes else 0.  # smoothing alone
    mix = Mixup(mixup_alpha=config.mixup if mixes else 1., cutmix_alpha=config.cutmix, prob=prob,
                label_smoothing=config.smoothing, num_classes=classes)
    return Mapped(loader, lambda images, labels: mix(images.clone(), labels))


class ArrayLoader:
    """Batches (images [B, C, H, W], labels [B]) of images in memory [N, C, S, S] and their labels [N].

    `prepare` makes of a batch what the model expects. In training, the order depends only on the seed and the epoch,
    `augment` draws from torch's global generator, an incomplete last batch is dropped, and each of several processes
    has its own part.
    """

    def __init__(
            self, images: Tensor, labels: Tensor, batch_size: int, prepare: Callable[[Tensor], Tensor],
            augment: Callable[[Tensor], Tensor] | None = None, *, train: bool = False, seed: int = 0,
    ) -> None:
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.prepare, self.augment = prepare, augment
        self.count, self.train, self.seed, self.epoch = len(labels), train, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if self.train:
            return self.count // (self.batch_size * rank_and_world()[1])
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.indices():
            images = self.images[index]
            yield self.prepare(self.augment(images) if self.train and self.augment else images), self.labels[index]

    def indices(self) -> Iterator[Tensor]:
        """The indices of the images of each batch."""
        order, (rank, world) = torch.arange(self.count), rank_and_world() if self.train else (0, 1)
        if self.train:  # the same for all processes
            order = shuffled(self.count, (self.seed * 1_000_003 + self.epoch) % 2 ** 63)
        for batch in order.split(self.batch_size * world)[:len(self)]:
            yield batch[rank::world].to(self.labels.device)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        index = shuffled(self.count, seed)[:count].to(self.labels.device)
        return self.prepare(self.images[index]).cpu(), self.labels[index].cpu()

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for tensor in (self.images, self.labels):
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class Files(Dataset):
    """Images of files [C, H, W] and their labels.

    The next readable image takes the place of one that cannot be read, with its own label in training, or else -1.
    """

    def __init__(self, samples: Samples, model: Any, training: bool = False) -> None:
        self.samples, self.training = samples, training
        self.mode, self.dtype = image_mode(model), dtype_of(model)
        self.transform: Any = create_transform(**data_config(model), is_training=False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        for i in range(index, index + len(self)):
            file, label = self.samples[i % len(self)]
            try:
                image = read_image(file, self.mode)
            except ValueError as e:
                _logger.warning(str(e))
                continue
            return self.transform(image).to(self.dtype), label if i == index or self.training else _UNREADABLE
        raise ValueError(f"None of the {len(self)} images can be read, such as '{self.samples[0][0]}'.")


class FileLoader(DataLoader):
    """A DataLoader of Files in order, without the images that cannot be read."""

    def __init__(self, samples: Samples, model: Any, config: DataConfig) -> None:
        super().__init__(Files(samples, model), config.batch_size, num_workers=_workers(config))
        self.files: Any = self.dataset
        self.count = len(samples)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private class
        for images, labels in super().__iter__():
            yield images[labels != _UNREADABLE], labels[labels != _UNREADABLE]

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        order = shuffled(self.count, seed).tolist()
        pairs = list(islice((pair for pair in map(self.files.__getitem__, order) if pair[1] != _UNREADABLE), count))
        return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])

    def sha256(self) -> str:
        files = [[*Path(file).parts[-2:], os.path.getsize(file) if os.path.exists(file) else None, label]
                 for file, label in self.files.samples]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def training_loader(samples: Samples, to: Reading) -> Any:
    """timm's loader of image files, shuffled and augmented."""
    dataset: Any = Files(samples, to.model, training=True)
    loader = create_loader(
        dataset,
        **data_config(to.model),
        batch_size=to.config.batch_of(len(samples)),
        is_training=True,
        scale=(0.35, 1.),
        auto_augment=to.config.auto_augment,
        re_prob=to.config.reprob,
        num_workers=_workers(to.config),
        distributed=rank_and_world()[1] > 1,
        persistent_workers=False,  # each epoch seeds new workers, so that a resumed run sees the same images
        device=torch.device('cpu'),
        use_prefetcher=False,
    )
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.seed = to.seed
    return loader


def _workers(config: DataConfig) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return min(2, cores - 1) if config.workers is None else config.workers
