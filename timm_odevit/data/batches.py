"""Loaders of image files and of other loaders, and what is asked of any loader."""
import hashlib
import json
import logging
import os
import warnings
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
from ..hooks import evaluating, random_states_kept
from .config import DataConfig, Reading
from .preprocessing import data_config, dtype_of, image_mode, read_image, shuffled

__all__ = ['FileLoader', 'Mapped', 'Samples', 'in_batches', 'is_pair', 'mixed', 'read_batches', 'set_epoch',
           'top_class', 'training_loader', 'unlabelled']

BATCH = 64  # images of tensors that run at once
_UNREADABLE = -1  # the label of an image file that cannot be read
_logger = logging.getLogger(__name__)
Samples = list[tuple[str, int]]  # files and their labels
Change = Callable[[Tensor, Any], tuple[Tensor, Any]]


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader and its sampler which epoch comes next, if they ask for it."""
    each: Any
    for each in (loader, getattr(loader, 'sampler', None)):
        if hasattr(each, 'set_epoch'):
            each.set_epoch(epoch)


class Mapped:
    """Batches (images [B, C, H, W], labels [B]) of any loader with a length, changed by a function of both.

    Labels are 0 where the loader gives images only.
    """

    def __init__(self, loader: Any, change: Change = lambda images, labels: (images, labels)) -> None:
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

    @property
    def seed(self) -> int | None:
        return getattr(self.loader, 'seed', None)

    @seed.setter
    def seed(self, seed: int) -> None:
        self.loader.seed = seed

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


def is_pair(loader: Any) -> bool:
    """Whether a loader is a pair of tensors, images [N, C, H, W] and labels, and not two batches of images."""
    return (isinstance(loader, (tuple, list)) and len(loader) == 2
            and isinstance(loader[0], Tensor) and isinstance(loader[1], Tensor) and loader[1].ndim < 4)


def in_batches(source: Any, size: int = BATCH) -> Any:
    """A loader, or the batches of a tensor of images [N, C, H, W] or of a pair of such and labels [N]."""
    if isinstance(source, Tensor):
        return source.split(size)
    if is_pair(source):
        return list(zip_longest(*(part.split(size) for part in source)))
    return source


def read_batches(
        source: Any, labels: bool | None = True, *, size: int = BATCH, bar: str = '',
) -> Iterator[tuple[Tensor, Any]]:
    """The images [B, C, H, W] and labels [B] of each batch that is not empty.

    Args:
        source: A loader of batches, or a tensor or pair of tensors.
        labels: Whether labels are needed; None to take them where there are any. Without, they are None.
        size: Images in a batch of tensors.
        bar: Name of a progress bar; '' for none.
    """
    empty = True
    for batch in tqdm(in_batches(source, size), desc=bar, leave=False, disable=not bar):
        parts = batch if isinstance(batch, (tuple, list)) else [batch]
        images, truth = (*parts, None, None)[:2]
        bare = labels is False or (labels is None and len(parts) == 1)
        if not isinstance(images, Tensor) or images.ndim != 4 or not (bare or (
                len(parts) == 2 and isinstance(truth, Tensor) and truth.shape == images.shape[:1])):
            types = ', '.join(f'{p.dtype} {list(p.shape)}' if isinstance(p, Tensor) else type(p).__name__
                              for p in parts)
            raise ValueError(f"Expected batches of images [B, C, H, W]{' and labels [B]' if labels else ''}; got "
                             f'{types}.')
        if len(images):
            empty = False
            yield images, None if bare else truth
    if empty:
        raise ValueError('The loader gave no images.')


def unlabelled(images: Tensor, _: Any = None) -> tuple[Tensor, Tensor]:
    return images, torch.zeros(len(images), dtype=torch.long, device=images.device)


def top_class(model: Any) -> Change:
    """A change of labels to the classes that a model gives the images."""
    def change(images: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        with evaluating(model), torch.no_grad():
            outputs = [model(part.to(device, dtype_of(model))) for part in images.split(64)]
        return images, torch.cat(outputs).argmax(dim=-1).to(images.device)
    return change


def mixed(loader: Any, classes: int, config: DataConfig) -> Mapped:
    """Batches of an even number of images, mixed by timm's Mixup; labels become probabilities [B, classes]."""
    if loader.batch_size % 2:
        raise ValueError(f'mixup mixes pairs of images, so batch_size must be even; got {loader.batch_size}.')
    mixes = config.mixup > 0 or config.cutmix > 0
    prob = (1. if config.prob is None else config.prob) if mixes else 0.  # smoothing alone
    mix = Mixup(mixup_alpha=config.mixup if mixes else 1., cutmix_alpha=config.cutmix, prob=prob,
                label_smoothing=config.smoothing, num_classes=classes)
    return Mapped(loader, lambda images, labels: mix(images.clone(), labels))


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
    """A DataLoader of Files in order, without the images that cannot be read: a warning says how many."""

    def __init__(self, samples: Samples, model: Any, config: DataConfig) -> None:
        super().__init__(Files(samples, model), config.batch_size, num_workers=_workers(config))
        self.files: Any = self.dataset
        self.count = len(samples)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private class
        unreadable: list[int] = []
        for i, (images, labels) in enumerate(super().__iter__()):
            good = labels != _UNREADABLE
            unreadable += [i * int(self.batch_size or 1) + int(j) for j in (~good).nonzero()]
            yield images[good], labels[good]
        if unreadable:
            warnings.warn(f'{len(unreadable)} of {self.count} images cannot be read and are left out, such as '
                          f"'{self.files.samples[unreadable[0]][0]}'.", RuntimeWarning, stacklevel=2)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        order = shuffled(self.count, seed).tolist()
        pairs = list(islice((pair for pair in map(self.files.__getitem__, order) if pair[1] != _UNREADABLE), count))
        return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])

    def sha256(self) -> str:
        files = [[*Path(file).parts[-2:], os.path.getsize(file) if os.path.exists(file) else None, label]
                 for file, label in self.files.samples]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def training_loader(samples: Samples, to: Reading) -> Any:
    policy = to.config.auto_augment
    if policy is not None and to.model.in_chans == 4:
        raise ValueError("timm's auto_augment cannot handle an alpha channel, and the model takes 4 channels. "
                         'Leave it out.')
    dataset: Any = Files(samples, to.model, training=True)
    try:
        loader = create_loader(
            dataset,
            **data_config(to.model),
            batch_size=to.config.batch_of(len(samples)),
            is_training=True,
            scale=(0.35, 1.),
            auto_augment=policy,
            re_prob=to.config.reprob,
            num_workers=_workers(to.config),
            distributed=rank_and_world()[1] > 1,
            persistent_workers=False,  # each epoch seeds new workers, so that a resumed run sees the same images
            device=torch.device('cpu'),
            use_prefetcher=False,
        )
    except (AssertionError, AttributeError, TypeError, ValueError) as e:  # how timm rejects an unknown policy
        raise ValueError(f"Unknown auto_augment '{policy}'. Give a timm policy, such as 'rand-m9-mstd0.5-inc1' or "
                         "'original'.") from e
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.seed = to.seed
    return loader


def _workers(config: DataConfig) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return min(2, cores - 1) if config.workers is None else config.workers
