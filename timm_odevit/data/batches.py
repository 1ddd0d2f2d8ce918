"""Settings of the data; loaders of images in memory, of image files, and of other loaders."""
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup, create_loader, create_transform
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from ..distributed import rank_and_world
from ..hooks import check_images, described, random_states_kept
from ..settings import Settings, integer, number, setting
from .preprocessing import data_config, dtype_of, image_mode, read_image

_UNREADABLE = -1  # the label of an image file that cannot be read
Samples = list[tuple[str, int]]  # files and their labels


@dataclass(frozen=True, repr=False)
class DataConfig(Settings):
    """Settings of the data; each is a key of a recipe's `data`.

    Attributes:
        batch_size: Images per batch; no more than there are.
        held_out: Share of the training images held out for validation.
        padding: Pixels by which a crop may be shifted (.npz).
        flip: Probability of mirroring (.npz; folders: 0.5).
        reprob: Probability of erasing a part of an image.
        workers: Processes that load images (folders); None for min(2, usable CPU cores - 1), or 0 without fork.
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        smoothing: Label smoothing.
        prob: Share of the batches that are mixed.
    """
    batch_size: int = setting(64, integer(1))
    held_out: float = setting(0.1, number(1., open='()'))
    padding: int = setting(4, integer(0))
    flip: float = setting(0.5, number(1.))
    reprob: float = setting(0., number(1.))
    workers: int | None = setting(None, integer(0, none='min(2, usable CPU cores - 1)'))
    mixup: float = setting(0., number())
    cutmix: float = setting(0., number())
    smoothing: float = setting(0., number(1.))
    prob: float = setting(1., number(1.))

    def _check(self) -> None:
        if self.prob < 1 and not (self.mixup or self.cutmix):
            raise ValueError('prob is the share of the batches that are mixed. Give mixup or cutmix, or prob=1.')

    @property
    def mixes(self) -> bool:
        return any((self.mixup, self.cutmix, self.smoothing))

    def batch_of(self, images: int) -> int:
        """Images per batch of this process, for so many to train on: an even number if they are mixed in pairs."""
        most = max(1, images // rank_and_world()[1])
        return self.batch_size if self.batch_size <= most else most - most % 2 * (self.mixes and most > 1)


def shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def set_epoch(loader: Any, epoch: int) -> None:
    each: Any
    for each in (loader, getattr(loader, 'sampler', None)):
        if hasattr(each, 'set_epoch'):
            each.set_epoch(epoch)


def is_pair(source: Any) -> bool:
    """Whether this is images [N, C, H, W] and labels, and not two batches of images."""
    return (isinstance(source, (tuple, list)) and len(source) == 2
            and all(isinstance(part, Tensor) for part in source) and source[1].ndim < 4)


def read_batches(source: Any, labels: bool | None, *, size: int = 64, bar: str = '') -> Iterator[tuple[Tensor, Any]]:
    """The images [B, C, H, W] and labels [B] of each batch that is not empty, of a loader, a tensor or a pair of these.

    Labels are None if `labels` is False, or if it is None and there are none. `size` is for tensors.
    """
    if isinstance(source, Tensor):
        source = source.split(size)
    elif is_pair(source):
        source = list(zip_longest(*(part.split(size) for part in source)))
    empty = True
    for batch in tqdm(source, desc=bar, leave=False, disable=not bar):
        images, *rest = parts = batch if isinstance(batch, (tuple, list)) else (batch,)
        bare = labels is False or (labels is None and not rest)
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point() or not (bare or (
                len(rest) == 1 and isinstance(rest[0], Tensor) and rest[0].shape == images.shape[:1])):
            raise ValueError(f"Expected batches of images [B, C, H, W]{' and labels [B]' if labels else ''}; got "
                             f"{', '.join(map(described, parts))}.")
        if len(images):
            empty = False
            yield images, None if bare else rest[0]
    if empty:
        raise ValueError('The loader gave no images.')


def unlabelled(images: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    check_images(images)
    return images, torch.zeros(len(images), dtype=torch.long, device=images.device)


class Mapped:
    """Batches (images [B, C, H, W], labels [B]) of any loader with a length, changed by a function of both."""

    def __init__(self, loader: Any, change: Callable[..., Any] = lambda *batch: batch) -> None:
        self.loader, self.change = loader, change
        self.batch_size = getattr(loader, 'batch_size', None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for batch in self.loader:
            yield self.change(*(batch if isinstance(batch, (tuple, list)) else (batch,)))

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.loader, epoch)

    def sample(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
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
        return f'{len(self.loader)} batches'


def mixed(loader: Any, classes: int, config: DataConfig) -> Mapped:
    """By timm's Mixup; labels become probabilities [B, classes]."""
    if loader.batch_size % 2:
        raise ValueError(f'Pairs of images are mixed, so batch_size must be even; got {loader.batch_size}.')
    mix = Mixup(mixup_alpha=config.mixup, cutmix_alpha=config.cutmix, label_smoothing=config.smoothing,
                prob=config.prob if config.mixup or config.cutmix else 0., num_classes=classes)
    return Mapped(loader, lambda images, labels: mix(images, labels % classes))


class ArrayLoader:
    """Batches (images [B, C, H, W], labels [B]) of images in memory [N, C, S, S] and their labels [N].

    With a seed, they are for training: their order depends only on it and the epoch, `augment` draws from torch's
    global generator, an incomplete last batch is dropped, and each of several processes has its own part.
    """

    def __init__(
            self, images: Tensor, labels: Tensor, batch_size: int, prepare: Callable[[Tensor], Tensor],
            augment: Callable[[Tensor], Tensor] | None = None, seed: int | None = None,
    ) -> None:
        self.images, self.labels, self.batch_size, self.count = images, labels, batch_size, len(labels)
        self.prepare, self.augment, (rank, world) = prepare, augment, rank_and_world()
        each: Any = range(self.count)
        self.sampler = each if seed is None else DistributedSampler(
            each, world, rank, seed=seed * 1_000_003 % 2 ** 62, drop_last=True)
        self.indices = BatchSampler(self.sampler, batch_size, drop_last=seed is not None)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.indices:
            index = torch.tensor(batch, device=self.labels.device)
            images = self.images[index]
            yield self.prepare(self.augment(images) if self.augment else images), self.labels[index]

    def sample(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        index = shuffled(self.count, seed)[:count].to(self.labels.device)
        return self.prepare(self.images[index]).cpu(), self.labels[index].cpu()

    def sha256(self) -> str:
        return hash_of((self.images, self.labels))


def hash_of(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Files(Dataset):
    """A readable image takes the place of one that cannot be read, with its own label in training, or else -1."""

    def __init__(self, samples: Samples, model: Any, training: bool = False) -> None:
        self.samples, self.training = samples, training
        self.bad = torch.zeros(len(samples), dtype=torch.bool).share_memory_()
        self.mode, self.dtype = image_mode(model.in_chans), dtype_of(model)
        cfg = data_config(model)
        self.least = 2 * max(cfg['input_size'])
        self.transform: Any = create_transform(**cfg, is_training=False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        for i in chain(range(index, len(self)), range(index)):
            file, label = self.samples[i]
            try:
                image = None if self.bad[i] else read_image(file, self.mode, self.least)
            except ValueError as e:
                image, self.bad[i] = None, True
                logging.getLogger(__name__).warning(str(e))
            if image is not None:
                return self.transform(image).to(self.dtype), label if i == index or self.training else _UNREADABLE
        raise ValueError(f"None of the {len(self)} images can be read, such as '{self.samples[0][0]}'.")


class FileLoader(DataLoader):
    """A DataLoader of Files in order, without the images that cannot be read."""

    def __init__(self, samples: Samples, model: Any, config: DataConfig) -> None:
        self.files, self.count = Files(samples, model), len(samples)
        super().__init__(self.files, config.batch_size, num_workers=_workers(config))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private class
        for images, labels in super().__iter__():
            read = labels != _UNREADABLE
            yield images[read], labels[read]

    def sample(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        pairs = map(self.files.__getitem__, shuffled(self.count, seed).tolist())
        images, labels = zip(*islice((pair for pair in pairs if pair[1] != _UNREADABLE), count), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def sha256(self) -> str:
        files = [[*Path(file).absolute().parts[-2:], os.path.getsize(file) if os.path.exists(file) else None, label]
                 for file, label in self.files.samples]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def training_loader(samples: Samples, model: Any, config: DataConfig, seed: int) -> Any:
    dataset: Any = Files(samples, model, training=True)
    loader = create_loader(
        dataset, **data_config(model), batch_size=config.batch_of(len(samples)), is_training=True, scale=(0.35, 1.),
        re_prob=config.reprob, num_workers=_workers(config), distributed=rank_and_world()[1] > 1,
        persistent_workers=False,  # each epoch seeds new ones, also when it is resumed
        use_prefetcher=False, pin_memory=next(model.parameters()).is_cuda)
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.seed = seed
    return loader


def _workers(config: DataConfig) -> int:
    if config.workers is not None:
        return config.workers
    if get_all_start_methods()[0] != 'fork':  # each imports all, each epoch
        return 0
    return min(2, (len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1) - 1)
