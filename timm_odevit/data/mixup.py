"""timm's mixup on top of any loader."""
from collections.abc import Iterator
from typing import Any

from timm.data import Mixup
from torch import Tensor
from torch.utils.data import Sampler

__all__ = ['MixupLoader']


class MixupLoader:
    """Batches of another loader, mixed by timm's Mixup: labels become class probabilities [B, classes].

    Args:
        loader: Batches of an even number of images.
        classes: Number of classes.
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        smoothing: Label smoothing.
        prob: Share of the batches that are mixed.
    """

    def __init__(
            self, loader: Any, classes: int, mixup: float = 0., cutmix: float = 0., smoothing: float = 0.,
            prob: float = 1.,
    ) -> None:
        size = getattr(loader, 'batch_size', None)
        if size is not None and size % 2:
            raise ValueError(f'mixup mixes pairs of images, so batch_size must be even; got {size}.')
        self.loader = loader
        mixes = mixup > 0 or cutmix > 0
        self.mix = Mixup(
            mixup_alpha=mixup if mixes else 1., cutmix_alpha=cutmix, prob=prob if mixes else 0.,  # smoothing alone
            label_smoothing=smoothing, num_classes=classes)

    @property
    def sampler(self) -> Sampler | None:
        return getattr(self.loader, 'sampler', None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the loader."""
        if hasattr(self.loader, 'set_epoch'):
            self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.loader:
            yield self.mix(images.clone(), labels)
