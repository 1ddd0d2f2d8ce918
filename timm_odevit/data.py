"""Folders of images, through timm.data."""
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from timm.data import create_dataset, create_loader, resolve_data_config

__all__ = ['folder_loader', 'folder_loaders', 'image_loader']

_TRAIN = ('train', 'training')
_EVAL = ('val', 'valid', 'validation', 'eval', 'evaluation', 'test')


def folder_loader(
        root: Union[str, Path],
        model: Any,
        *,
        batch_size: int = 64,
        workers: int = 2,
        held_out: Optional[float] = None,
        seed: int = 0,
) -> Any:
    """Batches to evaluate on: images in one sub-folder a class, preprocessed as the model wants it.

    Args:
        root: The folder of classes, or one that holds such a folder as val/ or test/.
        model: timm model that will see the images.
        batch_size: Images per batch.
        workers: Worker processes.
        held_out: Only the share of each class that `folder_loaders` holds out of training with this share and seed.
        seed: Of that choice.

    Returns:
        A DataLoader of (images [B, C, H, W], labels [B]), in the order of the file names.

    Raises:
        ValueError: There are no images, or their classes are not the model's; the message says what to do.
    """
    root = _folder(root)
    train, evaluation = _split(root, _TRAIN), _split(root, _EVAL)
    if evaluation is None and train is not None and held_out is None:
        raise ValueError(
            f"'{root}' has {train.name}/ and no val/ or test/ to evaluate on. Give the folder of classes itself, or "
            'the share that was held out of training.')
    if evaluation is not None:
        return _loader(_dataset(evaluation, model), model, batch_size, workers, train=False)
    dataset = _dataset(train or root, model)
    if held_out is not None:
        dataset.reader.samples = _part(dataset.reader.samples, False, held_out, seed)
    return _loader(dataset, model, batch_size, workers, train=False)


def folder_loaders(
        root: Union[str, Path],
        model: Any,
        *,
        batch_size: int = 64,
        workers: int = 2,
        held_out: float = 0.1,
        seed: int = 0,
) -> Tuple[Any, Any]:
    """Batches to train on (shuffled, augmented, the last incomplete one left out) and batches to validate on.

    Args:
        root: A folder with train/ and val/ of one sub-folder of images a class, or such a folder of classes itself
            (or train/ alone), of which a share is held out.
        model: timm model that will see the images.
        batch_size: Images per batch.
        workers: Worker processes.
        held_out: Share of each class held out, where there is no val/; at least one image of each class.
        seed: Of the choice of images held out.

    Returns:
        Two DataLoaders of (images [B, C, H, W], labels [B]) that share no image.

    Raises:
        ValueError: There are no images, or their classes are not the model's; the message says what to do.
    """
    root = _folder(root)
    train, evaluation = _split(root, _TRAIN), _split(root, _EVAL)
    if train is None and evaluation is not None:
        raise ValueError(f"'{root}' has {evaluation.name}/ and no train/ to train on. Give a folder with both.")
    datasets = [_dataset(train or root, model), _dataset(evaluation or train or root, model)]
    names: List[Dict[str, int]] = [dataset.reader.class_to_idx for dataset in datasets]
    if names[0] != names[1]:
        only = sorted(set(names[0]) ^ set(names[1]))
        raise ValueError(f"The two halves of '{root}' have other classes: {', '.join(only[:5])} is in one only.")
    if evaluation is None:
        for dataset, training in zip(datasets, (True, False), strict=True):
            dataset.reader.samples = _part(dataset.reader.samples, training, held_out, seed)
    return (_loader(datasets[0], model, batch_size, workers, train=True),
            _loader(datasets[1], model, batch_size, workers, train=False))


def image_loader(
        root: Union[str, Path],
        model: Any,
        *,
        batch_size: int = 64,
        workers: int = 2,
) -> Any:
    """Batches of images to calibrate on (shuffled, augmented), whatever folders they lie in: labels are not looked at.

    Args:
        root: A folder of images, or of folders of images; of one with a train/, only that.
        model: timm model that will see the images.
        batch_size: Images per batch; fewer where there are fewer.
        workers: Worker processes.

    Returns:
        A DataLoader of (images [B, C, H, W], numbers that stand for nothing [B]).

    Raises:
        ValueError: There are no images.
    """
    root = _folder(root)
    dataset = _dataset(_split(root, _TRAIN) or root, model, labelled=False)
    return _loader(dataset, model, min(batch_size, len(dataset)), workers, train=True)


def _folder(root: Union[str, Path]) -> Path:
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"There is no folder '{root}'. Give a folder with one sub-folder of images per class.")
    return root


def _split(root: Path, names: Tuple[str, ...]) -> Optional[Path]:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _dataset(folder: Path, model: Any, labelled: bool = True) -> Any:
    mode = 'L' if model.in_chans == 1 else 'RGB'
    try:
        dataset = create_dataset('', str(folder), search_split=False, input_img_mode=mode)
    except RuntimeError as e:
        raise ValueError(
            f"There are no images in '{folder}'. Give a folder with one sub-folder of images per class.") from e
    classes = len(dataset.reader.class_to_idx)
    if labelled and classes != model.num_classes:
        raise ValueError(
            f"'{folder}' has {classes} classes (sub-folders), the model has {model.num_classes}. "
            f'Give the folder that the model was made for, or create the model with num_classes={classes}.')
    return dataset


def _loader(dataset: Any, model: Any, batch_size: int, workers: int, train: bool) -> Any:
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)  # pretrained_cfg may have an older one
    cfg = resolve_data_config({'input_size': (model.in_chans, *size)} if size else {}, model=model)
    return create_loader(
        dataset,
        input_size=cfg['input_size'],
        batch_size=batch_size,
        is_training=train,
        scale=(0.35, 1.) if train else None,
        interpolation=cfg['interpolation'],
        mean=cfg['mean'],
        std=cfg['std'],
        crop_pct=cfg['crop_pct'],
        crop_mode=cfg['crop_mode'],
        num_workers=workers,
        persistent_workers=False,  # each epoch seeds its workers anew, so that a resumed run sees the same images
        device=torch.device('cpu'),
        use_prefetcher=False,
    )


def _part(samples: List[Tuple[str, int]], train: bool, share: float, seed: int) -> List[Tuple[str, int]]:
    if not 0 < share < 1:
        raise ValueError(f'The share held out must lie between 0 and 1; got {share!r}.')
    by_class: Dict[int, List[Tuple[str, int]]] = {}
    for sample in samples:
        by_class.setdefault(sample[1], []).append(sample)
    part = []
    for label, members in sorted(by_class.items()):
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed + label)).tolist()
        held = min(len(members) - 1, max(1, round(share * len(members))))
        part += [members[i] for i in sorted(order[held:] if train else order[:held])]
    return part
