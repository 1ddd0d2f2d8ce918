"""Where images come from: folders of files, an .npz, which is augmented on the device, and tensors."""
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import is_img_extension
from timm.data.random_erasing import RandomErasing
from timm.utils import natural_key
from torch import Tensor

from ..hooks import check_images
from ..settings import one_line
from .batches import ArrayLoader, FileLoader, Samples, training_loader
from .config import Reading
from .preprocessing import (
    check_names,
    class_names,
    count_held_out,
    data_config,
    dtype_of,
    labels_for,
    shuffled,
    spread,
)

__all__ = ['checked_labels', 'files_in', 'folder_classes', 'folder_parts', 'npz_classes', 'read_folder', 'read_npz',
           'read_tensors']

# the parts of a data set, by the names of their folders
_PARTS = {'train': 'train', 'training': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'eval': 'val',
          'evaluation': 'val', 'test': 'test'}


def read_folder(root: Path, to: Reading) -> tuple[dict[str, Any], list[str] | None, int]:
    """The loaders of a folder's parts, the names of its classes, and their number."""
    names: list[str] | None = None
    if to.labels:
        files, names = _classes_in(root, to)
    else:
        samples, places = files_in(folder_parts(root).get('train', root))
        if len(samples) == len(places):  # each image in a folder of its own
            samples = [(file, 0) for file, _ in samples]
        files = _divided(samples, to)
    if to.limit is not None:
        files = {part: [of[i] for i in spread(len(of), to.limit)] for part, of in files.items()}
    loaders: dict[str, Any] = {part: FileLoader(samples, to.model, to.config) for part, samples in files.items()}
    if 'train' in files:
        loaders.update(plain=loaders['train'], train=training_loader(files['train'], to))
    return loaders, names, len(names or ())


def _classes_in(root: Path, to: Reading) -> tuple[dict[str, Samples], list[str]]:
    """The files of each part that is used, with the model's labels, and the names of the classes."""
    folders = _folders(root, training=to.share > 0)
    first = next(part for part in ('val', 'test', 'train') if part in folders)  # to evaluate on
    used = ('train', 'val', 'test') if to.share else ('train', first) if to.any_classes else (first,)
    files: dict[str, Samples] = {}
    names: list[str] = []
    for part in used:
        if part not in folders:
            continue
        samples, own = files_in(folders[part])
        if part == 'test' and names and own != names:  # often without labels
            continue
        _check_classes(folders[part], samples, own)
        names = names or own
        if own != names:
            raise ValueError(f"The folders of '{root}' have different classes. Only one of them has "
                             f"{', '.join(sorted({*own} ^ {*names})[:5])}. To evaluate without the training images, "
                             f"give '{folders[first]}'.")
        files[part] = samples
    order = None if to.any_classes else labels_for(to.model, names, len(names), root)
    if to.share and 'val' not in folders:
        files.update(_divided(files['train'], to))
    if order is not None:
        files = {part: [(file, order[i]) for file, i in samples] for part, samples in files.items()}
        names = class_names(to.model) or names
    return files, names


def folder_classes(root: str | Path) -> list[str]:
    """The names of the classes that would be trained on, in the order of their labels."""
    folder = _folders(Path(root), training=True)['train']
    samples, names = files_in(folder)
    _check_classes(folder, samples, names)
    return names


def _check_classes(folder: Path, samples: Samples, names: list[str]) -> None:
    if names[0] == '':
        file = next(Path(file).name for file, label in samples if label == 0)
        raise ValueError(f"'{folder}' holds images that are in no class folder, such as {file}. Put them into one.")
    check_names(names, folder)


def _folders(root: Path, training: bool) -> dict[str, Path]:
    folders = folder_parts(root) or {'train': root}
    if training and 'train' not in folders:
        raise ValueError(f"'{root}' has {next(iter(folders.values())).name}/ but no train/. Give a folder with both.")
    return folders


def folder_parts(root: str | Path) -> dict[str, Path]:
    """The parts of a data set, by 'train', 'val' and 'test'; no parts if the folder holds the classes itself.

    Parts are called train, val or test (or training, valid, validation, eval, evaluation) and hold a folder for each
    class; a class that holds images may be called so, too. ValueError if that is not clear.
    """
    folders = [child for child in sorted(Path(root).iterdir())
               if child.is_dir() and not child.name.startswith('.') and any(names for _, names in _walk(child))]
    named = [child for child in folders if child.name.lower() in _PARTS]
    of_classes = [child for child in named if not next(_walk(child))[1]]
    if not of_classes and len(named) < max(2, len(folders)):
        return {}
    parts = {_PARTS[child.name.lower()]: child for child in named}
    if not of_classes or len(parts) < len(named) or (len(of_classes) == 1 and len(named) < len(folders)):
        raise ValueError(f"'{root}' has {', '.join(f'{child.name}/' for child in folders[:5])}: it is not clear which "
                         f"are parts of the data and which are classes. Give one part, such as '{named[0]}', or rename "
                         'those that are classes.')
    return parts


def files_in(folder: Path) -> tuple[Samples, list[str]]:
    """All images of a folder, and the names of the folders that they are in ('' for itself), which are their classes.

    timm's natural_key takes '1' and '01' for equal: then the name decides.
    """
    files = [(os.path.join(of, name), os.path.basename(of) if of != str(folder) else '')
             for of, names in _walk(folder) for name in names]
    if not files:
        raise ValueError(f"There are no images in '{folder}'. Give a folder with one sub-folder of images per class.")
    classes = sorted({name for _, name in files}, key=lambda name: (natural_key(name), name))
    labels = {name: i for i, name in enumerate(classes)}
    return [(file, labels[name]) for file, name in sorted(files, key=lambda of: (natural_key(of[0]), of[0]))], classes


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """A folder and those in it, each once, with the names of their images; hidden ones do not count."""
    seen = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, followlinks=True):
        paths = {name: os.path.join(folder, name) for name in folders if not name.startswith('.')}
        folders.clear()
        for name in sorted(paths, key=lambda name: (os.path.islink(paths[name]), name)):  # links come last
            if (real := os.path.realpath(paths[name])) not in seen:
                seen.add(real)
                folders.append(name)
        yield folder, [name for name in files
                       if is_img_extension(os.path.splitext(name)[1].lower()) and not name.startswith('.')]


def _divided(samples: Samples, to: Reading) -> dict[str, Samples]:
    """The samples to train on, and those held out: a share of each class. One image alone is in both."""
    if not to.share:
        return {'train': samples}
    members: dict[int, Samples] = defaultdict(list)
    for sample in samples:
        members[sample[1]].append(sample)
    parts: dict[str, Samples] = {'train': [], 'val': []}
    for label, of in sorted(members.items()):
        order = shuffled(len(of), to.seed + label).tolist()
        held = count_held_out(len(of), to.share)
        parts['train'] += [of[j] for j in sorted(order[held:])]
        parts['val'] += [of[j] for j in sorted(order[:held])]
    if to.labels and len(samples) > 1 and not parts['val']:
        raise ValueError('Each class has one image, so none can be held out. Give more images, or a val/.')
    return {**parts, 'val': parts['val'] or samples}


def _loaders(parts: dict[str, tuple[Tensor, Tensor]], prepare: Any, augment: Any, to: Reading) -> dict[str, Any]:
    """A loader of each part, and 'plain' of the training images in order."""
    parts = {part: (images[:to.limit], labels[:to.limit]) for part, (images, labels) in parts.items()}
    loaders = {part: ArrayLoader(*pair, to.config.batch_size, prepare) for part, pair in parts.items()}
    train = ArrayLoader(*parts['train'], to.config.batch_of(loaders['train'].count), prepare, augment, train=True,
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


def checked_labels(labels: Any, count: int, classes: int = 0) -> Tensor:
    """Labels [N] in int64; raises ValueError unless they are whole numbers from 0, below the number of classes."""
    found = (f'{labels.numel()} labels, {labels.dtype} {list(labels.shape)}' if isinstance(labels, Tensor)
             else 'no labels')
    if (not isinstance(labels, Tensor) or labels.shape != (count,) or labels.dtype == torch.bool
            or labels.is_floating_point() or labels.is_complex()):
        raise ValueError('labels must be whole numbers [N], one for each image (of one-hot labels, '
                         f'labels.argmax(dim=1)); got {count} images and {found}.')
    labels = labels.long()
    wrong = labels[(labels < 0) | (labels >= (classes or math.inf))]
    if len(wrong):
        known = f'the {classes} classes of the model are 0 to {classes - 1}' if classes else 'labels begin at 0'
        raise ValueError(f'There is a label {int(wrong[0])}, but {known}. Give labels of these classes.')
    return labels


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
    x, y, names, number = _read_npz(path, ('train', 'test') if to.labels else ('train',), to.labels, to.model.in_chans)
    order, count = None, len(x['train'])
    if to.labels and not to.any_classes:
        order, number = labels_for(to.model, names, number, path), to.model.num_classes
    if not to.labels:
        y, number = {'train': torch.zeros(count).long()}, 0
    split = count - count_held_out(count, to.share)
    parts = {**{part: (x[part], y[part]) for part in x}, 'train': (x['train'][:split], y['train'][:split])}
    if to.share:
        first = split % count  # a single image is in both
        parts['val'] = x['train'][first:], y['train'][first:]
        if set(parts['val'][1].tolist()) - set(parts['train'][1].tolist()):
            warnings.warn(f"'{path}' has classes only among its last images, which are held out, as if it were sorted "
                          'by class. Shuffle it.', stacklevel=4)
    device = next(to.model.parameters()).device
    tensors = {part: (images.permute(0, 3, 1, 2).contiguous().to(device),
                      (labels if order is None else torch.tensor(order)[labels]).to(device))
               for part, (images, labels) in parts.items()}
    options = {key: of for key in ('padding', 'flip', 'reprob') if (of := getattr(to.config, key)) is not None}
    loaders = _loaders(tensors, _preparation(to.model), partial(_augment, **options), to)
    return loaders, names if order is None else class_names(to.model), number


def npz_classes(path: str | Path) -> tuple[list[str] | None, int]:
    """The names of the classes of an .npz, if it has them, and their number, or else its highest label plus 1."""
    _, _, names, number = _read_npz(path, ('train', 'test'), True)
    return names, number


def _read_npz(
        path: str | Path, parts: tuple[str, ...], labelled: bool, channels: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str] | None, int]:
    """By part, images [N, S, S, C], read if channels are given, and labels [N]; names of classes and their number."""
    try:
        with np.load(path) as archive:  # which unpickles nothing
            x = {part: torch.as_tensor(archive[f'x_{part}']) for part in parts if channels}
            y = {part: torch.as_tensor(archive[f'y_{part}']) for part in parts if labelled}
            names = archive['classes'] if labelled and 'classes' in archive else None
    except Exception as e:  # a foreign file can raise anything
        raise ValueError(f"'{path}' cannot be read as .npz: {one_line(e)}") from e
    for part, images in x.items():
        x[part] = images = images[..., None] if images.ndim == 3 else images
        size = images.shape[1:2]
        if images.dtype != torch.uint8 or images.shape[1:] != (*size, *size, channels) or not images.numel():
            raise ValueError(f"'{path}' must hold uint8 images x_{part} [N, S, S, {channels}]; got {images.dtype} "
                             f'{list(images.shape)}. Give such images, or a model with another in_chans.')
    y = {part: checked_labels(labels, len(x.get(part, labels))) for part, labels in y.items()}
    number = 1 + max((int(labels.max()) for labels in y.values()), default=-1)
    if names is None:
        return x, y, None, number
    if names.ndim != 1 or names.dtype.kind != 'U' or len(names) < number:
        raise ValueError(f"'{path}' must hold classes, a name for each label from 0 to {number - 1}; got {names.dtype} "
                         f'{list(names.shape)}.')
    check_names(names.tolist(), path)
    return x, y, names.tolist(), len(names)
