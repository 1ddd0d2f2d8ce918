"""Images in memory: those of an .npz, which are augmented on the device, and tensors."""
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from ..convert.svd_data import check_images
from ..distributed import rank_and_world
from ..settings import one_line
from .config import Reading
from .preprocessing import check_names, class_names, count_held_out, data_config, dtype_of, labels_by_name

__all__ = ['ArrayLoader', 'checked_labels', 'npz_classes', 'read_npz', 'read_tensors']

KEYS = ('x_train', 'y_train', 'x_test', 'y_test')


class ArrayLoader:
    """Batches (images [B, C, H, W], labels [B]) of images in memory [N, C, S, S] and their labels [N].

    `prepare` makes of a batch what the model expects. In training, the order depends only on the seed and the epoch,
    `augment` draws from torch's global generator, an incomplete last batch is dropped, and each of several processes
    has its own part.
    """

    def __init__(
            self, images: Tensor, labels: Tensor, batch_size: int, prepare: Callable[[Tensor], Tensor],
            augment: Callable[[Tensor], Tensor] | None = None, *, train: bool = False, seed: int = 0,
    ) -> None:
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.prepare, self.augment = prepare, augment
        self.count, self.train, self.seed, self.epoch = len(labels), train, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the images."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.train:
            return self.count // (self.batch_size * rank_and_world()[1])
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.indices():
            images = self.images[index]
            yield self.prepare(self.augment(images) if self.train and self.augment else images), self.labels[index]

    def indices(self) -> Iterator[Tensor]:
        """Yield the indices of the images of each batch."""
        order, (rank, world) = torch.arange(self.count), rank_and_world() if self.train else (0, 1)
        if self.train:  # the same for all processes
            seed = (self.seed * 1_000_003 + self.epoch) % 2 ** 63
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))
        for batch in order.split(self.batch_size * world)[:len(self)]:
            yield batch[rank::world].to(self.labels.device)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """At most so many random images and their labels, on the CPU."""
        index = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))[:count].to(self.labels.device)
        return self.prepare(self.images[index]).cpu(), self.labels[index].cpu()

    def sha256(self) -> str:
        """SHA-256 of images and labels."""
        digest = hashlib.sha256()
        for tensor in (self.images, self.labels):
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()


def _loaders(parts: dict[str, tuple[Tensor, Tensor]], prepare: Any, change: Any, to: Reading) -> dict[str, Any]:
    """A loader of each part, and 'plain' of the training images in order."""
    parts = {part: (images[:to.limit], labels[:to.limit]) for part, (images, labels) in parts.items()}
    loaders = {part: ArrayLoader(*pair, to.config.batch_size, prepare) for part, pair in parts.items()}
    train = ArrayLoader(*parts['train'], to.config.batch_of(loaders['train'].count), prepare, change, train=True,
                        seed=to.seed)
    return {**loaders, 'plain': loaders['train'], 'train': train}


def read_tensors(images: Tensor, labels: Any, to: Reading) -> tuple[dict[str, Any], None, int]:
    """The loaders of images [N, C, H, W] and labels [N], which are not augmented; no names; the number of classes."""
    check_images(images)
    number = 0 if to.any_classes else to.model.num_classes
    used = checked_labels(labels, len(images), number) if to.labels else torch.zeros(len(images), dtype=torch.long)
    used, parts = used.to(images.device), {'train': torch.arange(len(images), device=images.device)}
    if to.share:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(to.seed)).to(images.device)
        held = count_held_out(len(images), to.share)
        parts = {'train': order[held:], 'val': order[:held or None]}  # a single image is in both
    dtype = dtype_of(to.model)
    loaders = _loaders({part: (images[i], used[i]) for part, i in parts.items()}, lambda x: x.to(dtype), None, to)
    return loaders, None, (number or int(used.max()) + 1) if to.labels else 0


def checked_labels(labels: Tensor, count: int, classes: int = 0) -> Tensor:
    """Labels [N] in int64; raises ValueError unless they are whole numbers from 0, below the number of classes."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f'labels must be whole numbers [N], one for each image; got {labels.dtype} '
                         f'{list(labels.shape)}. Of one-hot labels [N, classes], give labels.argmax(dim=1).')
    if len(labels) != count:
        raise ValueError(f'Each image needs one label; got {count} images and {len(labels)} labels.')
    wrong = labels[(labels < 0) | (labels >= (classes or math.inf))]
    if len(wrong):
        known = f'the {classes} classes of the model are 0 to {classes - 1}' if classes else 'labels begin at 0'
        raise ValueError(f'There is a label {int(wrong[0])}, but {known}. Give labels of these classes.')
    return labels.long()


def _preparation(model: Any) -> Callable[[Tensor], Tensor]:
    """Makes of uint8 images [B, C, S, S] the input [B, C, H, W] that a model expects."""
    cfg, device = data_config(model), next(model.parameters()).device
    mean, std = (torch.tensor(cfg[key], device=device).view(1, -1, 1, 1) for key in ('mean', 'std'))
    size, mode, dtype = tuple(cfg['input_size'][1:]), cfg['interpolation'], dtype_of(model)

    def prepare(images: Tensor) -> Tensor:
        pixels = images.float() / 255
        if pixels.shape[-2:] != size:
            pixels = F.interpolate(pixels, size=size, mode=mode if mode == 'bilinear' else 'bicubic',
                                   antialias=True).clamp(0, 1)
        return ((pixels - mean) / std).to(dtype)
    return prepare


def _augment(images: Tensor, padding: int = 4, flip: float = 0.5, reprob: float = 0.) -> Tensor:
    """Pad and crop, mirror and erase each image [B, C, S, S] at random, independently of the others."""
    B, _, H, W = images.shape
    device = images.device
    shift = torch.randint(0, 2 * padding + 1, (2, B, 1)).to(device)
    rows, cols = shift[0] + torch.arange(H, device=device), shift[1] + torch.arange(W, device=device)
    cols = torch.where((torch.rand(B, 1) < flip).to(device), cols.flip(1), cols)
    each = torch.arange(B, device=device)[:, None, None]
    out = F.pad(images, (padding,) * 4)[each, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
    return RandomErasing(reprob, device=device)(out) if reprob else out


def read_npz(path: Path, to: Reading) -> tuple[dict[str, Any], list[str] | None, int]:
    """The loaders of an .npz, the names of its classes, and their number; the last of x_train are held out."""
    arrays = _read_arrays(path, KEYS if to.labels else KEYS[:1])
    names, classes, model = None, 0, to.model
    if not to.labels:
        x = _images(path, arrays['x_train'], model)
        parts = {'train': (x, np.zeros(len(x), int))}
    else:
        y, y_test = (_labels(path, arrays[key]) for key in ('y_train', 'y_test'))
        x, x_test = (_images(path, arrays[key], model, len(of)) for key, of in (('x_train', y), ('x_test', y_test)))
        highest = max(int(y.max()), int(y_test.max()))
        names = _names(path, arrays.get('classes'), highest)
        classes = (highest + 1 if names is None else len(names)) if to.any_classes else model.num_classes
        order = None if to.any_classes else labels_by_name(model, names)
        if highest >= classes or (order is None and names is not None and len(names) != classes):
            has = f'has label {highest}' if names is None else f'names {len(names)} classes'
            raise ValueError(f"'{path}' {has}, but the model has {classes} classes. Give data whose classes are among "
                             f"the model's, or fine-tune it first: odevit finetune MODEL {path} OUT")
        if order is not None:
            y, y_test, names = np.asarray(order)[y], np.asarray(order)[y_test], class_names(model)
        parts = {'train': (x, y), 'test': (x_test, y_test)}
    x, y = parts['train']
    if to.share:
        split = len(y) - count_held_out(len(y), to.share)
        if to.labels and split == len(y):
            raise ValueError(f"'{path}' has one image to train on, so none can be held out. Give more.")
        first = split % len(y)  # without labels, a single image is in both
        if set(y[first:].tolist()) - set(y[:split].tolist()):
            warnings.warn(f"'{path}' has classes only among its last images, which are held out, as if it were sorted "
                          'by class. Shuffle it.', stacklevel=4)
        parts.update(train=(x[:split], y[:split]), val=(x[first:], y[first:]))
    device = next(model.parameters()).device
    tensors = {part: (torch.as_tensor(np.ascontiguousarray(x)).permute(0, 3, 1, 2).contiguous().to(device),
                      torch.as_tensor(y).long().to(device)) for part, (x, y) in parts.items()}
    options = {key: of for key in ('padding', 'flip', 'reprob') if (of := getattr(to.config, key)) is not None}
    return _loaders(tensors, _preparation(model), partial(_augment, **options), to), names, classes


def npz_classes(path: str | Path) -> tuple[list[str] | None, int]:
    """The names of the classes of an .npz, if it has them, and their number, or else its largest label plus 1."""
    arrays = _read_arrays(path, ('y_train', 'y_test'))
    highest = max(int(_labels(path, arrays[key]).max()) for key in ('y_train', 'y_test'))
    names = _names(path, arrays.get('classes'), highest)
    return names, 1 + highest if names is None else len(names)


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
    if names.ndim != 1 or names.dtype.kind != 'U' or not largest < len(names) <= 100_000:
        raise ValueError(f"'{path}' must hold classes, a name for each label from 0 to {largest}; got {names.dtype} "
                         f'{list(names.shape)}.')
    check_names(list(map(str, names)), f"'{path}'")
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


# doors of before, until nobody uses them

def array_loaders(path, model, *, batch_size=64, held_out=0.1, padding=None, flip=None, reprob=0., limit=None, seed=0,
                  any_classes=False):
    from importlib import import_module
    config = import_module('timm_odevit.data.config').DataConfig(
        batch_size=batch_size, padding=padding, flip=flip, reprob=reprob)
    data = import_module('timm_odevit.data.read').read_data(
        path, model, config, held_out=held_out, limit=limit, seed=seed, any_classes=any_classes)
    for loader in (data.train, data.val, data.test):
        loader.label_names = None if data.classes is None else list(data.classes)
    return data.train, data.val, data.test


def array_classes(path):
    return npz_classes(path)[1]


def array_images(path, model, *, batch_size=64, held_out=0.1, seed=0):
    from importlib import import_module
    data = import_module('timm_odevit.data.read').read_data(
        path, model, import_module('timm_odevit.data.config').DataConfig(batch_size=batch_size), labels=False,
        held_out=held_out, seed=seed)
    return data.train, data.val
