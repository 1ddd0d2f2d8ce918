"""Folders of images, through timm.data."""
from pathlib import Path
from typing import Any, List, Optional, Tuple, Union

import torch
from timm.data import create_dataset, create_loader, resolve_data_config

__all__ = ['folder_loader', 'folder_loaders']

_TRAIN = ('train', 'training')
_EVAL = ('val', 'validation', 'valid', 'test', 'eval')


def folder_loader(
        root: Union[str, Path],
        model: Any,
        *,
        batch_size: int = 64,
        workers: int = 2,
        train: bool = False,
        held_out: Optional[float] = None,
        seed: int = 0,
) -> Any:
    """Batches of a folder with one sub-folder of images a class, preprocessed as the model wants it.

    Args:
        root: The folder, or one that holds train/ and val/.
        model: timm model that will see the images.
        batch_size: Images per batch.
        workers: Worker processes.
        train: Shuffle and augment; the last incomplete batch is left out.
        held_out: Without a val/ folder: hold that share of each class out of training, and evaluate on it. None takes
            the whole folder.
        seed: Of the choice of images held out.

    Returns:
        A DataLoader of (images [B, C, H, W], labels [B]).

    Raises:
        ValueError: There are no images, or their classes are not the model's; the message says what to do.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"There is no folder '{root}'. Give a folder with one sub-folder of images per class.")
    has_split = any((root / name).is_dir() for name in (*_TRAIN, *_EVAL))
    try:
        dataset = create_dataset('', str(root), split='train' if train else 'validation')
    except RuntimeError as e:
        raise ValueError(
            f"There are no images in '{root}'. Give a folder with one sub-folder of images per class.") from e
    classes = len(dataset.reader.class_to_idx)
    if classes != model.num_classes:
        raise ValueError(
            f"'{root}' has {classes} classes (sub-folders), the model has {model.num_classes}. "
            f'Give the folder that the model was made for, or create the model with num_classes={classes}.')
    if held_out is not None and not has_split:
        dataset.reader.samples = _part(dataset.reader.samples, train, held_out, seed)
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
        persistent_workers=workers > 0,
        device=torch.device('cpu'),
        use_prefetcher=False,
    )


def folder_loaders(
        root: Union[str, Path],
        model: Any,
        *,
        held_out: float = 0.1,
        **kwargs: Any,
) -> Tuple[Any, Any]:
    """Training and validation batches of one folder: its train/ and val/, or a share of each class held out."""
    return (folder_loader(root, model, train=True, held_out=held_out, **kwargs),
            folder_loader(root, model, train=False, held_out=held_out, **kwargs))


def _part(samples: List[Tuple[str, int]], train: bool, share: float, seed: int) -> List[Tuple[str, int]]:
    by_class: dict = {}
    for sample in samples:
        by_class.setdefault(sample[1], []).append(sample)
    part = []
    for label, members in sorted(by_class.items()):
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed + label)).tolist()
        held = max(1, round(share * len(members))) if len(members) > 1 else 0
        part += [members[i] for i in sorted(order[held:] if train else order[:held])]
    return part
