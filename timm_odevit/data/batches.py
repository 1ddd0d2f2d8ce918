"""Loaders that change the batches of another loader, and what is asked of any loader."""
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from timm.data import Mixup
from torch import Tensor
from tqdm import tqdm

from ..hooks import evaluating, random_states_kept
from .config import DataConfig
from .preprocessing import dtype_of

__all__ = ['Mapped', 'mixed', 'read_batches', 'set_epoch', 'top_class', 'unlabelled']

BATCH = 64  # images of tensors that run at once
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


class MixupLoader(Mapped):  # a door of before, until nobody uses it
    def __init__(self, loader, classes, mixup=0., cutmix=0., smoothing=0., prob=1.):
        made = mixed(loader, classes, DataConfig(mixup=mixup, cutmix=cutmix, smoothing=smoothing,
                                                 prob=prob if mixup or cutmix else None))
        super().__init__(loader, made.change)
