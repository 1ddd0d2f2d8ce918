"""How a model expects its images, which are opened here, and which label it has for each class."""
import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_input_data_config
from timm.models import get_model_input_config
from timm.utils import unwrap_model
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop, normalize

from ..settings import one_line, printable

LONGEST = 500  # a side of an image, in lengths of the other
_MODES = {1: 'L', 3: 'RGB', 4: 'RGBA'}  # Pillow's, by the number of channels


def data_config(model: Any) -> dict[str, Any]:
    """timm's settings for the images of a model: size [C, H, W], mean, std, interpolation and crop."""
    model = unwrap_model(model)  # timm asks for a truth value, which a compiled model lacks
    cfg = resolve_input_data_config(model)  # mean and std have as many values as the model has channels
    channels, *size = get_model_input_config(model)['input_size']  # pretrained_cfg may have an older one
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None) or size  # of one not made by timm's factory
    return {**cfg, 'input_size': (channels, *size)}


def cfg_of(model: Any) -> Any:
    return getattr(model, 'pretrained_cfg', None) or {}


def dtype_of(model: Any) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def image_mode(channels: int) -> str:
    if channels not in _MODES:
        raise ValueError(f'Image files have 1, 3 or 4 channels; the model takes {channels}. Give tensors or an .npz.')
    return _MODES[channels]


def read_image(file: str | Path, mode: str, least: int = 1024) -> Image.Image:
    """An image file in one of Pillow's modes, turned upright, with 16 bits scaled to 8; or ValueError."""
    try:
        with Image.open(file) as image:
            if image.format == 'EPS':
                raise ValueError('it is a program')
            image.draft(None, (least, least))  # a large JPEG is read smaller
            upright: Any = image
            with suppress(Exception):  # of damaged EXIF
                upright = ImageOps.exif_transpose(image)
            if image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM')):
                upright = Image.fromarray((np.asarray(upright) / 257).round().astype(np.uint8))
            if max(upright.size) > LONGEST * min(upright.size):
                raise ValueError(f'a side is more than {LONGEST} times the other')
            if upright.mode in ('I', 'F'):
                raise ValueError('its pixels have no known range; save it with 8 or 16 bits')
            return upright.convert(mode)
    except Exception as e:  # of a foreign file
        raise ValueError(one_line(f"'{file}' cannot be read as an image: {e}")) from None


def open_image(file: str | Path, cfg: dict[str, Any]) -> Tensor:
    """An image file as a data_config says [C, H, W], in float32; or ValueError."""
    size = cfg['input_size']
    return create_transform(**cfg, is_training=False)(read_image(file, image_mode(size[0]), 2 * max(size)))


def preparation(model: Any) -> Callable[[Tensor], Tensor]:
    """What makes of uint8 images [B, C, S, S] the input [B, C, H, W] that a model expects.

    It is what `open_image` makes of a file of such an image, but for rounding to 8 bits.
    """
    cfg, dtype = data_config(model), dtype_of(model)
    size, mode = list(cfg['input_size'][1:]), 'bilinear' if cfg['interpolation'] == 'bilinear' else 'bicubic'
    whole = [math.floor(side / cfg['crop_pct']) for side in size]
    whole = whole if cfg['crop_mode'] == 'squash' else [max(whole)] * 2

    def prepare(images: Tensor) -> Tensor:
        pixels = images.float() / 255
        if pixels.shape[-2:] != torch.Size(whole):
            pixels = F.interpolate(pixels, size=whole, mode=mode, antialias=True).clamp(0, 1)
        return normalize(center_crop(pixels, size), cfg['mean'], cfg['std']).to(dtype)
    return prepare


def renormalisation(model: Any, teacher: Any) -> Callable[[Tensor], Tensor] | None:
    """From a model's normalisation of images [B, C, H, W] to its teacher's; None if equal, or if one gives none."""
    models = [unwrap_model(each) for each in (model, teacher)]
    if any(key not in cfg_of(m) for m in models for key in ('mean', 'std')):
        return None
    cfgs = list(map(resolve_input_data_config, models))
    (mean, mean_t), (std, std_t) = (
        [torch.tensor(cfg[key]).view(1, -1, 1, 1) for cfg in cfgs] for key in ('mean', 'std'))
    if mean.shape != mean_t.shape:
        raise ValueError(f'The teacher takes images with {mean_t.shape[1]} channels, the model with {mean.shape[1]}. '
                         'Give a teacher with as many channels.')
    if torch.equal(mean, mean_t) and torch.equal(std, std_t):
        return None
    scale, shift = std / std_t, (mean - mean_t) / std_t
    return lambda images: images * scale.to(images) + shift.to(images)


def model_name(model: Any) -> str:
    cfg = cfg_of(model)
    name = cfg.get('architecture') or type(model).__name__
    tag = '' if name == 'odevit_converted' else cfg.get('tag')  # else it is that of the base
    return f'{name}.{tag}' if tag else name


def check_labels(labels: Tensor, classes: int | None = None) -> Tensor:
    """Labels [B] in int64; ValueError unless they are whole numbers from 0, and those of a model's classes."""
    if classes == 1:
        raise ValueError('The model has one output (num_classes=1), so there is no class to be right. Compare its '
                         'outputs with evaluate_embeddings (odevit evaluate --embedding).')
    whole = labels.long()
    low, high = int(whole.min()), int(whole.max())
    if labels.is_floating_point() or low < 0 or high >= (classes or math.inf):
        to = f' to {classes - 1}, the classes of the model' if classes else ''
        raise ValueError(f'Labels must be whole numbers from 0{to}; got {labels.dtype} from {low} to {high}.')
    return whole


def class_names(model: Any) -> list[str] | None:
    names: Any = cfg_of(model).get('label_names')
    good = isinstance(names, (list, tuple)) and len(names) == model.num_classes  # timm allows other forms, too
    return list(map(str, names)) if good else None


def imagenet_of(model: Any) -> ImageNetInfo | None:
    """timm's names of the classes of a model trained on ImageNet, by its tag, if it has none of its own."""
    subset = infer_imagenet_subset({'num_classes': model.num_classes})
    known = not class_names(model) and re.search(r'in\d+k', str(cfg_of(model).get('tag')))
    return ImageNetInfo(subset) if subset and known else None


def check_names(names: Sequence[str], source: Any) -> None:
    """Refuse names with which a saved model would not load."""
    for name in names:
        if not printable(name) or '\n' in name:
            raise ValueError(f"'{source}' has the class {name!r}, whose name cannot be printed. Rename it.")


def labels_for(model: Any, names: Sequence[str] | None, number: int, source: Any) -> list[int] | None:
    """The label that a model has for each class of some data, by name; None if it knows as many, and not by name."""
    known, imagenet = model.num_classes, imagenet_of(model)
    own = imagenet.label_names() if imagenet else class_names(model)
    if own and names and {*names} <= {*own} and len({*names}) == len(names):
        labels = {name: i for i, name in enumerate(own)}
        if twice := [name for i, name in enumerate(own) if labels[name] > i and name in names]:
            raise ValueError(f"The model has two classes called '{twice[0]}', so the name does not say which. Leave it "
                             'out.')
        return [labels[name] for name in names]
    if number > known or (names is not None and number < known):
        raise ValueError(f"'{source}' has {number} classes, but the model has {known}. Give data with classes of the "
                         f'model, or fine-tune it first: odevit finetune MODEL {source} OUT')
    return None


def warn_of_other_classes(model: Any, names: Sequence[str] | None, data: Any) -> None:
    own = class_names(model)
    if names and own and own != list(names):
        warnings.warn(f"The classes of '{data}' are not those of the model, so labels are compared by number.",
                      RuntimeWarning, stacklevel=3)
