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
from .arrays import checked_labels, npz_classes, read_npz, read_tensors
from .batches import Mapped, mixed, top_class, unlabelled
from .config import DataConfig, Reading
from .folders import files_in, folder_classes, folder_parts, read_folder
from .preprocessing import class_names, open_image

__all__ = ['Data', 'Pictures', 'classes_of', 'pictures', 'read_data']


@dataclass(frozen=True, eq=False)
class Data:
    """Images in loaders of batches (images [B, C, H, W], normalised for a model and in its dtype; labels [B]).

    Attributes:
        train: Images to train on, shuffled and augmented; `set_epoch` tells it the epoch. If the config mixes, labels
            are probabilities [B, classes]. This and the next two are None if there are none.
        val: Images held out of training, in order and as they are.
        test: Images for the final number, x_test or test/, in order and as they are.
        classes: Names of the classes, in the order of the labels; None if they are not known.
        num_classes: Number of classes; 0 if labels mean nothing.
        labelled: Whether the labels are the model's classes.
        why: Why they are not; '' if they are.
        unaugmented: The images of `train` in order and as they are.
        words: By part, what it is, such as 'x_test of data.npz', if a model can be evaluated on it.
    """
    train: Any
    val: Any
    test: Any
    classes: tuple[str, ...] | None
    num_classes: int
    labelled: bool
    why: str
    unaugmented: Any
    words: dict[str, str]

    def plain(self, part: str = 'train') -> Any:
        """A loader of the images of 'train', 'val' or 'test' in order, not augmented; ValueError if there are none."""
        loader = self.unaugmented if part == 'train' else getattr(self, part)
        if loader is None:
            raise ValueError(f'The data has no {part} images.')
        return loader

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
        if part not in self.words:
            raise ValueError('The data has train/ but no val/ or test/ to evaluate on. Give the folder that holds the '
                             'classes, or the share that was held out of training (held_out, --held-out).')
        return self.plain(part), self.words[part]

    def labelled_by(self, model: Any) -> 'Data':
        """The same images with the classes that a model gives them as labels, so that accuracy is agreement with it."""
        change, names = top_class(model), class_names(model)
        loaders = {part: None if (loader := getattr(self, part)) is None else Mapped(loader, change)
                   for part in ('train', 'val', 'test', 'unaugmented')}
        return replace(self, **loaders, classes=names and tuple(names), num_classes=model.num_classes, labelled=True,
                       why='')

    def sha256(self) -> str:
        """SHA-256 of all images and labels in memory, or of the names, sizes and labels of all files."""
        hashes = [loader.sha256() for loader in (self.unaugmented, self.val, self.test) if loader is not None]
        return hashlib.sha256(' '.join(hashes).encode()).hexdigest()


def read_data(
        source: Any, model: Any, config: DataConfig | None = None, *, labels: bool | None = True,
        held_out: float | None = None, limit: int | None = None, seed: int = 0, any_classes: bool = False,
) -> Data:
    """Make loaders of images for a model.

    If the data names some of the model's classes, its images get the model's labels. Otherwise, it must have as many
    classes, in the same order (that of folders is the alphabet's).

    Args:
        source: One of
            - a folder with one sub-folder of images per class, a share of each of which is held out; or with train/,
              val/ or test/ of that kind (see `folder_parts`). Without labels, any folder, or its train/;
            - an .npz with uint8 images x_train, the last of which are held out, and x_test [N, S, S, C] or [N, S, S],
              of any size S; labels y_train and y_test [N]; and maybe classes, their names. Without labels, x_train is
              enough;
            - images [N, C, H, W] normalised for the model, or a pair of such and labels [N]; they are not augmented;
            - a loader with a length, of batches of images or (images, labels), of which nothing is held out;
            - a Data, which is returned as it is.
        model: timm model that will see the images.
        config: Batch size, augmentation and so on; None for the defaults.
        labels: True: they must be the model's classes. False: they are ignored. None: they are used if they are the
            model's classes, or else ignored.
        held_out: Share of the training images held out, if there is no val/; None for config.held_out. 0 for none:
            to evaluate a model, or to train on all.
        limit: Use only this many images of each part, of folders from all classes in turn, for a rehearsal.
        seed: Seed of the order of training, and of the choice of the images held out of folders and tensors.
        any_classes: The classes need not be the model's; always so for a model without classes.

    Raises:
        ValueError: The images or labels do not fit the model; the message says what was found and what to do.
    """
    if isinstance(source, Data):
        return source
    config = config or DataConfig()
    any_classes = any_classes or not getattr(model, 'num_classes', 0)
    share = config.held_out if held_out is None else held_out
    if not 0 < share < 1 and held_out != 0:
        raise ValueError(f'The share held out must lie between 0 and 1; got {share!r}.')
    kind = _kind(source)
    for name, where in dict(padding='npz', flip='npz', auto_augment='folder', workers='folder').items():
        if getattr(config, name) is not None and kind != where:
            what = dict(npz=f"an .npz, whose images are augmented on the device ('{source}')",
                        folder=f"a folder of images ('{source}')").get(kind, 'tensors and loaders')
            raise ValueError(f'data.{name} does not apply to {what}. Leave it out.')
    to = Reading(model, config, bool(labels), share, limit, seed, any_classes)
    if labels is not None:
        return _read(source, kind, to)
    why = ("the model's outputs are embeddings" if any_classes else 'there are none' if kind == 'images'
           else 'what the labels of a loader mean is not known' if kind == 'loader' else '')
    try:
        if not why:
            return _read(source, kind, to._replace(labels=True))
    except ValueError as e:
        if kind == 'pair':
            checked_labels(source[1], len(source[0]))  # of other classes, they are ignored
        why = one_line(e)
    return replace(_read(source, kind, to), why=why)


def _kind(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.exists():
            raise ValueError(f"There is no '{path}'. Give a folder with one sub-folder of images per class, a folder "
                             'with train/ and val/ folders of that kind, or an .npz of small images.')
        if path.is_file() and is_img_extension(path.suffix.lower()):
            raise ValueError(f"'{path}' is a file. Give the folder that it is in, or an .npz of small images.")
        return 'folder' if path.is_dir() else 'npz'
    if isinstance(source, Tensor):
        return 'images'
    if isinstance(source, (tuple, list)) and list(map(type, source)) == [Tensor, Tensor] and source[1].ndim < 4:
        return 'pair'
    if hasattr(source, '__len__') and hasattr(source, '__iter__') and not hasattr(source, 'dtype'):
        return 'loader'
    raise ValueError('images must be a folder, an .npz, a tensor [N, C, H, W], a pair of such and labels, or a loader '
                     f'with a length; got {type(source).__name__}.')


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
    elif kind == 'images' and to.labels:
        raise ValueError('Got images without labels. Give a pair (images, labels).')
    else:
        loaders, names, classes = read_tensors(*(source if kind == 'pair' else (source, None)), to)
    words.setdefault('val', f"the share {to.share:g} held out of training of {words.get('train')}")
    if kind == 'folder' and words.get('train') != str(source):
        words.pop('train', None)
    if to.labels and to.config.mixes and kind != 'loader' and 'train' in loaders:
        loaders['train'] = mixed(loaders['train'], classes, to.config)
    why = ('they are ignored', 'any classes are allowed' if to.any_classes else '')[to.labels]
    return Data(*map(loaders.get, ('train', 'val', 'test')), names and tuple(names), classes, not why, why,
                loaders.get('plain'), words)


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
    raise ValueError('The number of classes is known of a folder, an .npz and a pair of images and labels; got '
                     f'{type(source).__name__}. Give one of these, or num_classes.')


class Pictures(NamedTuple):
    """Images, normalised for a model [B, C, H, W], their names, and the names of their classes, if they are known."""
    images: Tensor
    names: list[str]
    classes: list[str] | None


def pictures(path: str | Path, model: Any, count: int) -> Pictures:
    """At most `count` images, spread evenly over a folder and the folders in it, or over x_test of an .npz.

    In folders named like classes of the model, the images are taken to be of these classes.

    Raises:
        ValueError: There are no images, or they do not fit the model; the message says what was found.
    """
    known, device = class_names(model), next(model.parameters()).device
    if _kind(path) == 'npz':
        data = read_data(path, model, held_out=0.)
        names, chosen = known or data.classes, _spread(data.count('test'), count)
        return Pictures(data.test.prepare(data.test.images[chosen]), [f'{Path(path).name} {i}' for i in chosen],
                        names and [names[label] for label in data.test.labels[chosen].tolist()])
    samples, folders = files_in(Path(path))
    samples = [samples[i] for i in _spread(len(samples), count)]
    classes = [folders[label] or Path(path).name for _, label in samples]
    return Pictures(torch.stack([open_image(file, model) for file, _ in samples]).to(device),
                    [os.fsencode(os.path.relpath(file, path)).decode(errors='replace') for file, _ in samples],
                    classes if known is not None and {*classes} <= {*known} else None)


def _spread(total: int, count: int) -> list[int]:
    return sorted({round(i) for i in torch.linspace(0, total - 1, min(count, total)).tolist()})
