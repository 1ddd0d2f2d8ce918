"""The one door to images: `read_data` makes a Data of a folder, an .npz, tensors or a loader."""
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..settings import one_line
from .arrays import checked_labels, npz_classes, read_npz, read_tensors
from .batches import Mapped, mixed, top_class, unlabelled
from .config import DataConfig, Reading
from .folders import folder_classes, folder_parts, image_files, read_folder
from .preprocessing import class_names, open_image

__all__ = ['Data', 'Pictures', 'classes_of', 'pictures', 'read_data']


@dataclass(frozen=True, eq=False)
class Data:
    """Images in loaders of batches (images [B, C, H, W], normalised for a model and in its dtype; labels [B]).

    Attributes:
        train: Images to train on, shuffled and augmented, or None; `set_epoch` of data.batches tells it the epoch.
            Labels are probabilities [B, classes] if the config mixes.
        val: Images held out of training, in order and as they are; None for none.
        test: Images kept for the final number, x_test or test/, in order and as they are; None for none.
        classes: Names of the classes, in the order of the labels; None if they are not known.
        num_classes: Number of classes; 0 if labels mean nothing.
        labelled: Whether the labels are the model's classes.
        why: Why they are not, in a sentence; '' if they are.
        unaugmented: The images of `train` in order and as they are.
        words: What a part that a model can be evaluated on is, such as 'x_test of data.npz'.
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
        loader = {'train': self.unaugmented, 'val': self.val, 'test': self.test}[part]
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
        """A loader of the images to evaluate on, and what they are in words: val, else test, else all of them.

        Raises:
            ValueError: There are only images to train on.
        """
        part = 'val' if self.val is not None else 'test' if self.test is not None else 'train'
        if part not in self.words:
            raise ValueError(f"'{self.words['']}' has train/ but no val/ or test/ to evaluate on. Give the folder that "
                             'holds the classes, or the share that was held out of training (held_out, --held-out).')
        return self.plain(part), self.words[part]

    def labelled_by(self, model: Any) -> 'Data':
        """The same images with the classes that a model gives them as labels, so that accuracy is agreement with it."""
        parts = {part: loader and Mapped(loader, top_class(model)) for part, loader in vars(self).items()
                 if part in ('train', 'val', 'test', 'unaugmented')}
        names = class_names(model)
        return replace(self, **parts, classes=names and tuple(names), num_classes=model.num_classes, labelled=True,
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

    If the model's classes have names and the data names some of them, images get the model's labels. Otherwise, there
    must be as many classes, in the same order (that of folders is the alphabet's).

    Args:
        source: One of
            - a folder with one sub-folder of images per class, of each of which a share is held out; or one with
              train/, val/ or test/ of that kind (see `folder_parts`). Without labels, any folder; of one with train/,
              only that;
            - an .npz with uint8 images x_train and x_test [N, S, S, C] and labels y_train and y_test [N], of which the
              last of x_train are held out; without labels, x_train is enough. S may differ from the size that the model
              takes; grey images may be [N, S, S]. It may hold classes, the names of the classes;
            - images [N, C, H, W] normalised for the model, or a pair of such and labels [N]; they are not augmented;
            - a loader with a length, of batches of images or (images, labels), of which nothing is held out;
            - a Data, which is returned as it is.
        model: timm model that will see the images.
        config: Batch size, augmentation and so on; None for the defaults.
        labels: True: they must be the model's classes. False: they are ignored. None: they are used if they are the
            model's classes, or else ignored; `why` says why.
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
    for name, kinds in dict(padding='npz', flip='npz', auto_augment='folder', workers='folder').items():
        if getattr(config, name) is not None and kind not in (kinds, 'loader'):
            what = dict(npz=f"an .npz, whose images are augmented on the device ('{source}')", pair='tensors',
                        folder=f"a folder of images ('{source}')", images='tensors')[kind]
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
            raise
        why = one_line(e)
    return replace(_read(source, kind, to), why=why)


def _kind(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        if not Path(source).exists():
            raise ValueError(f"There is no '{source}'. Give a folder with one sub-folder of images per class, a folder "
                             'with train/ and val/ folders of that kind, or an .npz of small images.')
        return 'folder' if Path(source).is_dir() else 'npz'
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
    loaders: dict[str, Any]
    names, classes, whole, words = None, 0, 'the images', {'train': 'the images'}
    if kind == 'folder':
        loaders, names, classes = read_folder(Path(source), to)
        folders = folder_parts(source)
        whole = str(folders.get('train', source))
        words = ({'': str(source)} if set(folders) == {'train'} else
                 {part: str(path) for part, path in folders.items() if part != 'train'} or {'train': whole})
    elif kind == 'npz':
        loaders, names, classes = read_npz(Path(source), to)
        whole, words = f'x_train of {source}', {'test': f'x_test of {source}', 'train': f'x_train of {source}'}
    elif kind == 'loader':
        batches = Mapped(source) if to.labels else Mapped(source, unlabelled)
        loaders = {'train': batches, 'plain': batches}
    elif kind == 'images' and to.labels:
        raise ValueError('Got images without labels. Give a pair (images, labels).')
    else:
        loaders, names, classes = read_tensors(*(source if kind == 'pair' else (source, None)), to)
    if to.labels and to.config.mixes and kind != 'loader' and 'train' in loaders:
        loaders['train'] = mixed(loaders['train'], classes, to.config)
    labelled = to.labels and not to.any_classes
    why = '' if labelled else 'any classes are allowed' if to.labels else 'they are ignored'
    return Data(loaders.get('train'), loaders.get('val'), loaders.get('test'), names and tuple(names), classes,
                labelled, why, loaders.get('plain'),
                {'val': f'the share {to.share:g} held out of training of {whole}', **words})


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
    path, known = Path(path), class_names(model)
    if path.is_file() and path.suffix.lower() != '.npz':
        raise ValueError(f"'{path}' is a file. Give the folder that it is in, or an .npz of small images.")
    if path.is_file():
        data = read_data(path, model, held_out=0.)
        names, chosen = known or data.classes, _spread(data.test.count, count)
        return Pictures(data.test.prepare(data.test.images[chosen]), [f'{path.name} {i}' for i in chosen],
                        names and [names[int(data.test.labels[i])] for i in chosen])
    if not path.is_dir():
        raise ValueError(f"There is no folder '{path}'. Give a folder of images, or an .npz of small images.")
    files = image_files(path)
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
