"""Settings of the data."""
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..distributed import rank_and_world
from ..settings import Settings, integer, number, setting

__all__ = ['DataConfig', 'Reading']


@dataclass(frozen=True, repr=False)
class DataConfig(Settings):
    """Settings of the data; each is a key of a recipe's `data`.

    Attributes:
        batch_size: Images per batch; no more than there are.
        held_out: Share of the training images held out for validation.
        padding: Pixels by which a crop may be shifted (arrays); None for 4.
        flip: Probability of mirroring an image (arrays); None for 0.5.
        reprob: Probability of erasing a part of an image.
        auto_augment: timm augmentation policy (folders); None for none.
        workers: Processes that load images (folders); None for min(2, usable CPU cores - 1).
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        smoothing: Label smoothing.
        prob: Share of the batches that are mixed; None for all.
    """
    batch_size: int = setting(64, integer(1))
    held_out: float = setting(0.1, number(0., 1., open='()'))
    padding: int | None = setting(None, integer(0, none='4'))
    flip: float | None = setting(None, number(0., 1., none='0.5'))
    reprob: float = setting(0., number(0., 1.))
    auto_augment: str | None = None
    workers: int | None = setting(None, integer(0, none='min(2, usable CPU cores - 1)'))
    mixup: float = setting(0., number(0.))
    cutmix: float = setting(0., number(0.))
    smoothing: float = setting(0., number(0., 1.))
    prob: float | None = setting(None, number(0., 1., none='all'))

    def _check(self) -> None:
        if self.prob is not None and not (self.mixup or self.cutmix):
            raise ValueError('prob is the share of the batches that are mixed. Give mixup or cutmix, or omit prob.')

    @property
    def mixes(self) -> bool:
        """Whether images or labels of a batch are mixed or smoothed."""
        return any((self.mixup, self.cutmix, self.smoothing))

    def batch_of(self, images: int) -> int:
        """Images per batch of this process, for so many to train on: an even number if they are mixed in pairs."""
        most = max(1, images // rank_and_world()[1])
        return self.batch_size if self.batch_size <= most else most - (most % 2 if self.mixes and most > 1 else 0)


class Reading(NamedTuple):
    """What `read_data` was asked for; `share` of the training images is held out."""
    model: Any
    config: DataConfig
    labels: bool
    share: float
    limit: int | None
    seed: int
    any_classes: bool
