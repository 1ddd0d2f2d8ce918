"""Folders of image files, and which part and class each file belongs to."""
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from timm.data import is_img_extension
from timm.utils import natural_key

from .batches import FileLoader, Samples, training_loader
from .config import Reading
from .preprocessing import check_names, class_names, count_held_out, labels_by_name, shuffled

__all__ = ['files_in', 'folder_classes', 'folder_parts', 'read_folder']

# the parts of a data set, by the names of their folders
_PARTS = {'train': 'train', 'training': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'eval': 'val',
          'evaluation': 'val', 'test': 'test'}


def read_folder(root: Path, to: Reading) -> tuple[dict[str, Any], list[str] | None, int]:
    """The loaders of a folder's parts, the names of its classes, and their number."""
    files: dict[str, Samples]
    names: list[str] | None = None
    if to.labels:
        files, names = _classes_in(root, to)
    else:
        samples, places = files_in(folder_parts(root).get('train', root))
        if len(samples) == len(places):
            samples, places = [(file, 0) for file, _ in samples], ['']
        files = {part: of or samples for part, of in _divided(samples, len(places), to).items()}  # one may be in both
    files = {part: _first_of_each(samples, to.limit) for part, samples in files.items()}
    loaders: dict[str, Any] = {part: FileLoader(samples, to.model, to.config) for part, samples in files.items()}
    if 'train' in files:
        loaders.update(plain=loaders['train'], train=training_loader(files['train'], to))
    return loaders, names, len(names or ())


def _classes_in(root: Path, to: Reading) -> tuple[dict[str, Samples], list[str]]:
    """The files of each part, with the model's labels, and the names of the classes.

    Only what is used must fit: to train, train/ and val/; to evaluate, the first of val/, test/ and all images.
    """
    folders = _folders(root, training=to.share > 0)
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
    evaluation), hold folders but no images directly, and are at least two, or the only folders with images; a class
    may be called train, too. Otherwise ValueError says what is unclear.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"There is no folder '{root}'.")
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
