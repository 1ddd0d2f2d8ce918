"""The one door to images: `read_data` makes a Data of a folder, an .npz, tensors or a loader."""
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data import is_img_extension
from torch import Tensor

from ..settings import one_line
from .batches import Mapped, is_pair, mixed, unlabelled
from .config import DataConfig, Reading
from .preprocessing import class_names, open_image, spread
from .sources import (
    checked_labels,
    files_in,
    folder_classes,
    folder_parts,
    npz_classes,
    read_folder,
    read_npz,
    read_tensors,
)

__all__ = ['Data', 'Pictures', 'classes_of', 'pictures', 'read_data']


@dataclass(frozen=True, eq=False)
class Data:
    """Images in loaders of batches (images [B, C, H, W], normalised for a model and in its dtype; labels [B])."""
    train: Any  # shuffled and augmented; if the config mixes, labels are probabilities [B, classes]
    val: Any  # held out of training; None if nothing is
    test: Any  # for the final number, x_test or test/; None if there is none
    classes: tuple[str, ...] | None  # names, in the order of the labels, if they are known
    num_classes: int  # 0 if labels mean nothing
    labelled: bool  # whether the labels are the model's classes
    why: str  # why they are not
    unaugmented: Any  # the images of `train` in order and as they are
    words: dict[str, str]  # by part, what it is, such as 'x_test of data.npz'

    def plain(self, part: str = 'train') -> Any:
        """A loader of the images of 'train', 'val' or 'test' in order, not augmented."""
        return self.unaugmented if part == 'train' else getattr(self, part)

    def count(self, part: str = 'train') -> int:
        """The number of images of a part."""
        return int(self.plain(part).count)

    def sample(self, part: str, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """At most `count` random images of a part [N, C, H, W] that can be read, and their labels [N], on the CPU."""
        images, labels = self.plain(part).sample(count, seed)
        return images, labels

    def evaluated(self) -> tuple[Any, str]:
        """A loader of the images to evaluate on, and what they are in words: val, else test, else all of them."""
        part = 'val' if self.val is not None else 'test' if self.test is not None else 'train'
        return self.plain(part), self.words[part]

    def sha256(self) -> str:
        """SHA-256 of all images and labels in memory, or of the names, sizes and labels of all files."""
        hashes = [loader.sha256() for loader in (self.unaugmented, self.val, self.test) if loader is not None]
        return hashlib.sha256(' '.join(hashes).encode()).hexdigest()


def read_data(
        source: Any, model: Any, config: DataConfig | None = None, *, labels: bool | None = True,
        held_out: float | None = None, limit: int | None = None, seed: int = 0, any_classes: bool = False,
) -> Data:
    """Make loaders of images for a model; raises ValueError if the images or labels do not fit it.

    The source is one of
    - a folder with one sub-folder of images per class, a share of each of which is held out; or with train/, val/ or
      test/ of that kind (see `folder_parts`). Without labels, any folder, or its train/;
    - an .npz with uint8 images x_train, the last of which are held out, and x_test [N, S, S, C] or [N, S, S]; labels
      y_train and y_test [N]; and maybe classes, their names. Without labels, x_train is enough;
    - images [N, C, H, W] normalised for the model, or a pair of such and labels [N]; they are not augmented;
    - a loader with a length, of batches of images or (images, labels), of which nothing is held out;
    - a Data, which is returned as it is.

    If it names some of the model's classes, its images get the model's labels. Otherwise, it must have as many classes,
    in the same order (that of folders is the alphabet's), unless `any_classes`. If `labels` is None, they are ignored
    where they do not fit; if False, always. `held_out` 0 evaluates a model, or trains on all. `limit` is the number of
    images of each part, for a rehearsal. `seed` is that of the order, and of what is held out of folders and tensors.
    """
    if isinstance(source, Data):
        return source
    config = config or DataConfig()
    any_classes = any_classes or not getattr(model, 'num_classes', 0)
    kind, share = _kind(source), config.held_out if held_out is None else held_out
    for name, where in dict(padding='npz', flip='npz', auto_augment='folder', workers='folder').items():
        if getattr(config, name) is not None and kind != where:
            raise ValueError(f'data.{name} does not apply to this source, a {kind}, only to a {where}. Leave it out.')
    to = Reading(model, config, bool(labels), share, limit, seed, any_classes)
    if labels is not None:
        return _read(source, kind, to)
    if any_classes:
        why = "the model's outputs are embeddings"
    elif kind in ('images', 'loader'):
        why = 'there are none' if kind == 'images' else 'what the labels of a loader mean is not known'
    else:
        try:
            return _read(source, kind, to._replace(labels=True))
        except ValueError as e:
            why = one_line(e)
        if kind == 'pair':
            checked_labels(source[1], len(source[0]))  # of other classes, they are ignored
    return replace(_read(source, kind, to), why=why)


def _kind(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.exists():
            raise ValueError(f"There is no '{path}'. Give a folder of images, or an .npz of small ones.")
        if path.is_file() and is_img_extension(path.suffix.lower()):
            raise ValueError(f"'{path}' is a file. Give the folder that it is in.")
        return 'folder' if path.is_dir() else 'npz'
    if hasattr(source, '__array__') and not isinstance(source, Tensor):
        raise ValueError('Give a folder, an .npz, a tensor of images [N, C, H, W], a pair of such and labels, or a '
                         f'loader with a length; got {type(source).__name__}.')
    return 'images' if isinstance(source, Tensor) else 'pair' if is_pair(source) else 'loader'


def _read(source: Any, kind: str, to: Reading) -> Data:
    names: list[str] | None
    names, classes, words = None, 0, {'train': 'the images'}
    if kind == 'folder':
        loaders, names, classes = read_folder(Path(source), to)
        words = {part: str(path) for part, path in (folder_parts(source) or {'train': source}).items()}
    elif kind == 'npz':
        loaders, names, classes = read_npz(source, to)
        words = {part: f'x_{part} of {source}' for part in ('train', 'test')}
    elif kind == 'loader':
        batches = Mapped(source) if to.labels else Mapped(source, unlabelled)
        loaders = {'train': batches, 'plain': batches}
    else:
        images, labels = source if kind == 'pair' else (source, None)
        loaders, names, classes = read_tensors(images, labels, to)
    words.setdefault('val', f"the share {to.share:g} held out of training of {words.get('train')}")
    if to.labels and to.config.mixes and kind != 'loader' and 'train' in loaders:
        loaders['train'] = mixed(loaders['train'], classes, to.config)
    why = ('they are ignored', 'any classes are allowed' if to.any_classes else '')[to.labels]
    return Data(loaders.get('train'), loaders.get('val'), loaders.get('test'), tuple(names) if names else None,
                classes, not why, why, loaders.get('plain'), words)


def classes_of(source: Any) -> tuple[list[str] | None, int]:
    """The names of the classes of some data, if known, and their number, for a model that does not exist yet."""
    kind = _kind(source)
    if kind == 'folder':
        names = folder_classes(source)
        return names, len(names)
    if kind == 'npz':
        return npz_classes(source)
    if kind == 'pair':
        return None, int(checked_labels(source[1], len(source[0])).max()) + 1
    raise ValueError(f'The number of classes of a {type(source).__name__} is not known. Give num_classes, or a folder, '
                     'an .npz or a pair of images and labels.')


class Pictures(NamedTuple):
    images: Tensor  # [B, C, H, W], normalised for a model
    names: list[str]
    classes: list[str] | None


def pictures(path: str | Path, model: Any, count: int) -> Pictures:
    """At most `count` images, spread evenly over a folder and the folders in it, or over x_test of an .npz.

    In folders named like classes of the model, the images are taken to be of these classes.
    """
    known, device = class_names(model), next(model.parameters()).device
    if _kind(path) == 'npz':
        data = read_data(path, model, held_out=0.)
        names, chosen = known or list(data.classes or ()), spread(data.count('test'), count)
        return Pictures(data.test.prepare(data.test.images[chosen]), [f'{Path(path).name} {i}' for i in chosen],
                        [names[label] for label in data.test.labels[chosen].tolist()] if names else None)
    samples, folders = files_in(Path(path))
    samples = [samples[i] for i in spread(len(samples), count)]
    classes = [folders[label] or Path(path).name for _, label in samples]
    return Pictures(torch.stack([open_image(file, model) for file, _ in samples]).to(device),
                    [os.fsencode(os.path.relpath(file, path)).decode(errors='replace') for file, _ in samples],
                    classes if known is not None and {*classes} <= {*known} else None)
