"""Arrays of small images, which stay in memory and are augmented on the device."""
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed import rank_and_world
from ..settings import one_line
from .preprocessing import count_held_out, data_config, labels_by_name

__all__ = ['ArrayLoader', 'array_classes', 'array_images', 'array_loaders']

LARGEST = 100_000  # names of classes


def array_loaders(
        path: str | Path,
        model: Any,
        *,
        batch_size: int = 64,
        held_out: float = 0.1,
        padding: int = 4,
        flip: float = 0.5,
        reprob: float = 0.,
        limit: int | None = None,
        seed: int = 0,
        any_classes: bool = False,
) -> tuple['ArrayLoader', 'ArrayLoader', 'ArrayLoader']:
    """Make batches for training, validation and testing from images that stay in memory, on the model's device.

    Args:
        path: .npz with uint8 images x_train and x_test [N, S, S, C] and labels y_train and y_test [N]; S may differ
            from the size that the model takes, and grey images may be [N, S, S]. It may also hold classes, the names of
            the classes; if the model has the same names, the images get its labels.
        model: timm model that will see the images.
        batch_size: Images per batch.
        held_out: Share of the training images held out, taken from the end.
        padding: How far a crop may move, in pixels of the original images.
        flip: Probability of mirroring an image.
        reprob: Probability of erasing a part of an image.
        limit: Use only this many images of each part, for a rehearsal.
        seed: Seed of the image order.
        any_classes: The labels need not be the model's classes; always so for a model without classes.

    Returns:
        Three loaders; the first one shuffles and augments, and gives each of several processes its own part.

    Raises:
        ValueError: The file does not fit the model; the message says what was found.
    """
    keys = ('x_train', 'y_train', 'x_test', 'y_test')
    arrays = _read_arrays(path, keys)
    y, y_test = (_labels(path, arrays[key]) for key in ('y_train', 'y_test'))
    x, x_test = (_images(path, arrays[key], model, len(labels)) for key, labels in (('x_train', y), ('x_test', y_test)))
    highest = max(int(labels.max()) for labels in (y, y_test))
    classes = highest + 1 if any_classes or model.num_classes == 0 else model.num_classes
    names = _names(path, arrays.get('classes'), highest)
    order = None if any_classes else labels_by_name(model, names)
    if highest >= classes or (
            not any_classes and order is None and names is not None and len(names) != classes == model.num_classes):
        has = f'has label {highest}' if names is None else f'names {len(names)} classes'
        raise ValueError(f"'{path}' {has}, but the model has {model.num_classes} classes. Give data whose classes are "
                         f"among the model's, or fine-tune it first: odevit finetune MODEL {path} OUT")
    if order is not None and names is not None:
        y, y_test = (np.asarray(order)[labels] for labels in (y, y_test))
        names = [name for _, name in sorted(zip(order, names, strict=True))]
    split = len(y) - count_held_out(len(y), held_out)
    if split == len(y):
        raise ValueError(f"'{path}' has one image to train on, so none can be held out. Give more.")
    if set(y[split:].tolist()) - set(y[:split].tolist()):
        warnings.warn(f"'{path}' has classes only among its last images, which are held out, as if it were sorted by "
                      'class. Shuffle it.', stacklevel=2)
    parts = ((x[:split], y[:split]), (x[split:], y[split:]), (x_test, y_test))
    train, val, test = (
        ArrayLoader(images[:limit], labels[:limit], model, batch_size, train=i == 0, padding=padding, flip=flip,
                    reprob=reprob, seed=seed, label_names=names)
        for i, (images, labels) in enumerate(parts))
    return train, val, test


def array_classes(path: str | Path) -> int:
    """The number of classes of an .npz: as many as it names, or else its largest label plus 1."""
    arrays = _read_arrays(path, ('y_train', 'y_test'))
    largest = max(int(_labels(path, arrays[key]).max()) for key in ('y_train', 'y_test'))
    names = _names(path, arrays.get('classes'), largest)
    return 1 + largest if names is None else len(names)


def array_images(
        path: str | Path, model: Any, *, batch_size: int = 64, held_out: float = 0.1, seed: int = 0,
) -> tuple['ArrayLoader', 'ArrayLoader']:
    """Make batches of the images x_train of an .npz, with labels 0: to calibrate on (augmented), and held out."""
    images = _images(path, _read_arrays(path, ('x_train',))['x_train'], model)
    split = len(images) - count_held_out(len(images), held_out)
    parts = (images[:split], images[split:]) if split < len(images) else (images, images)
    first, second = (
        ArrayLoader(part, np.zeros(len(part), int), model, min(batch_size, len(part)), train=i == 0, seed=seed)
        for i, part in enumerate(parts))
    return first, second


def _read_arrays(path: str | Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Read arrays from an .npz; sizes are checked before memory is allocated, and nothing is unpickled."""
    try:
        with ZipFile(path) as archive:
            members = {info.filename.removesuffix('.npy'): info for info in archive.infolist()}
            missing = [key for key in keys if key not in members]
            if not missing:
                wanted = [key for key in (*keys, 'classes') if key in members]
                packed, size = os.path.getsize(path), sum(members[key].file_size for key in wanted)
                if size > 100 * packed + 2 ** 27:  # photos compress to a half, black-and-white drawings to a tenth
                    raise ValueError(f'its {packed:,} bytes unpack to {size:,}, which images never do')
                return {key: _read_array(archive, members[key]) for key in wanted}
    except Exception as e:  # a foreign file can raise anything
        raise ValueError(f"'{path}' cannot be read as .npz: {one_line(e)}") from e
    raise ValueError(f"'{path}' has no {missing[0]}; it must hold {', '.join(keys)}.")


def _labels(path: str | Path, labels: Any) -> Any:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not len(labels) or labels.min() < 0:
        raise ValueError(f"'{path}' must hold labels [N], whole numbers from 0; got {labels.dtype} "
                         f'{list(labels.shape)}. If they are [N, 1], use labels.reshape(-1).')
    return labels.astype(np.int64)  # torch takes no big-endian numbers


def _images(path: str | Path, images: Any, model: Any, labels: int | None = None) -> Any:
    """The images [N, S, S, C], of which there are as many as labels."""
    images = images[..., None] if images.ndim == 3 else images
    good = images.ndim == 4 and images.dtype == np.uint8 and 0 not in images.shape and labels in (None, len(images))
    square = images.ndim == 4 and images.shape[1] == images.shape[2]
    if not good or not square or images.shape[3] != model.in_chans:
        other = f' Give such images, or create the model with in_chans={images.shape[3]}.' if good and square else ''
        each, found = ('', '') if labels is None else (' with a label each', f' and {labels} labels')
        raise ValueError(f"'{path}' must hold uint8 images [N, S, S, {model.in_chans}]{each}; got {images.dtype} "
                         f'{list(images.shape)}{found}.{other}')
    return images


def _names(path: str | Path, names: Any, largest: int) -> list[str] | None:
    """The names of the classes, at least one for each label up to the largest; None without names."""
    if names is None:
        return None
    if names.ndim != 1 or names.dtype.kind != 'U' or not largest < len(names) <= LARGEST:
        raise ValueError(f"'{path}' must hold classes, a name for each label from 0 to {largest}; got {names.dtype} "
                         f'{list(names.shape)}.')
    return [str(name) for name in names]


def _read_array(archive: ZipFile, info: ZipInfo) -> Any:
    with archive.open(info) as f:
        major = np.lib.format.read_magic(f)[0]
        read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(f)
        there = info.file_size - f.tell()
    if dtype.hasobject:
        raise ValueError(f'{info.filename} holds Python objects, which are not read')
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != there:
        raise ValueError(f'{info.filename} says that it holds {dtype} {list(shape)}, but it has {there:,} bytes')
    with archive.open(info) as f:
        return np.lib.format.read_array(f, allow_pickle=False)


class ArrayLoader:
    """Batches (images [B, C, H, W], normalised; labels [B]) of uint8 images in memory, augmented on the device.

    The order of the images depends on `set_epoch` and the seed; their augmentation, on torch's global generator. In
    training, an incomplete last batch is dropped.

    Args:
        images: Images [N, S, S, C], uint8.
        labels: Labels [N].
        model: timm model that will see the images; they are kept on its device.
        batch_size: Images per batch of this process.
        train: Shuffle and augment.
        padding, flip, reprob: See `array_loaders`.
        seed: Seed of the image order.
        label_names: Names of the classes, if known.
    """

    def __init__(
            self, images: Any, labels: Any, model: Any, batch_size: int, *, train: bool = False, padding: int = 4,
            flip: float = 0.5, reprob: float = 0., seed: int = 0, label_names: list[str] | None = None,
    ) -> None:
        cfg = data_config(model)
        device = next(model.parameters()).device
        self.images = torch.as_tensor(np.ascontiguousarray(images)).permute(0, 3, 1, 2).contiguous().to(device)
        self.labels = torch.as_tensor(labels).long().to(device)
        self.mean, self.std = (torch.tensor(cfg[key], device=device).view(1, -1, 1, 1) for key in ('mean', 'std'))
        self.size, self.interpolation = cfg['input_size'][1:], cfg['interpolation']
        self.batch_size, self.train = batch_size, train
        self.padding, self.flip, self.reprob = padding, flip, reprob
        self.seed, self.epoch = seed, 0
        self.label_names = label_names

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the images, which depends only on the seed and the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.train:
            return len(self.labels) // (self.batch_size * rank_and_world()[1])
        return math.ceil(len(self.labels) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.indices():
            images = self.images[index]
            yield self.prepare(self.augment(images) if self.train else images), self.labels[index]

    def indices(self) -> Iterator[Tensor]:
        """Yield the indices of the images of each batch."""
        n, (rank, world) = len(self.labels), rank_and_world() if self.train else (0, 1)
        order = torch.arange(n)
        if self.train:  # the same for all processes
            seed = (self.seed * 1_000_003 + self.epoch) % 2 ** 63
            order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        for batch in order.split(self.batch_size * world)[:len(self)]:
            yield batch[rank::world].to(self.labels.device)

    def prepare(self, images: Tensor) -> Tensor:
        """Turn uint8 images [B, C, S, S] into the input [B, C, H, W] that the model expects."""
        pixels = images.float() / 255
        if pixels.shape[-2:] != tuple(self.size):
            mode = self.interpolation if self.interpolation in ('bilinear', 'bicubic') else 'bicubic'
            pixels = F.interpolate(pixels, size=tuple(self.size), mode=mode, antialias=True).clamp(0, 1)
        return (pixels - self.mean) / self.std

    def augment(self, images: Tensor) -> Tensor:
        """Pad and crop, mirror and erase each image [B, C, S, S] at random, independently of the others."""
        B, _, H, W = images.shape
        device, p = images.device, self.padding
        shift = torch.randint(0, 2 * p + 1, (2, B, 1)).to(device)
        rows, cols = shift[0] + torch.arange(H, device=device), shift[1] + torch.arange(W, device=device)
        cols = torch.where((torch.rand(B, 1) < self.flip).to(device), cols.flip(1), cols)
        each = torch.arange(B, device=device)
        out = F.pad(images, (p,) * 4)[each[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
        if self.reprob > 0:
            # a black box of 2 to 33 % of the image, as in timm's RandomErasing; aspect ratio from 1 : 2 to 2 : 1
            area, ratio = torch.empty(B).uniform_(0.02, 0.33), torch.empty(B).uniform_(-0.7, 0.7).exp()
            size = torch.stack([(area * ratio).sqrt() * H, (area / ratio).sqrt() * W]).clamp(min=1.)
            start = torch.rand(2, B) * (torch.tensor([[H], [W]]) - size).clamp_min(0.)
            erased = (torch.rand(B) < self.reprob)[:, None]
            inside = [((torch.arange(n) >= a[:, None]) & (torch.arange(n) < (a + s)[:, None]) & erased).to(device)
                      for n, a, s in zip((H, W), start, size, strict=True)]
            out = out.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)
        return out
