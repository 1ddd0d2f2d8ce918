"""How a model expects its images, and which label it has for each class."""
import warnings
from collections import Counter
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

__all__ = ['check_names', 'class_names', 'count_held_out', 'data_config', 'dtype_of', 'image_mode', 'labels_for',
           'model_name', 'open_image', 'read_image', 'renormalisation', 'shuffled', 'spread', 'warn_of_other_classes']


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
    """Pillow's mode of the images that a model takes."""
    return {1: 'L', 3: 'RGB', 4: 'RGBA'}[model.in_chans]


def read_image(file: str | Path, mode: str) -> Image.Image:
    """An image file in Pillow's mode 'L', 'RGB' or 'RGBA', turned upright, with 16 bits scaled to 8; or ValueError."""
    try:
        with Image.open(file) as image:
            upright = ImageOps.exif_transpose(image)
            if image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM')):
                upright = Image.fromarray((np.asarray(upright) / 257).round().astype(np.uint8))
            if upright.mode in ('I', 'F'):
                raise ValueError('its pixels have no known range; save it with 8 or 16 bits')
            return upright.convert(mode)
    except Exception as e:  # a foreign file can raise anything
        raise ValueError(f"'{file}' cannot be read as an image: {one_line(e)}") from None


def open_image(file: str | Path, model: Any) -> Tensor:
    """An image file as a model expects it [C, H, W]; ValueError if it cannot be read."""
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


def check_names(names: Sequence[str], source: Any) -> None:
    """Raise ValueError for names of classes with which a saved model would not load."""
    for name in names:
        if not printable(name) or '\n' in name:
            raise ValueError(f"'{source}' has the class {name!r}, whose name cannot be printed. Rename it.")


def _labels_by_name(own: Sequence[str] | None, names: Sequence[str] | None) -> list[int] | None:
    """The label of each class among the model's own, if it has all of these names, but others or in another order."""
    if own is None or names is None or list(own) == list(names) or not set(names) <= set(own):
        return None
    if twice := {name for name, count in Counter(own).items() if count > 1}.intersection(names):
        raise ValueError(f"The model has two classes called '{min(twice)}', so the name does not say which. Leave it "
                         'out.')
    return [own.index(name) for name in names] if len({*names}) == len(names) else None


def labels_for(model: Any, names: Sequence[str] | None, number: int, source: Any) -> list[int] | None:
    """The label that a model has for each class of some data, by name; None if it knows as many, and not by name."""
    labels, known = _labels_by_name(class_names(model), names), model.num_classes
    if labels is None and (number > known or (names is not None and number < known)):
        raise ValueError(f"'{source}' has {number} classes, but the model has {known}. Give data with classes of the "
                         f'model, or fine-tune it first: odevit finetune MODEL {source} OUT')
    return labels


def warn_of_other_classes(model: Any, names: Sequence[str] | None, data: Any) -> None:
    """Warn if a data set has as many classes as a model, but names others."""
    own = class_names(model)
    if names is None or own is None or own == list(names) or _labels_by_name(own, names):
        return
    warnings.warn(f"The classes of '{data}' are not those of the model, so labels are compared by number.",
                  RuntimeWarning, stacklevel=3)


def shuffled(count: int, seed: int) -> Tensor:
    """The numbers below `count` in an order of their own for each seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def count_held_out(count: int, share: float) -> int:
    """How many of `count` images are held out: at least one, but not all; none for a share of 0."""
    return min(count - 1, max(1, round(share * count))) if share else 0


def spread(total: int, count: int) -> list[int]:
    """At most `count` of the numbers below `total`, evenly spread."""
    return sorted({round(i) for i in torch.linspace(0, total - 1, min(count, total)).tolist()})


def renormalisation(model: Any, teacher: Any) -> Callable[[Tensor], Tensor] | None:
    """A function from images [B, C, H, W] normalised for a model to images normalised for its teacher.

    None if both expect the same, or if one does not say what it expects.
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
