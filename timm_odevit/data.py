"""Folders of images through timm.data, and arrays of small images, which are augmented on the device."""
import math
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union
from zipfile import ZipFile, ZipInfo

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data import Mixup, create_dataset, create_loader, is_img_extension, resolve_input_data_config
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from .sources import one_line

__all__ = ['ArrayLoader', 'MixupLoader', 'array_loaders', 'folder_loader', 'folder_loaders', 'image_loader']

# the parts of a data set, by the names of their folders
_PARTS = {'train': 'train', 'training': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'eval': 'val',
          'evaluation': 'val', 'test': 'test'}
_MODES = {1: 'L', 3: 'RGB', 4: 'RGBA'}  # Pillow's, by the channels of a model


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
        root: The folder of classes, or one that holds such a folder as val/ or test/; see `folder_loaders`.
        model: timm model that will see the images.
        batch_size: Images per batch.
        workers: Worker processes.
        held_out: Only the share of each class that `folder_loaders` holds out of training with this share and seed,
            or val/ where there is one. Without it, val/ or else test/, or else all images.
        seed: Of that choice.

    Returns:
        A DataLoader of (images [B, C, H, W], labels [B]), in the order of the file names.

    Raises:
        ValueError: There are no images, or their classes are not the model's; the message says what to do.
    """
    root, parts = _folder(root)
    if held_out is not None:
        dataset = _validation(root, parts, model, held_out, seed)
    elif set(parts) == {'train'}:
        raise ValueError(
            f"'{root}' has {parts['train'].name}/ and no val/ or test/ to evaluate on. Give the folder of classes "
            'itself, or the share that was held out of training.')
    else:
        dataset = _dataset(parts.get('val') or parts.get('test') or root, model)
    return _loader(dataset, model, batch_size, workers, train=False)


def folder_loaders(
        root: Union[str, Path],
        model: Any,
        *,
        batch_size: int = 64,
        workers: int = 2,
        held_out: float = 0.1,
        auto_augment: Optional[str] = None,
        reprob: float = 0.,
        seed: int = 0,
) -> Tuple[Any, Any]:
    """Batches to train on (shuffled, augmented, the last incomplete one left out) and batches to validate on.

    Folders are parts of a data set, not classes, if they are called train, val or test (or training, valid, validation,
    eval, evaluation), hold folders and no images directly, and are at least two, or the only folders with images.

    Args:
        root: A folder with train/ and val/ of one sub-folder of images a class, or such a folder of classes itself
            (or train/ alone), of which a share is held out.
        model: timm model that will see the images.
        batch_size: Images per batch.
        workers: Worker processes.
        held_out: Share of each class held out, where there is no val/; at least one image of each class that has two.
        auto_augment: timm's policy of augmentation, such as 'rand-m9-mstd0.5-inc1' for RandAugment.
        reprob: Probability of erasing a part of an image.
        seed: Of the choice of images held out, and with several processes of their order.

    Returns:
        Two DataLoaders of (images [B, C, H, W], labels [B]) that share no image; of several processes, each trains on a
        part of its own.

    Raises:
        ValueError: There are no images, their classes are not the model's, none can be held out, or folders may be
            parts or classes; the message says what to do.
    """
    root, parts = _folder(root)
    datasets = [_dataset(_training(root, parts), model), _validation(root, parts, model, held_out, seed)]
    names: List[Dict[str, int]] = [dataset.reader.class_to_idx for dataset in datasets]
    if names[0] != names[1]:
        only = sorted(set(names[0]) ^ set(names[1]))
        raise ValueError(f"The training and validation folders of '{root}' have different classes: "
                         f"{', '.join(only[:5])} appear in only one.")
    if 'val' not in parts:
        _keep_share(datasets[0], True, held_out, seed)
    if auto_augment is not None and model.in_chans == 4:
        raise ValueError("timm's auto_augment is not for images with an alpha channel, and the model takes 4 channels. "
                         'Leave it out.')
    try:
        train_loader = _loader(
            datasets[0], model, batch_size, workers, train=True, auto_augment=auto_augment, re_prob=reprob)
    except (AssertionError, AttributeError, TypeError, ValueError) as e:  # how timm says that it knows no such policy
        raise ValueError(f"auto_augment '{auto_augment}' is no policy of timm's, such as 'rand-m9-mstd0.5-inc1' or "
                         "'original'.") from e
    if isinstance(train_loader.sampler, DistributedSampler):
        train_loader.sampler.seed = seed
    return train_loader, _loader(datasets[1], model, batch_size, workers, train=False)


def image_loader(
        root: Union[str, Path],
        model: Any,
        *,
        batch_size: int = 64,
        workers: int = 2,
) -> Any:
    """Batches of images to calibrate on (shuffled, augmented), whatever folders they lie in: labels are not looked at.

    Args:
        root: A folder of images, or of folders of images; of one with a train/ of classes, only that (see
            `folder_loaders`).
        model: timm model that will see the images.
        batch_size: Images per batch; fewer where there are fewer.
        workers: Worker processes.

    Returns:
        A DataLoader of (images [B, C, H, W], numbers that stand for nothing [B]).

    Raises:
        ValueError: There are no images, or folders may be parts or classes; the message says what to do.
    """
    root, parts = _folder(root)
    dataset = _dataset(parts.get('train', root), model, labelled=False)
    return _loader(dataset, model, min(batch_size, len(dataset)), workers, train=True)


def _folder(root: Union[str, Path]) -> Tuple[Path, Dict[str, Path]]:
    """A folder and its parts, by 'train', 'val' and 'test'; no parts if the folder holds the classes itself.

    A folder `train` may be a class, as in CIFAR-100: `folder_loaders` says what makes it a part.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"There is no folder '{root}'. Give a folder with one sub-folder of images per class.")
    folders = [child for child in sorted(root.iterdir()) if child.is_dir() and not child.name.startswith('.')]
    named = [child for child in folders if child.name.lower() in _PARTS]
    if not named:
        return root, {}
    others = [child for child in folders if child not in named and _has_images(child, below=True)]
    flat = [child for child in named if _has_images(child)]
    of_classes = [child for child in named if child not in flat and _has_images(child, below=True)]
    parts: Dict[str, Path] = {}
    for child in named if of_classes else flat:
        kind = _PARTS[child.name.lower()]
        if of_classes and kind in parts:
            raise ValueError(f"'{root}' has {parts[kind].name}/ and {child.name}/, two names of one part. Keep one.")
        parts[kind] = child
    if of_classes and others and len(of_classes) == 1:
        one = of_classes[0]
        raise ValueError(f"'{root}' has {one.name}/, which holds folders, beside {others[0].name}/. If it is a part of "
                         f"the data, give '{one}'; if it is a class, put its images directly into it.")
    if not of_classes and not others and len(parts) > 1:
        one = flat[0]
        raise ValueError(f"'{root}' has {' and '.join(f'{child.name}/' for child in flat)}, which hold images and no "
                         f"folders. If they are parts of the data, give one, such as '{one}'; if they are classes, "
                         'rename them.')
    return root, parts if of_classes else {}


def _has_images(folder: Path, below: bool = False) -> bool:
    """Whether there are images in a folder, or also below it; hidden ones do not count."""
    for _, folders, files in os.walk(folder, followlinks=True):
        if any(is_img_extension(Path(name).suffix.lower()) and not name.startswith('.') for name in files):
            return True
        folders[:] = [name for name in folders if below and not name.startswith('.')]
    return False


def _training(root: Path, parts: Dict[str, Path]) -> Path:
    if parts and 'train' not in parts:
        name = next(iter(parts.values())).name
        raise ValueError(f"'{root}' has {name}/ and no train/ to train on. Give a folder with both.")
    return parts.get('train', root)


def _validation(root: Path, parts: Dict[str, Path], model: Any, share: float, seed: int) -> Any:
    """The images of val/, or the share held out of those to train on."""
    if 'val' in parts:
        return _dataset(parts['val'], model)
    return _keep_share(_dataset(_training(root, parts), model), False, share, seed)


def _dataset(folder: Path, model: Any, labelled: bool = True) -> Any:
    mode = _MODES.get(model.in_chans)
    if mode is None:
        raise ValueError(f'Images in files are read with 1, 3 or 4 channels (grey, RGB, RGBA); the model takes '
                         f'{model.in_chans}. Train it on an .npz.')
    nothing = f"There are no images in '{folder}'. Give a folder with one sub-folder of images per class."
    try:
        dataset = create_dataset('', str(folder), search_split=False, input_img_mode=mode)
    except RuntimeError as e:
        raise ValueError(nothing) from e
    reader = dataset.reader
    names = list(reader.class_to_idx)
    seen = [(file, names[label]) for file, label in reader.samples if f'{os.sep}.' not in file[len(str(folder)):]]
    if not seen:
        raise ValueError(nothing)
    found = {name for _, name in seen}
    reader.class_to_idx = {name: i for i, name in enumerate(name for name in names if name in found)}
    reader.samples = [(file, reader.class_to_idx[name]) for file, name in seen]
    if not labelled:
        return dataset
    if '' in found:
        file = next(Path(file).name for file, name in seen if not name)
        raise ValueError(f"'{folder}' holds images that are in no class's folder, such as {file}. Put each image into "
                         'the folder of its class.')
    classes = len(found)
    if classes != model.num_classes:
        raise ValueError(
            f"'{folder}' has {classes} classes (sub-folders), the model has {model.num_classes}. "
            f'Give the folder that the model was made for, or create the model with num_classes={classes}.')
    return dataset


def _data_config(model: Any) -> Dict[str, Any]:
    cfg = resolve_input_data_config(model)  # mean and std have as many values as the model has channels
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)  # pretrained_cfg may have an older one
    return {**cfg, 'input_size': (model.in_chans, *(size or cfg['input_size'][1:]))}


def _world() -> Tuple[int, int]:
    """This process's number, and the number of processes."""
    running = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if running else (0, 1)


def _loader(dataset: Any, model: Any, batch_size: int, workers: int, train: bool, **augmentation: Any) -> Any:
    cfg = _data_config(model)
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
        distributed=train and _world()[1] > 1,
        persistent_workers=False,  # each epoch seeds its workers anew, so that a resumed run sees the same images
        device=torch.device('cpu'),
        use_prefetcher=False,
        **augmentation,
    )


def array_loaders(
        path: Union[str, Path],
        model: Any,
        *,
        batch_size: int = 64,
        held_out: float = 0.1,
        padding: int = 4,
        flip: float = 0.5,
        reprob: float = 0.,
        limit: Optional[int] = None,
        seed: int = 0,
) -> Tuple['ArrayLoader', 'ArrayLoader', 'ArrayLoader']:
    """Batches to train, to validate and to test on, of images that stay in memory, on the device of the model.

    Args:
        path: .npz with uint8 images x_train and x_test [N, S, S, C] and labels y_train and y_test [N]; S may differ
            from the size that the model takes, and grey images may be [N, S, S].
        model: timm model that will see the images.
        batch_size: Images per batch.
        held_out: Share of the training images held out, the last ones.
        padding: Pixels of the original images by which a crop may move.
        flip: Probability of a mirror image.
        reprob: Probability of erasing a part of an image.
        limit: Use that many images of each part only, to rehearse.
        seed: Of the order of the images.

    Returns:
        Three loaders; the first one shuffles and augments, and of several processes each gets a part of its own.

    Raises:
        ValueError: The file does not fit the model; the message says what was found.
    """
    keys = ('x_train', 'y_train', 'x_test', 'y_test')
    arrays = _read_arrays(path, keys)
    for key in ('x_train', 'x_test'):
        if arrays[key].ndim == 3:
            arrays[key] = arrays[key][..., None]
    x, y, x_test, y_test = (arrays[key] for key in keys)
    for images, labels in ((x, y), (x_test, y_test)):
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not len(labels) or labels.min() < 0:
            raise ValueError(f"'{path}' must hold labels [N], whole numbers from 0; got {labels.dtype} "
                             f'{list(labels.shape)}. Where they are [N, 1]: labels.reshape(-1).')
        good = images.ndim == 4 and images.dtype == np.uint8 and 0 not in images.shape and len(images) == len(labels)
        if not good or images.shape[3] != model.in_chans:
            other = f' Or create the model with in_chans={images.shape[3]}.' if good else ''
            raise ValueError(f"'{path}' must hold uint8 images [N, S, S, {model.in_chans}] with a label each; got "
                             f'{images.dtype} {list(images.shape)} and {len(labels)} labels.{other}')
        if int(labels.max()) >= model.num_classes:
            raise ValueError(f"'{path}' has label {int(labels.max())}, the model has {model.num_classes} classes. Give "
                             'the data that the model was made for, or create the model with its number of classes.')
    split = len(y) - _count_held_out(len(y), held_out)
    if split == len(y):
        raise ValueError(f"'{path}' has one image to train on, so none can be held out. Give more.")
    parts = ((x[:split], y[:split]), (x[split:], y[split:]), (x_test, y_test))
    train, val, test = (
        ArrayLoader(images[:limit], labels[:limit], model, batch_size, train=i == 0, padding=padding, flip=flip,
                    reprob=reprob, seed=seed)
        for i, (images, labels) in enumerate(parts))
    return train, val, test


def _read_arrays(path: Union[str, Path], keys: Tuple[str, ...]) -> Dict[str, Any]:
    """Arrays of an .npz; their sizes are checked before they get memory, and nothing is unpickled."""
    try:
        with ZipFile(path) as archive:
            members = {info.filename.removesuffix('.npy'): info for info in archive.infolist()}
            missing = [key for key in keys if key not in members]
            if not missing:
                packed, whole = os.path.getsize(path), sum(members[key].file_size for key in keys)
                if whole > 100 * packed + 2 ** 27:  # images shrink to a half; drawings in black and white to a tenth
                    raise ValueError(f'its {packed:,} bytes unpack to {whole:,}, as no images do')
                return {key: _read_array(archive, members[key]) for key in keys}
    except Exception as e:  # whatever a foreign file can raise
        raise ValueError(f"'{path}' cannot be read as .npz: {one_line(e)}") from e
    raise ValueError(f"'{path}' has no {missing[0]}; it must hold {', '.join(keys)}.")


def _read_array(archive: ZipFile, info: ZipInfo) -> Any:
    with archive.open(info) as f:
        major = np.lib.format.read_magic(f)[0]
        read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(f)
        there = info.file_size - f.tell()
    if dtype.hasobject:
        raise ValueError(f'{info.filename} holds Python objects, which are not read')
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != there:
        raise ValueError(f'{info.filename} says that it holds {dtype} {list(shape)}, and it has {there:,} bytes')
    with archive.open(info) as f:
        return np.lib.format.read_array(f, allow_pickle=False)


class ArrayLoader:
    """Batches (images [B, C, H, W], normalised; labels [B]) of uint8 images in memory, augmented on the device.

    The order of the images follows from `set_epoch` and the seed, what is done to them from torch's global generator.
    In training, an incomplete last batch is left out.

    Args:
        images: Images [N, S, S, C], uint8.
        labels: Labels [N].
        model: timm model that will see the images; they lie on its device.
        batch_size: Images per batch of this process.
        train: Shuffle and augment.
        padding: See `array_loaders`.
        flip: See `array_loaders`.
        reprob: See `array_loaders`.
        seed: Of the order of the images.
    """

    def __init__(
            self,
            images: Any,
            labels: Any,
            model: Any,
            batch_size: int,
            *,
            train: bool = False,
            padding: int = 4,
            flip: float = 0.5,
            reprob: float = 0.,
            seed: int = 0,
    ) -> None:
        cfg = _data_config(model)
        device = next(model.parameters()).device
        self.images = torch.as_tensor(np.ascontiguousarray(images)).permute(0, 3, 1, 2).contiguous().to(device)
        self.labels = torch.as_tensor(labels).long().to(device)
        self.mean, self.std = (torch.tensor(cfg[key], device=device).view(1, -1, 1, 1) for key in ('mean', 'std'))
        self.size, self.interpolation = cfg['input_size'][1:], cfg['interpolation']
        self.batch_size, self.train = batch_size, train
        self.padding, self.flip, self.reprob = padding, flip, reprob
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the images: it depends on the seed and the epoch alone."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.train:
            return len(self.labels) // (self.batch_size * _world()[1])
        return math.ceil(len(self.labels) / self.batch_size)

    def __iter__(self) -> Iterator[Tuple[Tensor, Tensor]]:
        for index in self.indices():
            images = self.images[index]
            yield self.prepare(self.augment(images) if self.train else images), self.labels[index]

    def indices(self) -> Iterator[Tensor]:
        """The numbers of the images of each batch."""
        n, (rank, world) = len(self.labels), _world() if self.train else (0, 1)
        order = torch.arange(n)
        if self.train:  # the same for all processes
            order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch))
        for i in range(len(self)):
            whole = order[i * self.batch_size * world:(i + 1) * self.batch_size * world]
            yield whole[rank::world].to(self.labels.device)

    def prepare(self, images: Tensor) -> Tensor:
        """Images as the model wants them, from uint8 images [B, C, S, S]."""
        pixels = images.float() / 255
        if pixels.shape[-2:] != tuple(self.size):
            mode = self.interpolation if self.interpolation in ('bilinear', 'bicubic') else 'bicubic'
            pixels = F.interpolate(pixels, size=tuple(self.size), mode=mode, antialias=True).clamp(0, 1)
        return (pixels - self.mean) / self.std

    def augment(self, images: Tensor) -> Tensor:
        """A random crop after padding, a random horizontal flip, and erasing, of each image [B, C, S, S] on its own."""
        B, _, H, W = images.shape
        device, p = images.device, self.padding
        shift = torch.randint(0, 2 * p + 1, (2, B, 1)).to(device)
        rows, cols = shift[0] + torch.arange(H, device=device), shift[1] + torch.arange(W, device=device)
        cols = torch.where((torch.rand(B, 1) < self.flip).to(device), cols.flip(1), cols)
        each = torch.arange(B, device=device)
        out = F.pad(images, (p,) * 4)[each[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
        if self.reprob > 0:
            # a box of 2 to 33 % of the image, as timm's RandomErasing, black; its sides within 1 : 2
            area, ratio = torch.empty(B).uniform_(0.02, 0.33), torch.empty(B).uniform_(-0.7, 0.7).exp()
            size = torch.stack([(area * ratio).sqrt() * H, (area / ratio).sqrt() * W]).clamp(min=1.)
            start = torch.rand(2, B) * (torch.tensor([[H], [W]]) - size).clamp_min(0.)
            erased = (torch.rand(B) < self.reprob)[:, None]
            inside = [((torch.arange(n) >= a[:, None]) & (torch.arange(n) < (a + s)[:, None]) & erased).to(device)
                      for n, a, s in zip((H, W), start, size, strict=True)]
            out = out.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)
        return out


class MixupLoader:
    """Batches of another loader, mixed by timm's Mixup: labels become class probabilities [B, classes].

    Args:
        loader: Batches of an even number of images.
        classes: Number of classes.
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        smoothing: Label smoothing.
        prob: Share of the batches that are mixed.
    """

    def __init__(
            self,
            loader: Any,
            classes: int,
            mixup: float = 0.,
            cutmix: float = 0.,
            smoothing: float = 0.,
            prob: float = 1.,
    ) -> None:
        size = getattr(loader, 'batch_size', None)
        if size is not None and size % 2:
            raise ValueError(f'mixup takes pairs of images: batch_size must be even; got {size}.')
        self.loader = loader
        mixes = mixup > 0 or cutmix > 0
        self.mix = Mixup(
            mixup_alpha=mixup if mixes else 1., cutmix_alpha=cutmix, prob=prob if mixes else 0.,  # smoothing alone
            label_smoothing=smoothing, num_classes=classes)

    @property
    def sampler(self) -> Optional[Sampler]:
        return getattr(self.loader, 'sampler', None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader."""
        if hasattr(self.loader, 'set_epoch'):
            self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Tuple[Tensor, Tensor]]:
        for images, labels in self.loader:
            yield self.mix(images.clone(), labels)


def _keep_share(dataset: Any, train: bool, share: float, seed: int) -> Any:
    """Leave the images to train on, or the share of each class held out; at least one of each class is trained on."""
    by_class: Dict[int, List[Tuple[str, int]]] = {}
    for sample in dataset.reader.samples:
        by_class.setdefault(sample[1], []).append(sample)
    part = []
    for label, members in sorted(by_class.items()):
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed + label)).tolist()
        held = _count_held_out(len(members), share)
        part += [members[i] for i in sorted(order[held:] if train else order[:held])]
    if not part:
        raise ValueError(f"Each class of '{dataset.reader.root}' has one image, so none can be held out. Give more "
                         'images, or a val/ beside train/.')
    dataset.reader.samples = part
    return dataset


def _count_held_out(count: int, share: float) -> int:
    """Number of images of `count` that are held out: at least one, and not all."""
    if not 0 < share < 1:
        raise ValueError(f'The share held out must lie between 0 and 1; got {share!r}.')
    return min(count - 1, max(1, round(share * count)))
