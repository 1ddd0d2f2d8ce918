"""The one door to images: `read_data` makes a Data of a folder, an .npz, tensors or a loader."""
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..convert.svd_data import check_images
from ..settings import one_line
from .arrays import ArrayLoader, augment, npz_classes, preparation, read_npz
from .batches import Mapped, mixed, top_class, unlabelled
from .config import DataConfig
from .folders import FileLoader, folder_classes, folder_parts, image_files, read_folder, training_loader
from .preprocessing import class_names, count_held_out, dtype_of, open_image

__all__ = ['Data', 'Pictures', 'classes_of', 'pictures', 'read_data']

_SETTINGS = {  # those that only some kinds of data have
    'folder': ('a folder of images', ('auto_augment', 'workers')),
    'npz': ('an .npz, whose images are augmented on the device', ('padding', 'flip')),
}


@dataclass(frozen=True, eq=False)
class Data:
    """Images in loaders of batches (images [B, C, H, W], normalised for a model and in its dtype; labels [B]).

    Attributes:
        train: Images to train on, shuffled and augmented, or None. It has `set_epoch`, or its sampler has, if its order
            depends on the epoch; labels are probabilities [B, classes] if the config mixes.
        val: Images held out of training, in order and as they are; None for none.
        test: Images kept for the final number, in order and as they are: x_test or test/; None for none.
        classes: Names of the classes, in the order of the labels; None if they are not known.
        num_classes: Number of classes; 0 if labels mean nothing.
        labelled: Whether the labels are the model's classes.
        why: Why they are not, in a sentence; '' if they are.
        unaugmented: The images of `train` in order and as they are.
        words: What each part is that a model can be evaluated on, such as 'x_test of data.npz'.
    """
    train: Any
    val: Any
    test: Any
    classes: tuple[str, ...] | None
    num_classes: int
    labelled: bool
    why: str
    unaugmented: Any = None
    words: dict[str, str] = field(default_factory=dict)

    def plain(self, part: str = 'train') -> Any:
        """A loader of a part's images ('train', 'val' or 'test') in order, not augmented.

        Raises:
            ValueError: There is no such part.
        """
        loader = {'train': self.unaugmented, 'val': self.val, 'test': self.test}[part]
        if loader is None:
            raise ValueError(f'The data has no {part} images.')
        return loader

    def count(self, part: str = 'train') -> int:
        """The number of images of a part."""
        return int(self.plain(part).count)

    def sample(self, part: str, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """At most `count` random images of a part [N, C, H, W] that can be read, and their labels [N], on the CPU."""
        return self.plain(part).sample(count, seed)  # type: ignore[no-any-return]

    def evaluated(self) -> tuple[Any, str]:
        """A loader of the images to evaluate on, and what they are in words: val, else test, else all of them.

        Raises:
            ValueError: There are only images to train on.
        """
        part = next(part for part in ('val', 'test', 'train') if part == 'train' or getattr(self, part) is not None)
        if part not in self.words:
            raise ValueError(f"'{self.words['']}' has train/ but no val/ or test/ to evaluate on. Give the folder that "
                             'holds the classes, or the share that was held out of training (held_out, --held-out).')
        return self.plain(part), self.words[part]

    def labelled_by(self, model: Any) -> 'Data':
        """The same images with the classes that a model gives them as labels, so that accuracy is agreement with it."""
        change = top_class(model)
        loaders = {name: None if (loader := getattr(self, name)) is None else Mapped(loader, change)
                   for name in ('train', 'val', 'test', 'unaugmented')}
        names = class_names(model)
        return replace(self, **loaders, classes=None if names is None else tuple(names), num_classes=model.num_classes,
                       labelled=True, why='')

    def sha256(self) -> str:
        """SHA-256 of all images and labels in memory, or of the names, sizes and labels of all files."""
        loaders = [loader for loader in (self.unaugmented, self.val, self.test) if loader is not None]
        return hashlib.sha256(' '.join(loader.sha256() for loader in loaders).encode()).hexdigest()


def read_data(
        source: Any, model: Any, config: DataConfig | None = None, *, labels: bool | None = True,
        held_out: float | None = None, limit: int | None = None, seed: int = 0, any_classes: bool = False,
) -> Data:
    """Make loaders of images for a model.

    Args:
        source: One of
            - a folder with one sub-folder of images per class; a share of each class is held out;
            - a folder with train/ and val/ or test/ of that kind (see `folder_parts` for other names). Without val/, a
              share of train/ is held out;
            - without labels, any folder of images or of folders of images; of one with train/, only that;
            - an .npz with uint8 images x_train and x_test [N, S, S, C] and labels y_train and y_test [N], of which the
              last of x_train are held out; without labels, x_train is enough. S may differ from the size that the model
              takes; grey images may be [N, S, S]. It may hold classes, the names of the classes;
            - images [N, C, H, W] normalised for the model; or a pair of such and labels [N]; not augmented;
            - a loader with a length, of batches of images or (images, labels); nothing is held out;
            - a Data, which is returned as it is.
            If the model's classes have names and the data names some of them, images get the model's labels. Otherwise
            there must be as many classes, in the same order (that of folders is the alphabet's).
        model: timm model that will see the images.
        config: Batch size, augmentation and so on; None for the defaults.
        labels: True: they must be the model's classes. False: they are ignored. None: they are used if they are the
            model's classes, or else ignored; `why` says why.
        held_out: Share of the training images held out, if there is no val/; None for config.held_out. 0 for none:
            where a model is only evaluated, or all images are to be trained on.
        limit: Use only this many images of each part, of folders from all classes in turn, for a rehearsal.
        seed: Seed of the choice of the images held out (folders, tensors), and of the order of training.
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
    kind = _kind(source, config)
    if kind in ('folder', 'npz'):
        read = partial(_read_path, Path(source), kind, model, config, share, limit, seed, any_classes)
    elif kind == 'loader':
        read = partial(_read_loader, source)
    else:
        read = partial(_read_tensors, source, kind, model, config, share, limit, seed, any_classes)
    if labels is not None:
        return read(labels)
    why = ("the model's outputs are embeddings" if any_classes else 'there are none' if kind == 'images'
           else 'what the labels of a loader mean is not known' if kind == 'loader' else '')
    if not why and kind != 'pair':
        try:
            return read(True)
        except ValueError as e:
            why = one_line(e)
    return replace(read(False), why=why) if why else read(True)


def _kind(source: Any, config: DataConfig) -> str:
    if isinstance(source, (str, os.PathLike)):
        if not Path(source).exists():
            raise ValueError(f"There is no '{source}'. Give a folder with one sub-folder of images per class, a folder "
                             'with train/ and val/ folders of that kind, or an .npz of small images.')
        kind = 'folder' if Path(source).is_dir() else 'npz'
    elif isinstance(source, Tensor):
        kind = 'images'
    elif (isinstance(source, (tuple, list)) and len(source) == 2
            and all(isinstance(part, Tensor) for part in source) and source[1].ndim < 4):
        kind = 'pair'
    elif hasattr(source, '__len__') and hasattr(source, '__iter__') and not hasattr(source, 'dtype'):
        return 'loader'
    else:
        raise ValueError('images must be a folder, an .npz, a tensor [N, C, H, W], a pair of such and labels, or a '
                         f'loader with a length; got {type(source).__name__}.')
    for other, (_, names) in _SETTINGS.items():
        for name in names:
            if other != kind and getattr(config, name) is not None:
                what = f"{_SETTINGS[kind][0]} ('{source}')" if kind in _SETTINGS else 'tensors'
                raise ValueError(f'data.{name} does not apply to {what}. Leave it out.')
    return kind


def _read_path(
        path: Path, kind: str, model: Any, config: DataConfig, share: float, limit: int | None, seed: int,
        any_classes: bool, labels: bool,
) -> Data:
    loaders: dict[str, Any]
    if kind == 'npz':
        arrays, names, classes = read_npz(path, model, labels, share, any_classes)
        options = {name: value for name in ('padding', 'flip') if (value := getattr(config, name)) is not None}
        change = partial(augment, reprob=config.reprob, **options)
        loaders = _array_loaders(arrays, preparation(model), change, config, limit, seed)
        words = {'test': f'x_test of {path}', 'train': f'x_train of {path}'}
        whole = words['train']
    else:
        files, names, classes = read_folder(path, model, labels, share, limit, seed, any_classes)
        loaders = {part: FileLoader(samples, model, config) for part, samples in files.items()}
        if 'train' in files:
            loaders['unaugmented'] = loaders['train']
            loaders['train'] = training_loader(files['train'], model, config, seed)
        folders = folder_parts(path)
        words = {part: str(folder) for part, folder in folders.items() if part != 'train'} or {'train': str(path)}
        if set(folders) == {'train'}:
            words = {'': str(path)}
        whole = str(folders.get('train', path))
    return _data(loaders, {'val': f'the share {share:g} held out of training of {whole}', **words}, names, classes,
                 model, config, labels, any_classes)


def _read_tensors(
        source: Any, kind: str, model: Any, config: DataConfig, share: float, limit: int | None, seed: int,
        any_classes: bool, labels: bool,
) -> Data:
    if labels and kind == 'images':
        raise ValueError('Got images without labels. Give a pair (images, labels).')
    images, given = (source, None) if kind == 'images' else source
    check_images(images)
    used = _checked(given, len(images), 0 if any_classes else model.num_classes) if labels else torch.zeros(
        len(images), dtype=torch.long)
    order = torch.arange(len(images))
    arrays = {'train': (images, used.to(images.device))}
    if share:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        held = count_held_out(len(images), share)
        arrays = {part: (images[i.to(images.device)], used[i.to(used.device)].to(images.device))
                  for part, i in (('train', order[held:]), ('val', order[:held or None]))}  # a single image does both
    dtype = dtype_of(model)
    loaders = _array_loaders(arrays, lambda images: images.to(dtype), None, config, limit, seed)
    words = {'val': f'the share {share:g} held out of the images', 'train': 'the images'}
    classes = (int(used.max()) + 1 if any_classes else model.num_classes) if labels else 0
    return _data(loaders, words, None, classes, model, config, labels, any_classes)


def _checked(labels: Tensor, count: int, classes: int) -> Tensor:
    """Labels [N] in int64, which must be whole numbers from 0, and below the number of classes if there are any."""
    if len(labels.shape) != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f'labels must be whole numbers [N], one for each image; got {labels.dtype} '
                         f'{list(labels.shape)}. Of one-hot labels [N, classes], give labels.argmax(dim=1).')
    if len(labels) != count:
        raise ValueError(f'Each image needs one label; got {count} images and {len(labels)} labels.')
    wrong = labels[(labels < 0) | (labels >= classes)] if classes else labels[labels < 0]
    if len(wrong):
        known = f'the {classes} classes of the model are 0 to {classes - 1}' if classes else 'labels begin at 0'
        raise ValueError(f'There is a label {int(wrong[0])}, but {known}. Give labels of these classes.')
    return labels.long()


def _read_loader(loader: Any, labels: bool) -> Data:
    batches = Mapped(loader) if labels else Mapped(loader, unlabelled)
    return Data(batches, None, None, None, 0, labels, '', batches, {'train': 'the images'})


def _array_loaders(
        arrays: dict[str, tuple[Tensor, Tensor]], prepare: Any, change: Any, config: DataConfig, limit: int | None,
        seed: int,
) -> dict[str, Any]:
    arrays = {part: (images[:limit], labels[:limit]) for part, (images, labels) in arrays.items()}
    loaders = {part: ArrayLoader(*pair, config.batch_size, prepare) for part, pair in arrays.items()}
    loaders['unaugmented'] = loaders['train']
    images, labels = arrays['train']
    loaders['train'] = ArrayLoader(
        images, labels, config.batch_of(len(labels)), prepare, change, train=True, seed=seed)
    return loaders


def _data(
        loaders: dict[str, Any], words: dict[str, str], names: Sequence[str] | None, classes: int, model: Any,
        config: DataConfig, labels: bool, any_classes: bool,
) -> Data:
    train = loaders.get('train')
    if train is not None and labels and config.mixes:
        train = mixed(train, classes, config)
    why = '' if labels and not any_classes else 'the classes of the data need not be those of the model'
    return Data(train, loaders.get('val'), loaders.get('test'), None if names is None else tuple(names), classes,
                not why, why if labels else 'they are ignored', loaders.get('unaugmented'), words)


def classes_of(source: Any) -> tuple[list[str] | None, int]:
    """The names of the classes of some data, if known, and their number, for a model that does not exist yet."""
    if isinstance(source, (str, os.PathLike)):
        if Path(source).is_file():
            return npz_classes(source)
        names = folder_classes(source)
        return names, len(names)
    if _kind(source, DataConfig()) != 'pair':
        raise ValueError(f'The number of classes of {type(source).__name__} is not known. Give a pair of images and '
                         'labels, a folder or an .npz, or model_args.num_classes in the recipe.')
    return None, int(_checked(source[1], len(source[0]), 0).max()) + 1


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
        of = data.test
        chosen = _spread(of.count, count)
        names = known or data.classes
        return Pictures(of.prepare(of.images[chosen]), [f'{path.name} {i}' for i in chosen],
                        None if names is None else [names[int(of.labels[i])] for i in chosen])
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
