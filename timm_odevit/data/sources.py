"""Where images come from: folders of files, and .npz files; and what of them is held out."""
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import get_img_extensions
from torch import Tensor

from ..hooks import described
from ..settings import one_line
from .preprocessing import check_labels, check_names

_SUFFIXES = (*get_img_extensions(), *'.webp .bmp .tif .tiff .gif .avif .jfif .ppm .pgm .heic .heif'.split())
Part = tuple[Any, Tensor]  # images: paths of files, or a tensor [N, ...]; and their labels [N]
# the parts of a data set, by the names of their folders
_PARTS = {'train': 'train', 'training': 'train', 'test': 'test',
          **dict.fromkeys('val valid validation eval evaluation'.split(), 'val')}


def read_folder(root: Path, training: bool, others: bool) -> tuple[dict[str, Part], list[str]]:
    """The parts of a folder, with labels of its own, and the names of its classes.

    Without training, only that to evaluate on, and that to train on if the `others` are wanted, too.
    """
    folders = folder_parts(root) or {'train': root}
    if training and 'train' not in folders:
        raise ValueError(f"'{root}' has {next(iter(folders.values())).name}/ but no train/. Give a folder with both.")
    first = next(part for part in ('val', 'test', 'train') if part in folders)
    parts: dict[str, Part] = {}
    names: list[str] = []
    for part in ('train', 'val', 'test') if training else ('train', first) if others else (first,):
        if part not in folders:
            continue
        folder = folders[part]
        files, labels, own = files_in(folder)
        if part == 'test' and names and own != names:  # often without labels
            continue
        if own[0] == '' and not (others and len(own) == 1):
            file = os.path.basename(files[labels.argmin()])
            raise ValueError(f"'{folder}' holds images that are in no class folder, such as {file}, but labels are "
                             'needed. Make a sub-folder for each class.')
        check_names(own, folder)
        names = names or own
        if own != names:
            raise ValueError(f"The folders of '{root}' have different classes. Only one of them has "
                             f"{', '.join(sorted({*own} ^ {*names})[:5])}. To evaluate without the training images, "
                             f"give '{folders[first]}'.")
        parts[part] = files, labels
    return parts, names


def folder_parts(root: str | Path) -> dict[str, Path]:
    """The parts of a data set, by 'train', 'val' and 'test'; no parts if the folder holds the classes itself.

    Parts are called as in _PARTS and hold a folder for each class; a class that holds images may be called so, too.
    ValueError if that is not clear.
    """
    found = next((folders for _, folders, _ in os.walk(root)), [])  # asks no file what it is
    folders = [child for child in (Path(root, name) for name in sorted(found) if name[0] != '.')
               if any(names for _, names in _walk(child))]
    named = [child for child in folders if child.name.lower() in _PARTS]
    of_classes = [child for child in named if not next(_walk(child))[1]]
    if not of_classes and len(named) < max(2, len(folders)):
        return {}
    parts = {_PARTS[child.name.lower()]: child for child in named}
    if not of_classes or len(parts) < len(named) or (len(of_classes) == 1 and len(named) < len(folders)):
        raise ValueError(f"'{root}' has {', '.join(f'{child.name}/' for child in folders[:5])}: it is not clear which "
                         f"are parts and which are classes. Give one part, such as '{named[0]}', or rename classes.")
    return parts


def files_in(folder: Path) -> tuple[list[str], Tensor, list[str]]:
    """All images of a folder, their labels [N], and the names of their classes: those of their folders, '' for itself.

    They are in timm's order (natural_key); where it takes names for equal, such as '1' and '01', these decide.
    """
    found = [(os.path.join(of, name), os.path.basename(of) if of != str(folder) else '')
             for of, names in _walk(folder) for name in names]
    if not found:
        raise ValueError(f"There are no images in '{folder}' ({', '.join(_SUFFIXES)}). Give a folder with "
                         'one sub-folder of images per class.')
    found.sort(key=lambda of: _natural(of[0]))
    classes = sorted({name for _, name in found}, key=_natural)
    numbers = {name: i for i, name in enumerate(classes)}
    return [file for file, _ in found], torch.tensor([numbers[name] for _, name in found]), classes


def _natural(name: str) -> Any:
    return [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', name.lower())], name  # '①' is no int


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder once, with the names of its images; hidden ones do not count."""
    def stop(error: OSError) -> None:
        raise error
    seen = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, onerror=stop, followlinks=True):
        paths = {name: os.path.join(folder, name) for name in folders if not name.startswith('.')}
        folders.clear()
        for name in sorted(paths, key=lambda name: (os.path.islink(paths[name]), name)):  # links come last
            if (real := os.path.realpath(paths[name])) not in seen:
                seen.add(real)
                folders.append(name)
        yield folder, [name for name in files if name.lower().endswith(_SUFFIXES) and not name.startswith('.')]


def read_npz(
        path: str | Path, channels: int | None, labelled: bool, any_classes: bool, training: bool,
) -> tuple[dict[str, Part], list[str] | None, int]:
    """By part, images [N, C, S, S], if channels are given, and labels [N]; names of the classes; their number, or 0."""
    x, y = {}, {}
    try:
        with np.load(path) as archive:  # unpickles nothing
            labelled = labelled and not (any_classes and channels and 'y_train' not in archive)
            both = ('train', 'test') if 'x_test' in archive or (labelled and 'y_test' in archive) else ('train',)
            for part in both if training or any_classes or not labelled else both[-1:]:
                if channels:
                    x[part] = torch.as_tensor(archive[f'x_{part}'])
                if labelled:
                    y[part] = _labels(archive[f'y_{part}'])
                else:
                    own = None
                    with suppress(KeyError, TypeError, ValueError):  # there are none, or a pickle
                        own = _labels(archive[f'y_{part}'])
                    y[part] = groups(own, len(x[part]))
            names = archive['classes'] if labelled and 'classes' in archive else None
    except KeyError as e:
        raise ValueError(f"'{path}': {e.args[0]}") from e
    except Exception as e:  # a foreign file can raise anything
        raise ValueError(f"'{path}' cannot be read as .npz: {one_line(e)}") from e
    for part, images in x.items():
        images = images[..., None] if images.ndim == 3 else images
        size = images.shape[1:2]
        if images.dtype != torch.uint8 or images.shape[1:] != (*size, *size, channels) or not images.numel():
            raise ValueError(f"'{path}' must hold uint8 images x_{part} [N, S, S, {channels}]; got "
                             f'{described(images)}. Give such images, or a model with another in_chans.')
        x[part] = images.permute(0, 3, 1, 2)
    parts = {part: (x.get(part), checked_labels(labels, len(x.get(part, labels)))) for part, labels in y.items()}
    number = 1 + max(int(labels.max()) for _, labels in parts.values())
    if names is None:
        return parts, None, number * labelled
    if names.ndim != 1 or names.dtype.kind != 'U' or len(names) < number:
        raise ValueError(f"'{path}' must hold classes, a name for each label from 0 to {number - 1}; got {names.dtype} "
                         f'{list(names.shape)}.')
    check_names(names.tolist(), path)
    return parts, names.tolist(), len(names)


def _labels(array: Any) -> Tensor:
    return torch.as_tensor(array[:, 0] if array.shape[1:] == (1,) else array)  # [N, 1]: of Keras


def checked_labels(labels: Any, count: int, classes: int | None = None) -> Tensor:
    """Labels of so many images [N] in int64, or ValueError."""
    if not isinstance(labels, Tensor) or labels.shape != (count,) or not count or labels.dtype == torch.bool or (
            labels.is_floating_point() or labels.is_complex()):
        raise ValueError('labels must be whole numbers [N], one for each image (of one-hot labels, '
                         f'labels.argmax(dim=1)); got {count} images and {described(labels)}.')
    return check_labels(labels, classes)


def groups(labels: Tensor | None, count: int) -> Tensor:
    """Numbers [N] of classes by labels that are only to choose what is held out; all 0 if they are no classes."""
    none = torch.zeros(count, dtype=torch.long)
    if labels is None or labels.shape != (count,) or labels.is_floating_point() or labels.is_complex():
        return none
    found, numbers = labels.cpu().long().unique(return_inverse=True)
    return numbers if len(found) < count else none


def divided(part: Part, share: float, groups: Tensor | None = None) -> tuple[Part, Part]:
    """A part without the images held out, and those: of each class, those whose hash is below the share.

    An image's hash, a number from 0 to 1, depends on its content alone: what one command holds out, each other does
    that holds out as much or more. Of each class, one image at least is in the first part, and one in the other if
    it has several. `groups` [N] take the place of the classes.
    """
    images, labels = part
    groups = labels.cpu() if groups is None else groups
    hashes = torch.tensor([*map(_hash, images.cpu() if isinstance(images, Tensor) else images)])
    held = hashes < share
    for index in groups.argsort(stable=True).split(groups.bincount().tolist()):
        order = index[hashes[index].argsort()]
        held[order[:1]] = True
        held[order[-1:]] = False
    if len(labels) == 1:
        return part, part
    if not held.any():
        raise ValueError('Each class has one image, so none can be held out. Give more images, or a val/.')
    return taken(part, (~held).nonzero()[:, 0]), taken(part, held.nonzero()[:, 0])


def _hash(image: Tensor | str) -> float:
    """SHA-256 of an image in memory, or of a file's size and first 64 kB (.bmp, .tif: all of it), from 0 to 1."""
    if isinstance(image, Tensor):
        content = image.contiguous().view(torch.uint8).numpy().tobytes()
    else:
        try:
            with open(image, 'rb') as file:
                whole = image.lower().endswith(('.bmp', '.tif', '.tiff'))
                content = b'%d' % os.fstat(file.fileno()).st_size + file.read(-1 if whole else 2 ** 16)
        except OSError:  # it counts as one that cannot be read
            content = b''
    return int.from_bytes(hashlib.sha256(content).digest()[:6], 'big') / 2 ** 48


def taken(part: Part, index: Tensor) -> Part:
    images, labels = part
    return images[index] if isinstance(images, Tensor) else [images[i] for i in index.tolist()], labels[index]
