"""A few images to look at: files of images, or some of a folder or of an .npz."""
import os
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Union

import torch
from PIL import Image
from timm.data import create_transform, is_img_extension
from torch import Tensor

from ..errors import one_line
from .arrays import array_loaders
from .folders import MODES
from .preprocessing import data_config

__all__ = ['Pictures', 'class_names', 'model_name', 'open_image', 'some_images']


class Pictures(NamedTuple):
    """Images, normalised for a model [B, C, H, W], their names, and the names of their classes, if they are known."""
    images: Tensor
    names: List[str]
    classes: Optional[List[str]]


def open_image(file: Union[str, Path], model: Any) -> Tensor:
    """An image file as a model expects it [C, H, W].

    Raises:
        ValueError: The file cannot be read as an image, or the model takes other images.
    """
    mode = MODES.get(model.in_chans)
    if mode is None:
        raise ValueError(f'Image files are read with 1, 3 or 4 channels (grey, RGB, RGBA), but the model takes '
                         f'{model.in_chans}.')
    transform: Any = create_transform(**data_config(model), is_training=False)
    try:
        with Image.open(file) as image:
            return transform(image.convert(mode))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        raise ValueError(f"'{file}' cannot be read as an image: {one_line(e)}") from None


def class_names(model: Any) -> Optional[List[str]]:
    """The names of a model's classes, if it has them."""
    names: Any = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names')
    good = isinstance(names, (list, tuple)) and len(names) == model.num_classes  # timm allows other forms, too
    return list(map(str, names)) if good else None


def model_name(model: Any) -> str:
    """The timm name of a model with the tag of its weights, or else the name of its class."""
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    name = cfg.get('architecture') or type(model).__name__
    if name == 'odevit_converted':  # the tag is that of the base
        return str(name)
    return f"{name}.{cfg['tag']}" if cfg.get('tag') else name


def some_images(path: Union[str, Path], model: Any, count: int) -> Pictures:
    """At most `count` images, spread evenly over a folder and the folders in it, or over x_test of an .npz.

    In folders named like classes of the model, the images are taken to be of these classes.

    Raises:
        ValueError: There are no images, or they do not fit the model; the message says what was found.
    """
    path, known = Path(path), class_names(model)
    if path.is_file() and path.suffix.lower() != '.npz':
        raise ValueError(f"'{path}' is a file. Give the folder that it is in, or an .npz of small images.")
    if path.is_file():
        test = array_loaders(path, model)[2]
        chosen = _spread(len(test.labels), count)
        names = known or test.label_names
        return Pictures(test.prepare(test.images[chosen]), [f'{path.name} {i}' for i in chosen],
                        None if names is None else [names[int(test.labels[i])] for i in chosen])
    if not path.is_dir():
        raise ValueError(f"There is no folder '{path}'. Give a folder of images, or an .npz of small images.")
    files = sorted(
        Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names
        if is_img_extension(Path(name).suffix.lower()) and '/.' not in f'/{Path(folder, name).relative_to(path)}')
    if not files:
        raise ValueError(f"There are no images in '{path}'. Give a folder of images, or an .npz of small images.")
    files = [files[i] for i in _spread(len(files), count)]
    labels = [file.parent.name for file in files]
    images = torch.stack([open_image(file, model) for file in files])
    device = next(model.parameters()).device
    return Pictures(images.to(device), [os.fsencode(file.relative_to(path)).decode(errors='replace') for file in files],
                    labels if known is not None and set(labels) <= set(known) else None)


def _spread(total: int, count: int) -> List[int]:
    return sorted({round(i) for i in torch.linspace(0, total - 1, min(count, total)).tolist()})
