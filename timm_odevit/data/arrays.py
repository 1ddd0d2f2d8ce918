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

from ..distributed import rank_and_world
from ..hooks import check_images
from ..settings import one_line
from .config import Reading
from .preprocessing import check_names, class_names, count_held_out, data_config, dtype_of, labels_by_name, shuffled

__all__ = ['ArrayLoader', 'checked_labels', 'npz_classes', 'read_npz', 'read_tensors']

KEYS = ('y_train', 'x_train', 'y_test', 'x_test')


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
        """The indices of the images of each batch."""
        order, (rank, world) = torch.arange(self.count), rank_and_world() if self.train else (0, 1)
        if self.train:  # the same for all processes
            order = shuffled(self.count, (self.seed * 1_000_003 + self.epoch) % 2 ** 63)
        for batch in order.split(self.batch_size * world)[:len(self)]:
            yield batch[rank::world].to(self.labels.device)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        index = shuffled(self.count, seed)[:count].to(self.labels.device)
        return self.prepare(self.images[index]).cpu(), self.labels[index].cpu()

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for tensor in (self.images, self.labels):
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
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
    used = checked_labels(labels, len(images), number).cpu() if to.labels else torch.zeros(len(images)).long()
    parts = {'train': torch.arange(len(images))}
    if to.share:
        order, held = shuffled(len(images), to.seed), count_held_out(len(images), to.share)
        parts = {'train': order[held:], 'val': order[:held or None]}  # a single image is in both
    dtype = dtype_of(to.model)
    pairs = {part: (images[i.to(images.device)], used[i].to(images.device)) for part, i in parts.items()}
    loaders = _loaders(pairs, lambda x: x.to(dtype), None, to)
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


def read_npz(path: str | Path, to: Reading) -> tuple[dict[str, Any], list[str] | None, int]:
    """The loaders of an .npz, the names of its classes, and their number; the last of x_train are held out."""
    arrays, names, highest = _read_npz(path, KEYS if to.labels else ('x_train',), to.model.in_chans)
    x, classes, order = arrays['x_train'], 0, None
    y = arrays.get('y_train', np.zeros(len(x), int))
    if to.labels:
        classes = to.model.num_classes if not to.any_classes else len(names) if names else highest + 1
        order = None if to.any_classes else labels_by_name(to.model, names)
        if highest >= classes or (order is None and names is not None and len(names) != classes):
            has = f'has label {highest}' if names is None else f'names {len(names)} classes'
            raise ValueError(f"'{path}' {has}, but the model has {classes} classes. Give data whose classes are among "
                             f"the model's, or fine-tune it first: odevit finetune MODEL {path} OUT")
    split = len(y) - count_held_out(len(y), to.share)
    if to.labels and to.share and split == len(y):
        raise ValueError(f"'{path}' has one image to train on, so none can be held out. Give more.")
    if set(y[split:].tolist()) - set(y[:split].tolist()):
        warnings.warn(f"'{path}' has classes only among its last images, which are held out, as if it were sorted by "
                      'class. Shuffle it.', stacklevel=4)
    parts = {'train': (x[:split], y[:split])}
    if to.share:
        first = split % len(y)  # a single image is in both
        parts['val'] = x[first:], y[first:]
    if to.labels:
        parts['test'] = arrays['x_test'], arrays['y_test']
    device = next(to.model.parameters()).device
    labels = torch.arange(highest + 1) if order is None else torch.tensor(order)
    tensors = {part: (torch.as_tensor(np.ascontiguousarray(x)).permute(0, 3, 1, 2).contiguous().to(device),
                      (labels[y] if to.labels else torch.as_tensor(y)).to(device)) for part, (x, y) in parts.items()}
    options = {key: of for key in ('padding', 'flip', 'reprob') if (of := getattr(to.config, key)) is not None}
    loaders = _loaders(tensors, _preparation(to.model), partial(_augment, **options), to)
    return loaders, names if order is None else class_names(to.model), classes


def npz_classes(path: str | Path) -> tuple[list[str] | None, int]:
    """The names of the classes of an .npz, if it has them, and their number, or else its highest label plus 1."""
    _, names, highest = _read_npz(path, ('y_train', 'y_test'))
    return names, len(names) if names else 1 + highest


def _read_npz(
        path: str | Path, keys: tuple[str, ...], channels: int = 0) -> tuple[dict[str, Any], list[str] | None, int]:
    """Arrays of an .npz, images as [N, S, S, C]; the names of its classes, and the highest label.

    Sizes are checked before memory is allocated, and nothing is unpickled.
    """
    try:
        with ZipFile(path) as archive:
            members = {info.filename.removesuffix('.npy'): info for info in archive.infolist()}
            wanted = [key for key in (*keys, *(('classes',) if 'y_train' in keys else ())) if key in members]
            packed, size = os.path.getsize(path), sum(members[key].file_size for key in wanted)
            if size > 100 * packed + 2 ** 27:  # photos compress to a half, black-and-white drawings to a tenth
                raise ValueError(f'its {packed:,} bytes unpack to {size:,}, which images never do')
            arrays = {key: _read_array(archive, members[key]) for key in wanted}
    except Exception as e:  # a foreign file can raise anything
        raise ValueError(f"'{path}' cannot be read as .npz: {one_line(e)}") from e
    highest = 0
    for key in keys:
        if key not in arrays:
            raise ValueError(f"'{path}' has no {key}; it must hold {', '.join(keys)}.")
        array = arrays[key]
        shape, found = list(array.shape), f'{array.dtype} {list(array.shape)}'
        if key[0] == 'y':
            if len(shape) != 1 or array.dtype.kind not in 'iu' or 0 in shape or array.min() < 0:
                raise ValueError(f"'{path}' must hold labels [N], whole numbers from 0; got {found}. If they are "
                                 '[N, 1], use labels.reshape(-1).')
            arrays[key] = array.astype(np.int64)  # torch takes no big-endian numbers
            highest = max(highest, int(array.max()))
            continue
        arrays[key] = array = array[..., None] if len(shape) == 3 else array
        labels = arrays.get(f'y{key[1:]}')
        images = (array.ndim == 4 and array.dtype == np.uint8 and 0 not in shape and array.shape[1] == array.shape[2]
                  and (labels is None or len(labels) == len(array)))
        if not images or array.shape[3] != channels:
            other = f' Give such images, or create the model with in_chans={array.shape[3]}.' if images else ''
            each, of = ('', '') if labels is None else (' with a label each', f' and {len(labels)} labels')
            raise ValueError(f"'{path}' must hold uint8 images [N, S, S, {channels}]{each}; got {array.dtype} "
                             f'{list(array.shape)}{of}.{other}')
    names = arrays.get('classes')
    if names is None:
        return arrays, None, highest
    if names.ndim != 1 or names.dtype.kind != 'U' or not highest < len(names) <= 100_000:
        raise ValueError(f"'{path}' must hold classes, a name for each label from 0 to {highest}; got {names.dtype} "
                         f'{list(names.shape)}.')
    check_names(names.tolist(), f"'{path}'")
    return arrays, names.tolist(), highest


def _read_array(archive: ZipFile, info: ZipInfo) -> Any:
    with archive.open(info) as f:
        major = np.lib.format.read_magic(f)[0]
        read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(f)
        size = info.file_size - f.tell()
    if dtype.hasobject:
        raise ValueError(f'{info.filename} holds Python objects, which are not read')
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f'{info.filename} says that it holds {dtype} {list(shape)}, but it has {size:,} bytes')
    with archive.open(info) as f:
        return np.lib.format.read_array(f, allow_pickle=False)
