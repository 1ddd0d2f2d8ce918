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
from .config import DataConfig, Reading
from .preprocessing import (
    check_names,
    class_names,
    count_held_out,
    data_config,
    dtype_of,
    image_mode,
    labels_by_name,
    read_image,
    shuffled,
)

__all__ = ['files_in', 'folder_classes', 'folder_parts', 'read_folder']

# the parts of a data set, by the names of their folders
_PARTS = {'train': 'train', 'training': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'eval': 'val',
          'evaluation': 'val', 'test': 'test'}
_UNREADABLE = -1  # the label of an image file that cannot be read
_logger = logging.getLogger(__name__)
Samples = list[tuple[str, int]]  # files and their labels


class Files(Dataset):
    """Images of files [C, H, W] and their labels.

    The next readable image takes the place of one that cannot be read, with its own label in training, or else -1.
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
        self.count = len(samples)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private class
        unreadable: list[int] = []
        for i, (images, labels) in enumerate(super().__iter__()):
            good = labels != _UNREADABLE
            unreadable += [i * int(self.batch_size or 1) + int(j) for j in (~good).nonzero()]
            yield images[good], labels[good]
        if unreadable:
            warnings.warn(f'{len(unreadable)} of {self.count} images cannot be read and are left out, such as '
                          f"'{self.files.samples[unreadable[0]][0]}'.", RuntimeWarning, stacklevel=2)

    def sample(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        order = shuffled(self.count, seed).tolist()
        pairs = list(islice((pair for pair in map(self.files.__getitem__, order) if pair[1] != _UNREADABLE), count))
        return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])

    def sha256(self) -> str:
        files = [[*Path(file).parts[-2:], os.path.getsize(file) if os.path.exists(file) else None, label]
                 for file, label in self.files.samples]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _training_loader(samples: Samples, to: Reading) -> Any:
    policy = to.config.auto_augment
    if policy is not None and to.model.in_chans == 4:
        raise ValueError("timm's auto_augment cannot handle an alpha channel, and the model takes 4 channels. "
                         'Leave it out.')
    try:
        loader = create_loader(
            Files(samples, to.model, training=True),
            **data_config(to.model),
            batch_size=to.config.batch_of(len(samples)),
            is_training=True,
            scale=(0.35, 1.),
            auto_augment=policy,
            re_prob=to.config.reprob,
            num_workers=_workers(to.config),
            distributed=rank_and_world()[1] > 1,
            persistent_workers=False,  # each epoch seeds new workers, so that a resumed run sees the same images
            device=torch.device('cpu'),
            use_prefetcher=False,
        )
    except (AssertionError, AttributeError, TypeError, ValueError) as e:  # how timm rejects an unknown policy
        raise ValueError(f"Unknown auto_augment '{policy}'. Give a timm policy, such as 'rand-m9-mstd0.5-inc1' or "
                         "'original'.") from e
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.seed = to.seed
    return loader


def _workers(config: DataConfig) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return min(2, cores - 1) if config.workers is None else config.workers


def read_folder(root: Path, to: Reading) -> tuple[dict[str, Any], list[str] | None, int]:
    """The loaders of a folder's parts, the names of its classes, and their number."""
    folders = _folders(root, to.labels and to.share > 0)
    files, names = _classes_in(root, folders, to) if to.labels else _images_in(folders.get('train', root), to)
    files = {part: _first_of_each(samples, to.limit) for part, samples in files.items()}
    loaders: dict[str, Any] = {part: FileLoader(samples, to.model, to.config) for part, samples in files.items()}
    if 'train' in files:
        loaders.update(plain=loaders['train'], train=_training_loader(files['train'], to))
    return loaders, names, len(names or ())


def _images_in(folder: Path, to: Reading) -> tuple[dict[str, Samples], None]:
    samples, names = files_in(folder)
    if len(samples) == len(names):
        samples, names = [(file, 0) for file, _ in samples], ['']
    files = _divided(samples, len(names), to)
    return {part: of or samples for part, of in files.items()}, None  # a single image is in both


def _classes_in(root: Path, folders: dict[str, Path], to: Reading) -> tuple[dict[str, Samples], list[str]]:
    """The files of each part, with the model's labels, and the names of the classes.

    Only what is used must fit: to train, train/ and val/; to evaluate, the first of val/, test/ and all images.
    """
    used = next(part for part in ('val', 'test', 'train') if part in folders)
    needed = {'train', 'val'} if to.share else {used, 'train'} if to.any_classes else {used}
    files: dict[str, Samples] = {}
    names: list[str] = []
    order = None
    for part in sorted(folders, key=lambda part: part not in needed):
        folder = folders[part]
        try:
            samples, own = _read_classes(folder)
            if not names and not to.any_classes:
                order = labels_by_name(to.model, own)
                if order is None and len(own) != to.model.num_classes:
                    raise ValueError(
                        f"'{folder}' has {len(own)} classes (sub-folders), but the model has {to.model.num_classes}. "
                        "Give a folder whose classes are among the model's, or fine-tune it first: odevit finetune "
                        f'MODEL {folder} OUT')
            names = names or own
            if own != names:
                raise ValueError(f"The training and validation folders of '{root}' have different classes. Only one of "
                                 f"them has {', '.join(sorted({*own} ^ {*names})[:5])}. To evaluate without the "
                                 f"training images, give '{folders[used]}'.")
            files[part] = samples
        except ValueError:
            if part in needed:
                raise
    if 'val' not in folders and 'train' in files:
        files.update(_divided(files['train'], len(names), to))
        if not files.get('val', True):
            raise ValueError(f"Each class of '{folders['train']}' has one image, so none can be held out. Give more "
                             'images, or a val/ next to train/.')
    if order is not None:
        files = {part: [(file, order[i]) for file, i in samples] for part, samples in files.items()}
        names = class_names(to.model) or names
    return files, names


def folder_classes(root: str | Path) -> list[str]:
    """The names of the classes that would be trained on, in the order of their labels."""
    return _read_classes(_folders(Path(root), training=True)['train'])[1]


def _folders(root: Path, training: bool) -> dict[str, Path]:
    folders = folder_parts(root) or {'train': root}
    if training and 'train' not in folders:
        raise ValueError(f"'{root}' has {next(iter(folders.values())).name}/ but no train/ to train on. Give a folder "
                         'with both.')
    return folders


def folder_parts(root: str | Path) -> dict[str, Path]:
    """The parts of a data set, by 'train', 'val' and 'test'; no parts if the folder holds the classes itself.

    Folders are parts, not classes, if they are called train, val or test (or training, valid, validation, eval,
    evaluation), hold folders but no images directly, and are at least two, or the only folders with images. So `train`
    may be a class, as in CIFAR-100.
    Otherwise ValueError says what is unclear.
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
        other = parts.setdefault(_PARTS[child.name.lower()], child)
        if of_classes and other != child:
            raise ValueError(f"'{root}' has {other.name}/ and {child.name}/, two names for the same part. Keep one.")
    if others and len(of_classes) == 1:
        one = of_classes[0]
        raise ValueError(f"'{root}' has {one.name}/, which holds folders, next to {others[0].name}/. If it is a part "
                         f"of the data, give '{one}'; if it is a class, put its images directly into it.")
    if not of_classes and not others and len(parts) > 1:
        raise ValueError(f"'{root}' has {' and '.join(f'{child.name}/' for child in flat)}, which hold images but no "
                         f"folders. If they are parts of the data, give one, such as '{flat[0]}'; if they are classes, "
                         'rename them.')
    return parts if of_classes else {}


def _has_images(folder: Path, below: bool = False) -> bool:
    return any(names for _, names in (_walk(folder) if below else islice(_walk(folder), 1)))


def _read_classes(folder: Path) -> tuple[Samples, list[str]]:
    samples, names = files_in(folder)
    if names[0] == '':
        file = next(Path(file).name for file, label in samples if label == 0)
        raise ValueError(f"'{folder}' holds images that are in no class folder, such as {file}. Put each image into "
                         'the folder of its class.')
    check_names(names, f"'{folder}'")
    return samples, names


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
    """A folder and those in it, with the names of their images; hidden ones do not count.

    None is entered twice, whatever links lead to it.
    """
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


def _divided(samples: Samples, classes: int, to: Reading) -> dict[str, Samples]:
    """The samples to train on, and those held out: a share of each class."""
    if not to.share:
        return {'train': samples}
    members: list[Samples] = [[] for _ in range(classes)]
    for sample in samples:
        members[sample[1]].append(sample)
    parts: dict[str, Samples] = {'train': [], 'val': []}
    for i, of in enumerate(members):
        order = shuffled(len(of), to.seed + i).tolist()
        held = count_held_out(len(of), to.share)
        parts['train'] += [of[j] for j in sorted(order[held:])]
        parts['val'] += [of[j] for j in sorted(order[:held])]
    return parts


def _first_of_each(samples: Samples, limit: int | None) -> Samples:
    """At most so many of the samples, in their order: the first of each class, then the second of each, and so on."""
    seen: Counter[int] = Counter()
    turns = []
    for _, label in samples:
        turns.append(seen[label])
        seen[label] += 1
    return [samples[i] for i in sorted(sorted(range(len(samples)), key=turns.__getitem__)[:limit])]


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
                not options.get('any_classes') and (folder_names := files_in(Path(root) if not folder_parts(root) else
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
