"""How a model expects its images, and which label it has for each class."""
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_input_data_config
from timm.utils import unwrap_model
from torch import Tensor

from ..settings import one_line, printable

__all__ = ['check_names', 'class_names', 'count_held_out', 'data_config', 'dtype_of', 'image_mode', 'labels_by_name',
           'model_name', 'open_image', 'read_image', 'renormalisation', 'shuffled', 'warn_of_other_classes']

_MODES = {1: 'L', 3: 'RGB', 4: 'RGBA'}  # Pillow's modes, by the model's number of channels


def data_config(model: Any) -> dict[str, Any]:
    """timm's settings for the images of a model: size [C, H, W], mean, std, interpolation and crop."""
    model = unwrap_model(model)  # timm asks for a model's truth value, which a compiled one does not have
    cfg = resolve_input_data_config(model)  # mean and std have as many values as the model has channels
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)  # pretrained_cfg may have an older one
    return {**cfg, 'input_size': (model.in_chans, *(size or cfg['input_size'][1:]))}


def dtype_of(model: Any) -> torch.dtype:
    """The floating-point dtype of a model, which its images get."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def image_mode(model: Any) -> str:
    """Pillow's mode of the images that a model takes; raises ValueError if none has as many channels."""
    if model.in_chans not in _MODES:
        raise ValueError(f'Image files are read with 1, 3 or 4 channels (grey, RGB, RGBA), but the model takes '
                         f'{model.in_chans}. Use an .npz.')
    return _MODES[model.in_chans]


def read_image(file: str | Path, mode: str) -> Image.Image:
    """An image file in Pillow's mode 'L', 'RGB' or 'RGBA', turned upright; 16 bits are scaled to 8.

    Raises ValueError if it cannot be read, or if its pixels are numbers without a known range.
    """
    try:
        with Image.open(file) as image:
            deep = image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM'))
            if image.mode in ('I', 'F') and not deep:
                raise ValueError(f"pixels of mode '{image.mode}' have no known range; save it with 8 or 16 bits")
            upright = ImageOps.exif_transpose(image)
            if deep:
                upright = Image.fromarray((np.asarray(upright) / 257).round().astype(np.uint8))
            return upright.convert(mode)
    except Exception as e:  # a foreign file can raise anything
        raise ValueError(f"'{file}' cannot be read as an image: {one_line(e)}") from None


def open_image(file: str | Path, model: Any) -> Tensor:
    """An image file as a model expects it [C, H, W]; raises ValueError if it cannot be read."""
    transform: Any = create_transform(**data_config(model), is_training=False)
    return transform(read_image(file, image_mode(model))).to(dtype_of(model))


def model_name(model: Any) -> str:
    """The timm name of a model with the tag of its weights, or else the name of its class."""
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    name = cfg.get('architecture') or type(model).__name__
    if name == 'odevit_converted':  # the tag is that of the base
        return str(name)
    return f"{name}.{cfg['tag']}" if cfg.get('tag') else name


def class_names(model: Any) -> list[str] | None:
    """The names of a model's classes, if it has them."""
    names: Any = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names')
    good = isinstance(names, (list, tuple)) and len(names) == model.num_classes  # timm allows other forms, too
    return list(map(str, names)) if good else None


def check_names(names: Sequence[str], what: str) -> None:
    """Raise ValueError for names of classes that a saved model could not have."""
    for name in names:
        if not printable(name) or '\n' in name:
            raise ValueError(f'{what} has the class {name!r}, whose name cannot be printed. Rename it.')


def labels_by_name(model: Any, names: Sequence[str] | None) -> list[int] | None:
    """The label that a model has for each class of a data set, if it names them all, in another order or among more.

    Raises ValueError if it has two classes of that name.
    """
    own = class_names(model)
    if names is None or own is None or own == list(names) or not set(names) <= set(own) or len(set(names)) < len(names):
        return None
    labels = {name: i for i, name in enumerate(own)}
    for i, name in enumerate(own):
        if labels[name] != i and name in names:
            raise ValueError(f"The model has two classes called '{name}' ({i} and {labels[name]}), so the name does "
                             'not say which. Leave it out, or give an .npz without classes, with the labels of the '
                             'model.')
    return [labels[name] for name in names]


def warn_of_other_classes(model: Any, names: Sequence[str] | None, data: Any) -> None:
    """Warn if a data set has as many classes as a model, but names others."""
    own = class_names(model)
    if names is None or own is None or own == list(names) or (set(names) <= set(own) and len({*names}) == len(names)):
        return
    here, there = next((pair for pair in zip(names, own, strict=False) if pair[0] != pair[1]), (names[-1], own[-1]))
    warnings.warn(f"The classes of '{data}' are not those of the model, so labels are compared by number: '{here}' "
                  f"counts as '{there}'.", RuntimeWarning, stacklevel=3)


def shuffled(count: int, seed: int) -> Tensor:
    """The numbers below `count` in an order of their own for each seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def count_held_out(count: int, share: float) -> int:
    """How many of `count` images are held out: at least one, but not all; none for a share of 0."""
    return min(count - 1, max(1, round(share * count))) if share else 0


def renormalisation(model: Any, teacher: Any) -> Callable[[Tensor], Tensor] | None:
    """A function from images [B, C, H, W] normalised for a model to images normalised for its teacher.

    None if both expect the same, or if one does not say what it expects. Raises ValueError if they take images with
    different numbers of channels.
    """
    if any(key not in (getattr(m, 'pretrained_cfg', None) or {}) for m in (model, teacher) for key in ('mean', 'std')):
        return None
    cfgs = [resolve_input_data_config(unwrap_model(m)) for m in (model, teacher)]
    (mean, mean_t), (std, std_t) = (
        [torch.tensor(cfg[key]).view(1, -1, 1, 1) for cfg in cfgs] for key in ('mean', 'std'))
    if mean.shape != mean_t.shape:
        raise ValueError(f'The teacher takes images with {mean_t.shape[1]} channels, the model with {mean.shape[1]}. '
                         'Give a teacher with as many channels as the model.')
    if torch.equal(mean, mean_t) and torch.equal(std, std_t):
        return None
    scale, shift = std / std_t, (mean - mean_t) / std_t
    return lambda images: images * scale.to(images) + shift.to(images)
