"""The one door to images: `read_data` makes a Data of a folder, an .npz, tensors or a loader."""
import hashlib
import os
import re
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from ..hooks import check_images
from ..settings import one_line
from .batches import ArrayLoader, DataConfig, FileLoader, Mapped, is_pair, mixed, training_loader, unlabelled
from .preprocessing import cfg_of, class_names, dtype_of, labels_for, preparation, warn_of_other_classes
from .sources import Part, checked_labels, divided, files_in, folder_parts, groups, read_folder, read_npz, taken

_APPLIES = {'padding': 'npz', 'flip': 'npz', 'workers': 'folder', 'reprob': 'npz, folder', **dict.fromkeys(
    ('mixup', 'cutmix', 'smoothing'), 'npz, folder, images, pair')}


@dataclass(frozen=True, eq=False)
class Data:
    """Images in loaders of batches (images [B, C, H, W], normalised for a model and in its dtype; labels [B])."""
    train: Any  # shuffled and augmented; if the config mixes, labels are probabilities [B, classes]
    unaugmented: Any  # the images of `train` in order and as they are
    val: Any  # held out of training; None if nothing is
    test: Any  # for the final number: x_test, test/ or None
    classes: tuple[str, ...] | None  # names, in the order of the labels, if they are known
    num_classes: int  # 0 if labels mean nothing
    labelled: bool  # whether the labels are the model's classes
    words: dict[str, str]  # by part, what it is, such as 'x_test of data.npz'
    why: str = ''  # why they are not the model's classes, if that was the question
    held_out: float = 0.  # share of the images to train on held out for `val`

    def plain(self, part: str = 'train') -> Any:
        return self.unaugmented if part == 'train' else getattr(self, part)

    def count(self, part: str = 'train') -> int:
        return self.plain(part).count

    def sample(self, part: str, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """At most `count` random images [N, C, H, W] that can be read, and their labels [N], on the CPU."""
        return self.plain(part).sample(count, seed)

    def evaluated(self) -> tuple[Any, str]:
        """A loader, and what its images are in words: val, else test, else all of them."""
        part = 'val' if self.val is not None else 'test' if self.test is not None else 'train'
        return self.plain(part), self.words[part]

    def sha256(self) -> str:
        """Of all images and labels in memory, or of the names, sizes and labels of all files."""
        hashes = [loader.sha256() for loader in (self.unaugmented, self.val, self.test) if loader is not None]
        return hashlib.sha256(' '.join(hashes).encode()).hexdigest()


def read_data(
        source: Any, model: Any, config: DataConfig | None = None, *, labels: bool | None = True,
        held_out: float | None = None, limit: int | None = None, seed: int = 0, any_classes: bool = False,
        judging: float = 0.,
) -> Data:
    """Make loaders of images for a model; raises ValueError if the images or labels do not fit it.

    The source is one of
    - a folder with a sub-folder of images per class, or with train/, val/ or test/ of that kind (see `folder_parts`);
      without labels, any folder, or its train/;
    - an .npz with uint8 images x_train and maybe x_test [N, S, S, C] or [N, S, S]; labels y_train and y_test [N]; and
      maybe classes, their names. Without labels, x_train is enough;
    - images [N, C, H, W] normalised for the model, or a pair of such and labels [N], which are not augmented;
    - a loader with a length, of batches of images or (images, labels), of which nothing is held out.

    Classes that are called as some of the model's get its labels. Others must be as many (without names, at most as
    many), in the same order (folders: 2 before 10, whatever the case), unless `any_classes`. If `labels` is None, they
    are ignored where they do not fit, and of a loader; if False, always. `held_out` 0 evaluates a model, or trains on
    all; `judging` is the share, of all images, of which some held out are the test images if there are none (half of a
    val/). `limit` is the number of images of each part.
    """
    if isinstance(source, Data):
        return source
    config, kind = config or DataConfig(), _kind(source)
    share = config.held_out if held_out is None else held_out
    any_classes = any_classes or not getattr(model, 'num_classes', 0)
    for name, where in _APPLIES.items():
        if getattr(config, name) != getattr(DataConfig(), name) and kind not in where:
            raise ValueError(f'data.{name} does not apply to this source, a {kind}, only to a {where}. '
                             'Leave it out.')
    if labels is None and not any_classes:
        again = partial(read_data, source, model, config, held_out=share, limit=limit, seed=seed, judging=judging)
        if kind == 'loader':
            return again(labels=False)
        try:
            return again()
        except ValueError as e:
            why = 'there are none' if kind == 'images' else one_line(e)
        if kind == 'pair':
            checked_labels(source[1], len(source[0]))  # of other classes, they are ignored
        return replace(again(labels=False), why=why)
    labels, fits = bool(labels), bool(labels) and not any_classes
    if kind == 'loader':
        if limit is not None:
            raise ValueError('limit does not apply to a loader. Give fewer batches.')
        batches = Mapped(source) if labels else Mapped(source, unlabelled)
        return Data(batches, batches, None, None, None, 0, fits, {'train': 'the images'})
    parts, names, number, words = _parts(source, kind, model, labels, share > 0, any_classes)
    order = labels_for(model, names, number, source) if fits else None
    split = share > 0 and 'val' not in parts
    if split:
        parts['train'], parts['val'] = divided(parts['train'], share)
        words['val'] = f"the share {share:g} held out of training of {words['train']}"
    if judging and 'test' not in parts:
        if labels and kind == 'folder' and 'test' in folder_parts(source):
            warnings.warn(f"The test/ of '{source}' is not used: its classes differ.", RuntimeWarning, stacklevel=3)
        labels_of = parts['val'][1]
        parts['val'], parts['test'] = divided(parts['val'], judging if split else 0.5, torch.zeros_like(labels_of))
    if order is not None:
        names = class_names(model)
        parts = {part: (images, torch.tensor(order)[own]) for part, (images, own) in parts.items()}
    if limit is not None:
        for part, of in parts.items():
            count = len(of[1])
            parts[part] = taken(of, torch.linspace(0, count - 1, min(limit, count)).round().long().unique())
    number = 0 if not labels else number if any_classes else model.num_classes
    train: Any = None
    loaders: dict[str, Any]
    if kind == 'folder':
        samples = {part: list(zip(files, own.tolist(), strict=True)) for part, (files, own) in parts.items()}
        if 'train' in samples:
            train = training_loader(samples['train'], model, config, seed)
        loaders = {part: FileLoader(of, model, config) for part, of in samples.items()}
    else:
        dtype = dtype_of(model)
        prepare, augment = (lambda images: images.to(dtype)), None
        if kind == 'npz':
            device, prepare = next(model.parameters()).device, preparation(model)
            parts = {part: (images.contiguous().to(device), own) for part, (images, own) in parts.items()}
            augment = partial(_augment, padding=config.padding, flip=config.flip, reprob=config.reprob)
        parts = {part: (images, own.to(images.device)) for part, (images, own) in parts.items()}
        if 'train' in parts:
            train = ArrayLoader(*parts['train'], config.batch_of(len(parts['train'][1])), prepare, augment, seed)
        loaders = {part: ArrayLoader(*of, config.batch_size, prepare) for part, of in parts.items()}
    if config.mixes and train is not None:
        train = mixed(train, max(1, number), config)
    return Data(train, loaders.get('train'), loaders.get('val'), loaders.get('test'), tuple(names) if names else None,
                number, fits, words, held_out=share if split else 0.)


def with_test(data: Data, source: Any, model: Any, config: DataConfig | None = None) -> Data:
    """With those images of another source, in any form that `read_data` takes, that would evaluate a model."""
    own = not data.labelled and data.num_classes > 0  # classes that are not the model's
    other = read_data(source, model, config, labels=data.labelled or own, held_out=0., any_classes=own)
    differ, named = other.classes != data.classes, data.classes and other.classes
    if (own and (differ or not other.num_classes)) or (data.labelled and named and differ):
        raise ValueError(f"'{source}' does not have the classes of the other images. Give the same, in this order.")
    if data.labelled:
        warn_of_other_classes(model, other.classes, source)
    loader, words = other.evaluated()
    return replace(data, test=loader, words={**data.words, 'test': words})


NOTE = 'held out of training, by hash: '  # a model's note of the share


def held_out_of(model: Any) -> float | None:
    """The share that the training of a model held out by hash, if that is known."""
    notes = map(str, cfg_of(model).get('notes') or ())
    return next((float(note[len(NOTE):]) for note in notes if re.fullmatch(NOTE + r'\d(\.\d+)?(e-\d+)?', note)), None)


def _kind(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        if not os.path.exists(source):
            raise ValueError(f"There is no '{source}'. Give a folder of images, or an .npz of small ones.")
        if os.path.isfile(source) and not str(source).lower().endswith('.npz'):
            raise ValueError(f"'{source}' is a file. Give the folder that it is in, or an .npz.")
        return 'folder' if os.path.isdir(source) else 'npz'
    if not hasattr(source, '__len__') or (hasattr(source, '__array__') and not isinstance(source, Tensor)):
        raise ValueError('Give a folder, an .npz, images [N, C, H, W], a pair of these and labels, or a '
                         f'loader with a length; got {type(source).__name__}.')
    return 'images' if isinstance(source, Tensor) else 'pair' if is_pair(source) else 'loader'


def _parts(
        source: Any, kind: str, model: Any, labelled: bool, training: bool, any_classes: bool,
) -> tuple[dict[str, Part], list[str] | None, int, dict[str, str]]:
    """The parts, with labels of the data's own; the names of its classes; their number; the parts in words."""
    if kind == 'npz':
        found = read_npz(source, getattr(model, 'in_chans', None), labelled, any_classes, training)
        return *found, {part: f'x_{part} of {source}' for part in found[0]}
    if kind == 'folder':
        folders = folder_parts(source) or {'train': source}
        words = {part: str(path) for part, path in folders.items()}
        if labelled:
            parts, names = read_folder(Path(source), training, any_classes)
            return parts, names, len(names), {part: words[part] for part in parts}
        parts = {}
        for part in ('train', 'test') if {'train', 'test'} <= {*folders} else ('train',):
            files, places, _ = files_in(Path(folders.get(part, source)))
            parts[part] = files, groups(places, len(files))
        return parts, None, 0, {'train': str(source), **words}
    images, labels = source if kind == 'pair' else (source, None)
    check_images(images)
    if not labelled:
        labels = groups(labels, len(images))
    labels = checked_labels(labels, len(images), None if any_classes or not labelled else model.num_classes).cpu()
    return {'train': (images, labels)}, None, int(labels.max()) + 1, {'train': 'the images'}


def _augment(images: Tensor, padding: int, flip: float, reprob: float) -> Tensor:
    """Pad and crop, mirror and erase each image [B, C, S, S] at random, independently of the others."""
    B, _, H, W = images.shape
    device = images.device
    shift = torch.randint(0, 2 * padding + 1, (2, B, 1)).to(device)
    rows, cols = shift[0] + torch.arange(H, device=device), shift[1] + torch.arange(W, device=device)
    cols = torch.where((torch.rand(B, 1) < flip).to(device), cols.flip(1), cols)
    each = torch.arange(B, device=device)[:, None, None]
    out = F.pad(images, (padding,) * 4)[each, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2).contiguous()
    return RandomErasing(reprob, device=device)(out) if reprob else out


def classes_of(source: Any) -> tuple[list[str] | None, int]:
    """Names, if known, and number, for a model that does not exist yet."""
    kind = _kind(source)
    if kind == 'loader':
        raise ValueError('The number of classes of a loader is not known. Give num_classes.')
    return _parts(source, kind, None, labelled=True, training=True, any_classes=True)[1:3]
