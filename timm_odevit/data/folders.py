"""Folders of images, through timm.data."""
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from timm.data import create_loader, create_transform, is_img_extension
from timm.utils import natural_key
from torch.utils.data import DistributedSampler

from ..distributed import rank_and_world
from .pictures import EvaluationLoader, ImageFiles
from .preprocessing import count_held_out, data_config, image_mode, labels_by_name

__all__ = ['folder_classes', 'folder_loader', 'folder_loaders', 'folder_parts', 'image_loaders']

# the parts of a data set, by the names of their folders
_PARTS = {'train': 'train', 'training': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'eval': 'val',
          'evaluation': 'val', 'test': 'test'}


def folder_loader(
        root: str | Path, model: Any, *, batch_size: int = 64, workers: int | None = None,
        held_out: float | None = None, seed: int = 0, any_classes: bool = False, training: bool = False,
) -> EvaluationLoader:
    """Make batches to evaluate on: images in one sub-folder per class, preprocessed as the model expects.

    Args:
        root: The folder of classes, or one that holds it as val/ or test/; see `folder_loaders`.
        model: timm model that will see the images. If its classes have names and the folders have the same names, the
            images get its labels; otherwise, labels follow the alphabetical order of the folders.
        batch_size: Images per batch.
        workers: Worker processes; None for min(2, usable CPU cores - 1).
        held_out: Use val/ or, without one, only the share of each class that `folder_loaders` holds out of training
            with this share and seed. None for val/, or else test/, or else all images.
        seed: Seed of the choice of images held out.
        any_classes: The folders need not be the model's classes; always so for a model without classes.
        training: Use those images that `folder_loaders` trains on, in place of those to evaluate on.

    Returns:
        A DataLoader of (images [B, C, H, W], labels [B]), in the order of the file names, without the files that cannot
        be read as images: a warning says how many.

    Raises:
        ValueError: There are no images, or their classes are not the model's; the message says what to do.
    """
    root, parts = Path(root), folder_parts(root)
    if training:
        dataset = _dataset(_training(root, parts), model, any_classes)
        if held_out is not None and 'val' not in parts:
            _keep_share(dataset, True, held_out, seed)
    elif held_out is not None:
        dataset = _validation(root, parts, model, held_out, seed, any_classes)
    elif set(parts) == {'train'}:
        raise ValueError(
            f"'{root}' has {parts['train'].name}/ but no val/ or test/ to evaluate on. Give the folder that holds the "
            'classes, or the share that was held out of training (held_out, --held-out).')
    else:
        dataset = _dataset(parts.get('val') or parts.get('test') or root, model, any_classes)
    return _evaluation_loader(dataset, model, batch_size, workers)


def folder_loaders(
        root: str | Path, model: Any, *, batch_size: int = 64, workers: int | None = None, held_out: float = 0.1,
        auto_augment: str | None = None, reprob: float = 0., limit: int | None = None, seed: int = 0,
        any_classes: bool = False,
) -> tuple[Any, EvaluationLoader]:
    """Make batches to train on (shuffled, augmented, an incomplete last one dropped) and batches to validate on.

    Folders are parts of a data set, not classes, if they are called train, val or test (or training, valid, validation,
    eval, evaluation), hold folders but no images directly, and are at least two, or the only folders with images.

    Args:
        root: A folder with train/ and val/, each with one sub-folder of images per class; or such a folder of classes
            itself (or train/ alone), of which a share is held out.
        model, batch_size, workers, any_classes: As in `folder_loader`.
        held_out: Share of each class held out if there is no val/; at least one image of each class that has two.
        auto_augment: timm's augmentation policy, such as 'rand-m9-mstd0.5-inc1' for RandAugment.
        reprob: Probability of erasing a part of an image.
        limit: Use only this many images of each part, from all classes in turn, for a rehearsal.
        seed: Seed of the choice of images held out and, with several processes, of the image order.

    Returns:
        Two DataLoaders of (images [B, C, H, W], labels [B]) that share no image; each of several processes trains on
        its own part. A file that cannot be read is replaced by the next one in training, and left out of validation.

    Raises:
        ValueError: There are no images, their classes are not the model's, none can be held out, or it is unclear
            whether folders are parts or classes; the message says what to do.
    """
    root, parts = Path(root), folder_parts(root)
    training = _dataset(_training(root, parts), model, any_classes)
    validation = _validation(root, parts, model, held_out, seed, any_classes, set(training.reader.class_to_idx))
    if 'val' not in parts:
        _keep_share(training, True, held_out, seed)
    for dataset in (training, validation):
        dataset.reader.samples = _first_of_each(dataset.reader.samples, limit)
    if auto_augment is not None and model.in_chans == 4:
        raise ValueError("timm's auto_augment cannot handle an alpha channel, and the model takes 4 channels. "
                         'Leave it out.')
    try:
        train_loader = _training_loader(
            training, model, batch_size, workers, seed, auto_augment=auto_augment, re_prob=reprob)
    except (AssertionError, AttributeError, TypeError, ValueError) as e:  # how timm rejects an unknown policy
        raise ValueError(f"Unknown auto_augment '{auto_augment}'. Give a timm policy, such as 'rand-m9-mstd0.5-inc1' "
                         "or 'original'.") from e
    return train_loader, _evaluation_loader(validation, model, batch_size, workers)


def folder_classes(root: str | Path) -> list[str]:
    """The names of the classes that `folder_loaders` would train on, in the order of their labels."""
    return list(_read(_training(Path(root), folder_parts(root)), 'RGB').reader.class_to_idx)


def image_loaders(
        root: str | Path, model: Any, *, batch_size: int = 64, workers: int | None = None, held_out: float = 0.1,
) -> tuple[Any, EvaluationLoader]:
    """Make batches of images to calibrate on (shuffled, augmented), and others, from any folders: labels are ignored.

    Args:
        root: A folder of images, or of folders of images; of one with a train/ of classes, only that is used.
        model, batch_size, workers: As in `folder_loaders`; a batch has no more images than there are.
        held_out: Share of the images of each folder held out: those that `folder_loaders` holds out.

    Returns:
        Two DataLoaders of (images [B, C, H, W], meaningless labels [B]): of the images to calibrate on, and of those
        held out. With one image, both have it.

    Raises:
        ValueError: There are no images, or it is unclear whether folders are parts or classes.
    """
    root, parts = Path(root), folder_parts(root)
    datasets = [_read(parts.get('train', root), image_mode(model)) for _ in range(2)]
    samples = datasets[0].reader.samples
    if max(Counter(label for _, label in samples).values()) > 1:
        for dataset, train in zip(datasets, (True, False), strict=True):
            _keep_share(dataset, train, held_out, 0)  # the images that other commands hold out
    elif len(samples) > 1:
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
        held = count_held_out(len(samples), held_out)
        for dataset, chosen in zip(datasets, (order[held:], order[:held]), strict=True):
            dataset.reader.samples = [samples[i] for i in sorted(chosen)]
    return (_training_loader(datasets[0], model, min(batch_size, len(datasets[0])), workers),
            _evaluation_loader(datasets[1], model, batch_size, workers))


def folder_parts(root: str | Path) -> dict[str, Path]:
    """The parts of a data set, by 'train', 'val' and 'test'; no parts if the folder holds the classes itself.

    A folder `train` may be a class, as in CIFAR-100: `folder_loaders` says what makes it a part.
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
    """Whether a folder, or with `below` also one beneath it, holds images; hidden ones do not count."""
    for _, folders, files in os.walk(folder, followlinks=True):
        if any(is_img_extension(Path(name).suffix.lower()) and not name.startswith('.') for name in files):
            return True
        folders[:] = [name for name in folders if below and not name.startswith('.')]
    return False


def _training(root: Path, parts: dict[str, Path]) -> Path:
    if parts and 'train' not in parts:
        name = next(iter(parts.values())).name
        raise ValueError(f"'{root}' has {name}/ but no train/ to train on. Give a folder with both.")
    return parts.get('train', root)


def _validation(
        root: Path, parts: dict[str, Path], model: Any, share: float, seed: int, any_classes: bool,
        names: set[str] | None = None,
) -> ImageFiles:
    """Return the images of val/, whose classes must be the names given, or else the share held out of training."""
    if 'val' in parts:
        return _dataset(parts['val'], model, any_classes, names)
    return _keep_share(_dataset(_training(root, parts), model, any_classes), False, share, seed)


def _dataset(folder: Path, model: Any, any_classes: bool, names: set[str] | None = None) -> ImageFiles:
    """The images of a folder of classes, with the labels that the model has for them."""
    dataset = _read(folder, image_mode(model))
    found = dataset.reader.class_to_idx
    if '' in found:
        file = next(Path(file).name for file, label in dataset.reader.samples if label == found[''])
        raise ValueError(f"'{folder}' holds images that are in no class folder, such as {file}. Put each image into "
                         'the folder of its class.')
    if names is not None and names != set(found):
        raise ValueError(f"The training and validation folders of '{folder.parent}' have different classes. "
                         f"Only one of them has {', '.join(sorted(names ^ set(found))[:5])}.")
    order = None if any_classes else labels_by_name(model, list(found))
    if len(found) != model.num_classes and order is None and model.num_classes and not any_classes:
        raise ValueError(
            f"'{folder}' has {len(found)} classes (sub-folders), but the model has {model.num_classes}. Give a folder "
            f"whose classes are among the model's, or fine-tune it first: odevit finetune MODEL {folder} OUT")
    if order is not None:  # the model may have more classes, and in another order than the alphabet's
        dataset.reader.class_to_idx = dict(zip(found, order, strict=True))  # in the order of the folders
        dataset.reader.samples = [(file, order[label]) for file, label in dataset.reader.samples]
    return dataset


def _read(folder: Path, mode: str) -> ImageFiles:
    """A data set of all images of a folder but hidden ones; its classes are the folders that hold any.

    timm sorts by natural_key, by which '1' and '01' are equal: then the name decides, not the order of a set.
    """
    nothing = f"There are no images in '{folder}'. Give a folder with one sub-folder of images per class."
    try:
        dataset = ImageFiles(str(folder), input_img_mode=mode)
    except RuntimeError as e:
        raise ValueError(nothing) from e
    reader = dataset.reader
    names = list(reader.class_to_idx)
    seen = [(file, names[label]) for file, label in reader.samples if f'{os.sep}.' not in file[len(str(folder)):]]
    if not seen:
        raise ValueError(nothing)
    classes = sorted({name for _, name in seen}, key=_order)
    reader.class_to_idx = {name: i for i, name in enumerate(classes)}
    reader.samples = [(file, reader.class_to_idx[name]) for file, name in sorted(seen, key=lambda s: _order(s[0]))]
    return dataset


def _order(name: str) -> tuple[Any, str]:
    return natural_key(name), name


def _training_loader(
        dataset: ImageFiles, model: Any, batch_size: int, workers: int | None, seed: int = 0, **augmentation: Any,
) -> Any:
    dataset.training = True
    loader = create_loader(
        dataset,
        **data_config(model),
        batch_size=batch_size,
        is_training=True,
        scale=(0.35, 1.),
        num_workers=_count(workers),
        distributed=rank_and_world()[1] > 1,
        persistent_workers=False,  # each epoch seeds new workers, so that a resumed run sees the same images
        device=torch.device('cpu'),
        use_prefetcher=False,
        **augmentation,
    )
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.seed = seed
    return loader


def _count(workers: int | None) -> int:
    """The number of worker processes; None for what suits this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return min(2, cores - 1) if workers is None else workers


def _evaluation_loader(dataset: ImageFiles, model: Any, batch_size: int, workers: int | None) -> EvaluationLoader:
    dataset.transform = create_transform(**data_config(model), is_training=False)
    return EvaluationLoader(dataset, batch_size, num_workers=_count(workers))


def _first_of_each(samples: list[tuple[str, int]], limit: int | None) -> list[tuple[str, int]]:
    """At most so many of the samples, in their order: the first of each class, then the second of each, and so on."""
    seen: Counter[int] = Counter()
    places = []
    for _, label in samples:
        places.append(seen[label])
        seen[label] += 1
    chosen = sorted(range(len(samples)), key=places.__getitem__)[:limit]
    return [samples[i] for i in sorted(chosen)]


def _keep_share(dataset: ImageFiles, train: bool, share: float, seed: int) -> ImageFiles:
    """Keep only the images to train on, or only each class's share held out; at least one per class is trained on."""
    by_class: dict[int, list[tuple[str, int]]] = {}
    for sample in dataset.reader.samples:
        by_class.setdefault(sample[1], []).append(sample)
    part = []
    for place, label in enumerate(dataset.reader.class_to_idx.values()):  # whatever labels a model has for them
        members = by_class.get(label, [])
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed + place)).tolist()
        held = count_held_out(len(members), share)
        part += [members[i] for i in sorted(order[held:] if train else order[:held])]
    if not part:
        raise ValueError(f"Each class of '{dataset.reader.root}' has one image, so none can be held out. Give more "
                         'images, or a val/ next to train/.')
    dataset.reader.samples = part
    return dataset
