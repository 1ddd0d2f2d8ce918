"""Image files: one by one, as a data set, and a few to look at."""
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import ImageDataset, create_transform, is_img_extension
from torch import Tensor
from torch.utils.data import DataLoader

from ..settings import one_line
from .arrays import array_loaders
from .preprocessing import class_names, data_config, image_mode

__all__ = ['EvaluationLoader', 'ImageFiles', 'Pictures', 'class_names', 'model_name', 'open_image', 'read_image',
           'some_images']

_UNREADABLE = -1  # the label of an image file that cannot be read
_logger = logging.getLogger(__name__)


def read_image(file: str | Path, mode: str) -> Image.Image:
    """An image file in Pillow's mode 'L', 'RGB' or 'RGBA', turned upright; 16 bits are scaled to 8.

    Raises:
        ValueError: The file cannot be read as an image, or its pixels are numbers without a known range.
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


class ImageFiles(ImageDataset):
    """timm's data set of a folder, whose files are read by `read_image`.

    The next readable image takes the place of one that cannot be read. It keeps its label to train on; otherwise its
    label is -1, by which an EvaluationLoader leaves it out.
    """
    training = False

    def __getitem__(self, index: int) -> tuple[Any, int]:
        samples = self.reader.samples
        for i in (*range(index, len(samples)), *range(index)):
            file, label = samples[i]
            try:
                image = read_image(file, self.input_img_mode)
            except ValueError as e:
                _logger.warning(str(e))
                continue
            return self.transform(image), label if i == index or self.training else _UNREADABLE
        raise ValueError(f"None of the images in '{self.reader.root}' can be read.")


class EvaluationLoader(DataLoader):
    """A DataLoader of ImageFiles in order, without the images that cannot be read: a warning says how many."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private class
        files: Any = self.dataset
        unreadable: list[int] = []
        for i, (images, labels) in enumerate(super().__iter__()):
            good = labels != _UNREADABLE
            unreadable += [i * int(self.batch_size or 1) + int(j) for j in (~good).nonzero()]
            yield (images, labels) if good.all() else (images[good], labels[good])
        if unreadable:
            first = files.reader.samples[unreadable[0]][0]
            warnings.warn(f'{len(unreadable)} of {len(files)} images cannot be read and are left out, such as '
                          f"'{first}'.", RuntimeWarning, stacklevel=2)


class Pictures(NamedTuple):
    """Images, normalised for a model [B, C, H, W], their names, and the names of their classes, if they are known."""
    images: Tensor
    names: list[str]
    classes: list[str] | None


def open_image(file: str | Path, model: Any) -> Tensor:
    """An image file as a model expects it [C, H, W].

    Raises:
        ValueError: The file cannot be read as an image, or the model takes other images.
    """
    transform: Any = create_transform(**data_config(model), is_training=False)
    return transform(read_image(file, image_mode(model)))


def model_name(model: Any) -> str:
    """The timm name of a model with the tag of its weights, or else the name of its class."""
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    name = cfg.get('architecture') or type(model).__name__
    if name == 'odevit_converted':  # the tag is that of the base
        return str(name)
    return f"{name}.{cfg['tag']}" if cfg.get('tag') else name


def some_images(path: str | Path, model: Any, count: int) -> Pictures:
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
    return Pictures(images.to(next(model.parameters()).device),
                    [os.fsencode(file.relative_to(path)).decode(errors='replace') for file in files],
                    labels if known is not None and set(labels) <= set(known) else None)


def _spread(total: int, count: int) -> list[int]:
    return sorted({round(i) for i in torch.linspace(0, total - 1, min(count, total)).tolist()})
