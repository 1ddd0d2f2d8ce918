"""Folders of image files."""
import hashlib
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timm.data import create_loader, create_transform, is_img_extension
from timm.utils import natural_key
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..distributed import rank_and_world
from .config import DataConfig
from .preprocessing import (
    check_names,
    class_names,
    count_held_out,
    data_config,
    dtype_of,
    image_mode,
    labels_by_name,
    read_image,
)

__all__ = ['FileLoader', 'Files', 'folder_classes', 'folder_parts', 'image_files', 'read_folder', 'training_loader']

# the parts of a data set, by the names of their folders
_PARTS = {'train': 'train', 'training': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'eval': 'val',
          'evaluation': 'val', 'test': 'test'}
_UNREADABLE = -1  # the label of an image file that cannot be read
_logger = logging.getLogger(__name__)
Samples = list[tuple[str, int]]  # files and their labels


class Files(Dataset):
    """Images of files, as a model expects them [C, H, W], and their labels.

    The next readable image takes the place of one that cannot be read. In training it keeps its label; otherwise its
    label is -1, by which a FileLoader leaves it out.
    """

    def __init__(self, samples: Samples, model: Any, training: bool = False) -> None:
        self.samples, self.training = samples, training
        self.mode, self.dtype = image_mode(model), dtype_of(model)
        self.transform: Any = create_transform(**data_config(model), is_training=False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        for i in (*range(index, len(self)), *range(index)):
            file, label = self.samples[i]
            try:
                image = read_image(file, self.mode)
            except ValueError as e:
                _logger.warning(str(e))
                continue
            return self.transform(image).to(self.dtype), label if i == index or self.training else _UNREADABLE
        raise ValueError(f"None of the {len(self)} images can be read, such as '{self.samples[0][0]}'.")


class FileLoader(DataLoader):
    """A DataLoader of Files in order, without the images that cannot be read: a warning says how many."""

    def __init__(self, samples: Samples, model: Any, config: DataConfig) -> None:
        super().__init__(Files(samples, model), config.batch_size, num_workers=_workers(config))
        self.files: Any = self.dataset

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private class
        unreadable: list[int] = []
        for i, (images, labels) in enumerate(super().__iter__()):
            good = labels != _UNREADABLE
            unreadable += [i * int(self.batch_size or 1) + int(j) for j in (~good).nonzero()]
            yield (images, labels) if good.all() else (images[good], labels[good])
        if unreadable:
            warnings.warn(f'{len(unreadable)} of {self.count} images cannot be read and are left out, such as '
                          f"'{self.files.samples[unreadable[0]][0]}'.", RuntimeWarning, stacklevel=2)

    @property
    def count(self) -> int:
        """Number of image files."""
        return len(self.files)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """At most so many random images of those that can be read, and their labels."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed)).tolist()
        pairs = list(islice((pair for pair in map(self.files.__getitem__, order) if pair[1] != _UNREADABLE), count))
        if not pairs:
            raise ValueError('None of the images can be read. Give others.')
        return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])

    def sha256(self) -> str:
        """SHA-256 of the names, sizes and labels of the files."""
        files = [[*Path(file).parts[-2:], os.path.getsize(file) if os.path.exists(file) else None, label]
                 for file, label in self.files.samples]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def training_loader(samples: Samples, model: Any, config: DataConfig, seed: int) -> Any:
    """A DataLoader of files to train on: shuffled, augmented, an incomplete last batch dropped."""
    if config.auto_augment is not None and model.in_chans == 4:
        raise ValueError("timm's auto_augment cannot handle an alpha channel, and the model takes 4 channels. "
                         'Leave it out.')
    try:
        loader = create_loader(
            Files(samples, model, training=True),
            **data_config(model),
            batch_size=config.batch_of(len(samples)),
            is_training=True,
            scale=(0.35, 1.),
            auto_augment=config.auto_augment,
            re_prob=config.reprob,
            num_workers=_workers(config),
            distributed=rank_and_world()[1] > 1,
            persistent_workers=False,  # each epoch seeds new workers, so that a resumed run sees the same images
            device=torch.device('cpu'),
            use_prefetcher=False,
        )
    except (AssertionError, AttributeError, TypeError, ValueError) as e:  # how timm rejects an unknown policy
        if config.auto_augment is None:
            raise
        raise ValueError(f"Unknown auto_augment '{config.auto_augment}'. Give a timm policy, such as "
                         "'rand-m9-mstd0.5-inc1' or 'original'.") from e
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.seed = seed
    return loader


def _workers(config: DataConfig) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return min(2, cores - 1) if config.workers is None else config.workers


def read_folder(
        root: Path, model: Any, labels: bool, share: float, limit: int | None, seed: int, any_classes: bool,
) -> tuple[dict[str, Samples], Any, int]:
    """The files and labels of each part of a folder; the names of its classes; their number.

    Without `labels`, all images of train/ or, without one, of the folder itself are used; labels mean nothing.

    Raises:
        ValueError: There are no images, their classes are not the model's, none can be held out, or it is unclear
            whether folders are parts or classes; the message says what to do.
    """
    folders = folder_parts(root) or {'train': root}
    if not labels:
        samples, names = _read(folders.get('train', root))
        divided = _divided(samples, len(names), share, seed)
        if not divided[-1]:  # each folder has one image
            divided = _divided([(file, 0) for file, _ in samples], 1, share, seed)
        parts = dict(zip(('train', 'val'), (of or samples for of in divided), strict=False))  # a single one is in both
        return {part: _first_of_each(of, limit) for part, of in parts.items()}, None, 0
    if share and 'train' not in folders:
        raise ValueError(f"'{root}' has {next(iter(folders.values())).name}/ but no train/ to train on. Give a folder "
                         'with both.')
    # only what is used must fit: to train, train/ and val/; to evaluate, the first of val/, test/ and all
    used = next(part for part in ('val', 'test', 'train') if part in folders)
    needed = {'train', 'val'} if share else {used, 'train'} if any_classes else {used}
    parts, names = {}, None
    for part in sorted(folders, key=lambda part: part not in needed):
        try:
            parts[part], own = _read_classes(folders[part])
            if names is None:
                _check_fits(folders[part], own, model, any_classes)
                names = own
            elif set(own) != set(names):
                raise ValueError(
                    f"The training and validation folders of '{root}' have different classes. Only one of them has "
                    f"{', '.join(sorted({*own} ^ {*names})[:5])}." if share else
                    f"'{root}' has other classes to train on than to evaluate on, so k-NN and probe cannot be "
                    f"measured. To leave them out, give '{folders[used]}'.")
        except ValueError:
            if part in needed:
                raise
            parts.pop(part, None)
    if share and 'val' not in folders:
        parts['train'], parts['val'] = _divided(parts['train'], len(names), share, seed)
        if not parts['val']:
            raise ValueError(f"Each class of '{folders['train']}' has one image, so none can be held out. Give more "
                             'images, or a val/ next to train/.')
    order = None if any_classes else labels_by_name(model, names)
    if order is not None:  # the model may have more classes, and in another order than the alphabet's
        parts = {part: [(file, order[label]) for file, label in of] for part, of in parts.items()}
        names = class_names(model)
    return {part: _first_of_each(of, limit) for part, of in parts.items()}, names, len(names)


def folder_classes(root: str | Path) -> list[str]:
    """The names of the classes that would be trained on, in the order of their labels."""
    folders = folder_parts(root) or {'train': Path(root)}
    if 'train' not in folders:
        raise ValueError(f"'{root}' has {next(iter(folders.values())).name}/ but no train/ to train on. Give a folder "
                         'with both.')
    return _read_classes(folders['train'])[1]


def folder_parts(root: str | Path) -> dict[str, Path]:
    """The parts of a data set, by 'train', 'val' and 'test'; no parts if the folder holds the classes itself.

    Folders are parts, not classes, if they are called train, val or test (or training, valid, validation, eval,
    evaluation), hold folders but no images directly, and are at least two, or the only folders with images. So `train`
    may be a class, as in CIFAR-100.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"There is no folder '{root}'. Give a folder with one sub-folder of images per class.")
    folders = [child for child in sorted(root.iterdir()) if child.is_dir() and not child.name.startswith('.')]
    named = [child for child in folders if child.name.lower() in _PARTS]
    if not named:
        return {}
    others = [child for child in folders if child not in named and _has_images(child, below=True)]
    flat = [child for child in named if _has_images(child)]
    of_classes = [child for child in named if child not in flat and _has_images(child, below=True)]
    parts: dict[str, Path] = {}
    for child in named if of_classes else flat:
        kind = _PARTS[child.name.lower()]
        if of_classes and kind in parts:
            raise ValueError(f"'{root}' has {parts[kind].name}/ and {child.name}/, two names for the same part. "
                             'Keep one.')
        parts[kind] = child
    if of_classes and others and len(of_classes) == 1:
        one = of_classes[0]
        raise ValueError(f"'{root}' has {one.name}/, which holds folders, next to {others[0].name}/. If it is a part "
                         f"of the data, give '{one}'; if it is a class, put its images directly into it.")
    if not of_classes and not others and len(parts) > 1:
        one = flat[0]
        raise ValueError(f"'{root}' has {' and '.join(f'{child.name}/' for child in flat)}, which hold images but no "
                         f"folders. If they are parts of the data, give one, such as '{one}'; if they are classes, "
                         'rename them.')
    return parts if of_classes else {}


def _has_images(folder: Path, below: bool = False) -> bool:
    """Whether a folder, or with `below` also one beneath it, holds images."""
    return any(names for _, names in (_walk(folder) if below else islice(_walk(folder), 1)))


def _read_classes(folder: Path) -> tuple[Samples, list[str]]:
    """The images of a folder of classes, and the names of the classes."""
    samples, names = _read(folder)
    if '' in names:
        file = next(Path(file).name for file, label in samples if label == names.index(''))
        raise ValueError(f"'{folder}' holds images that are in no class folder, such as {file}. Put each image into "
                         'the folder of its class.')
    check_names(names, f"'{folder}'")
    return samples, names


def _check_fits(folder: Path, names: list[str], model: Any, any_classes: bool) -> None:
    if len(names) != model.num_classes and not any_classes and labels_by_name(model, names) is None:
        raise ValueError(
            f"'{folder}' has {len(names)} classes (sub-folders), but the model has {model.num_classes}. Give a folder "
            f"whose classes are among the model's, or fine-tune it first: odevit finetune MODEL {folder} OUT")


def _read(folder: Path) -> tuple[Samples, list[str]]:
    """All images of a folder, and the names of the folders that hold any, which are their classes.

    timm's natural_key takes '1' and '01' for equal: then the name decides.
    """
    files = [(file, os.path.basename(os.path.relpath(of, folder)) if of != str(folder) else '')
             for of, names in _walk(folder) for file in (os.path.join(of, name) for name in names)]
    if not files:
        raise ValueError(f"There are no images in '{folder}'. Give a folder with one sub-folder of images per class.")
    classes = sorted({name for _, name in files}, key=_order)
    labels = {name: i for i, name in enumerate(classes)}
    return [(file, labels[name]) for file, name in sorted(files, key=lambda pair: _order(pair[0]))], classes


def _order(name: str) -> tuple[Any, str]:
    return natural_key(name), name


def image_files(folder: Path) -> list[Path]:
    """The image files of a folder and of those in it, in order."""
    return sorted(Path(of, name) for of, names in _walk(folder) for name in names)


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """A folder and those in it, with the names of their images; hidden ones do not count.

    None is entered twice, whatever links lead to it.
    """
    seen = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, followlinks=True):
        links = {name: os.path.islink(os.path.join(folder, name)) for name in folders if not name.startswith('.')}
        folders.clear()
        for name in sorted(links, key=lambda name: (links[name], name)):  # its own name comes before those of links
            real = os.path.realpath(os.path.join(folder, name))
            if real not in seen:
                seen.add(real)
                folders.append(name)
        yield folder, [name for name in files
                       if is_img_extension(os.path.splitext(name)[1].lower()) and not name.startswith('.')]


def _divided(samples: Samples, classes: int, share: float, seed: int) -> list[Samples]:
    """Samples to train on and, of each class, a share held out but for one image; all samples for a share of 0."""
    if not share:
        return [samples]
    members: list[Samples] = [[] for _ in range(classes)]
    for sample in samples:
        members[sample[1]].append(sample)
    train: Samples = []
    val: Samples = []
    for i, of in enumerate(members):
        order = torch.randperm(len(of), generator=torch.Generator().manual_seed(seed + i)).tolist()
        held = count_held_out(len(of), share)
        val += [of[j] for j in sorted(order[:held])]
        train += [of[j] for j in sorted(order[held:])]
    return [train, val]


def _first_of_each(samples: Samples, limit: int | None) -> Samples:
    """At most so many of the samples, in their order: the first of each class, then the second of each, and so on."""
    seen: Counter[int] = Counter()
    places = []
    for _, label in samples:
        places.append(seen[label])
        seen[label] += 1
    chosen = sorted(range(len(samples)), key=places.__getitem__)[:limit]
    return [samples[i] for i in sorted(chosen)]


# doors of before, until nobody uses them

def _old(root, model, batch_size=64, workers=None, auto_augment=None, reprob=0., **options):
    from importlib import import_module
    config = DataConfig(batch_size=batch_size, workers=workers, auto_augment=auto_augment, reprob=reprob)
    if not Path(root).is_dir():
        raise ValueError(f"There is no folder '{root}'. Give a folder with one sub-folder of images per class.")
    data = import_module('timm_odevit.data.read').read_data(root, model, config, **options)
    for loader in (data.train, data.val, data.test, data.unaugmented):
        if loader is not None:
            loader.dataset.reader = loader.dataset
            loader.dataset.root = str(root)
            order = labels_by_name(model, folder_names) if (
                not options.get('any_classes') and (folder_names := _read(Path(root) if not folder_parts(root) else
                next(iter(folder_parts(root).values())))[1])) else None
            names = folder_names if not options.get('any_classes') and order else list(data.classes or ())
            loader.dataset.class_to_idx = dict(zip(names, order or range(len(names)), strict=False))
    return data


def folder_loader(root, model, *, held_out=None, training=False, **options):
    data = _old(root, model, held_out=held_out or 0. if held_out is None else held_out, **options)
    return data.plain() if training else data.evaluated()[0]


def folder_loaders(root, model, **options):
    data = _old(root, model, **options)
    return data.train, data.val


def image_loaders(root, model, **options):
    data = _old(root, model, labels=False, **options)
    return data.train, data.val
