"""How a model expects its images, which label it has for each class, and timm's mixup of both."""
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from timm.data import Mixup, resolve_input_data_config
from timm.utils import unwrap_model
from torch import Tensor

__all__ = ['MixupLoader', 'class_names', 'count_held_out', 'data_config', 'image_mode', 'labels_by_name',
           'renormalisation', 'warn_of_other_classes']

_MODES = {1: 'L', 3: 'RGB', 4: 'RGBA'}  # Pillow's modes, by the model's number of channels


def data_config(model: Any) -> dict[str, Any]:
    """timm's settings for the images of a model: size [C, H, W], mean, std, interpolation and crop."""
    model = unwrap_model(model)  # timm asks for a model's truth value, which a compiled one does not have
    cfg = resolve_input_data_config(model)  # mean and std have as many values as the model has channels
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)  # pretrained_cfg may have an older one
    return {**cfg, 'input_size': (model.in_chans, *(size or cfg['input_size'][1:]))}


def image_mode(model: Any) -> str:
    """Pillow's mode of the images that a model takes.

    Raises:
        ValueError: There is no mode with as many channels.
    """
    if model.in_chans not in _MODES:
        raise ValueError(f'Image files are read with 1, 3 or 4 channels (grey, RGB, RGBA), but the model takes '
                         f'{model.in_chans}. Use an .npz.')
    return _MODES[model.in_chans]


def class_names(model: Any) -> list[str] | None:
    """The names of a model's classes, if it has them."""
    names: Any = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names')
    good = isinstance(names, (list, tuple)) and len(names) == model.num_classes  # timm allows other forms, too
    return list(map(str, names)) if good else None


def labels_by_name(model: Any, names: Sequence[str] | None) -> list[int] | None:
    """The label that a model has for each class of a data set, if it names them all, in another order or among more."""
    own = class_names(model)
    if names is None or own is None or own == list(names) or not set(names) <= set(own) or len(set(names)) < len(names):
        return None
    return [own.index(name) for name in names]


def warn_of_other_classes(model: Any, names: Sequence[str] | None, data: Any) -> None:
    """Warn if a data set has as many classes as a model, but names others."""
    own = class_names(model)
    if names is None or own is None or own == list(names) or labels_by_name(model, names):
        return
    here, there = next((pair for pair in zip(names, own, strict=False) if pair[0] != pair[1]), (names[-1], own[-1]))
    warnings.warn(f"The classes of '{data}' are not those of the model, so labels are compared by number: '{here}' "
                  f"counts as '{there}'.", RuntimeWarning, stacklevel=3)


def count_held_out(count: int, share: float) -> int:
    """Return how many of `count` images are held out: at least one, but not all."""
    if not 0 < share < 1:
        raise ValueError(f'The share held out must lie between 0 and 1; got {share!r}.')
    return min(count - 1, max(1, round(share * count)))


def renormalisation(model: Any, teacher: Any) -> Callable[[Tensor], Tensor] | None:
    """From images [B, C, H, W] normalised for a model to images normalised for its teacher.

    Returns:
        A function of images; None if both expect the same, or if one does not say what it expects.

    Raises:
        ValueError: They take images with different numbers of channels.
    """
    if any(key not in (getattr(m, 'pretrained_cfg', None) or {}) for m in (model, teacher) for key in ('mean', 'std')):
        return None
    (mean, mean_t), (std, std_t) = (
        [torch.tensor(resolve_input_data_config(unwrap_model(m))[key]).view(1, -1, 1, 1) for m in (model, teacher)]
        for key in ('mean', 'std'))
    if mean.shape != mean_t.shape:
        raise ValueError(f'The teacher takes images with {mean_t.shape[1]} channels, the model with {mean.shape[1]}. '
                         'Give a teacher with as many channels as the model.')
    if torch.equal(mean, mean_t) and torch.equal(std, std_t):
        return None
    scale, shift = std / std_t, (mean - mean_t) / std_t
    return lambda images: images * scale.to(images) + shift.to(images)


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

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.loader:
            yield self.mix(images.clone(), labels)
