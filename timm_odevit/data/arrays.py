"""Images in memory: those of an .npz, which are augmented on the device, and tensors."""
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed import rank_and_world
from ..settings import one_line
from .preprocessing import check_names, class_names, count_held_out, data_config, dtype_of, labels_by_name

__all__ = ['ArrayLoader', 'augment', 'npz_classes', 'preparation', 'read_npz']

LARGEST = 100_000  # names of classes
KEYS = ('x_train', 'y_train', 'x_test', 'y_test')
Parts = dict[str, tuple[Tensor, Tensor]]


class ArrayLoader:
    """Batches (images [B, C, H, W], normalised; labels [B]) of images in memory.

    In training, the order of the images depends on the seed and the epoch, their augmentation on torch's global
    generator; an incomplete last batch is dropped, and each of several processes has its own part.

    Args:
        images: Images [N, C, S, S].
        labels: Labels [N], on the same device.
        batch_size: Images per batch of this process.
        prepare: Makes of images [B, C, S, S] what a model expects [B, C, H, W].
        augment: Changes images [B, C, S, S] at random in training; None for nothing.
        train: Shuffle and augment.
        seed: Seed of the order.
    """

    def __init__(
            self, images: Tensor, labels: Tensor, batch_size: int, prepare: Callable[[Tensor], Tensor],
            augment: Callable[[Tensor], Tensor] | None = None, *, train: bool = False, seed: int = 0,
    ) -> None:
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.prepare, self.augment = prepare, augment
        self.train, self.seed, self.epoch = train, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the images."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.train:
            return len(self.labels) // (self.batch_size * rank_and_world()[1])
        return math.ceil(len(self.labels) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.indices():
            images = self.images[index]
            yield self.prepare(self.augment(images) if self.train and self.augment else images), self.labels[index]

    def indices(self) -> Iterator[Tensor]:
        """Yield the indices of the images of each batch."""
        order, (rank, world) = torch.arange(len(self.labels)), rank_and_world() if self.train else (0, 1)
        if self.train:  # the same for all processes
            seed = (self.seed * 1_000_003 + self.epoch) % 2 ** 63
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))
        for batch in order.split(self.batch_size * world)[:len(self)]:
            yield batch[rank::world].to(self.labels.device)

    @property
    def count(self) -> int:
        """Number of images."""
        return len(self.labels)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """At most so many random images and their labels, on the CPU."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        index = order[:count].to(self.labels.device)
        return self.prepare(self.images[index]).cpu(), self.labels[index].cpu()

    def sha256(self) -> str:
        """SHA-256 of images and labels."""
        digest = hashlib.sha256()
        for tensor in (self.images, self.labels):
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()


def preparation(model: Any) -> Callable[[Tensor], Tensor]:
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


def augment(images: Tensor, padding: int = 4, flip: float = 0.5, reprob: float = 0.) -> Tensor:
    """Pad and crop, mirror and erase each image [B, C, S, S] at random, independently of the others."""
    B, _, H, W = images.shape
    device, p = images.device, padding
    shift = torch.randint(0, 2 * p + 1, (2, B, 1)).to(device)
    rows, cols = shift[0] + torch.arange(H, device=device), shift[1] + torch.arange(W, device=device)
    cols = torch.where((torch.rand(B, 1) < flip).to(device), cols.flip(1), cols)
    each = torch.arange(B, device=device)
    out = F.pad(images, (p,) * 4)[each[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
    if reprob > 0:
        # a black box of 2 to 33 % of the image, as in timm's RandomErasing; aspect ratio from 1 : 2 to 2 : 1
        area, ratio = torch.empty(B).uniform_(0.02, 0.33), torch.empty(B).uniform_(-0.7, 0.7).exp()
        size = torch.stack([(area * ratio).sqrt() * H, (area / ratio).sqrt() * W]).clamp(min=1.)
        start = torch.rand(2, B) * (torch.tensor([[H], [W]]) - size).clamp_min(0.)
        erased = (torch.rand(B) < reprob)[:, None]
        inside = [((torch.arange(n) >= a[:, None]) & (torch.arange(n) < (a + s)[:, None]) & erased).to(device)
                  for n, a, s in zip((H, W), start, size, strict=True)]
        out = out.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)
    return out


def read_npz(path: Path, model: Any, labels: bool, share: float, any_classes: bool) -> tuple[Parts, Any, int]:
    """The images [N, C, S, S] and labels [N] of each part of an .npz, on the model's device; its classes; their number.

    The images held out are the last ones of x_train. Without `labels`, only x_train is used, and labels are 0.

    Raises:
        ValueError: The file does not fit the model; the message says what was found.
    """
    arrays = _read_arrays(path, KEYS if labels else KEYS[:1])
    names, classes = None, 0
    if not labels:
        x = _images(path, arrays['x_train'], model)
        parts = {'train': (x, np.zeros(len(x), int))}
    else:
        y, y_test = (_labels(path, arrays[key]) for key in ('y_train', 'y_test'))
        x, x_test = (_images(path, arrays[f'x_{part}'], model, len(of))
                     for part, of in (('train', y), ('test', y_test)))
        highest = max(int(y.max()), int(y_test.max()))
        names = _names(path, arrays.get('classes'), highest)
        classes = (highest + 1 if names is None else len(names)) if any_classes else model.num_classes
        order = None if any_classes else labels_by_name(model, names)
        if highest >= classes or (order is None and names is not None and len(names) != classes):
            has = f'has label {highest}' if names is None else f'names {len(names)} classes'
            raise ValueError(f"'{path}' {has}, but the model has {model.num_classes} classes. Give data whose classes "
                             f"are among the model's, or fine-tune it first: odevit finetune MODEL {path} OUT")
        if order is not None:
            y, y_test, names = np.asarray(order)[y], np.asarray(order)[y_test], class_names(model)
        parts = {'train': (x, y), 'test': (x_test, y_test)}
    x, y = parts['train']
    split = len(y) - count_held_out(len(y), share)
    if labels and share and split == len(y):
        raise ValueError(f"'{path}' has one image to train on, so none can be held out. Give more.")
    if set(y[split:].tolist()) - set(y[:split].tolist()):
        warnings.warn(f"'{path}' has classes only among its last images, which are held out, as if it were sorted by "
                      'class. Shuffle it.', stacklevel=2)
    if share:
        first = split % len(y)  # one image is in both
        parts = {**parts, 'train': (x[:split], y[:split]), 'val': (x[first:], y[first:])}
    device = next(model.parameters()).device
    return {part: (torch.as_tensor(np.ascontiguousarray(x)).permute(0, 3, 1, 2).contiguous().to(device),
                   torch.as_tensor(y).long().to(device)) for part, (x, y) in parts.items()}, names, classes


def npz_classes(path: str | Path) -> tuple[list[str] | None, int]:
    """The names of the classes of an .npz, if it has them, and their number, or else its largest label plus 1."""
    arrays = _read_arrays(path, ('y_train', 'y_test'))
    largest = max(int(_labels(path, arrays[key]).max()) for key in ('y_train', 'y_test'))
    names = _names(path, arrays.get('classes'), largest)
    return names, 1 + largest if names is None else len(names)


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
