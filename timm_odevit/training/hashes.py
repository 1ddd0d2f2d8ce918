"""Hashes by which a resumed run and a cache recognise models and data."""
import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable

import torch
from torch import Tensor, nn

from ..data.arrays import ArrayLoader
from ..ode.blocks import find_ode_blocks
from ..saving.save import structure
from .loaders import chain

__all__ = ['fingerprint', 'hash_of', 'hash_of_data', 'made_of']


def hash_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the concatenated bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model: types and settings of its modules; names, shapes, dtypes and bytes of its tensors."""
    found = hashlib.sha256('\n'.join(structure(model)).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(f'{name} {list(tensor.shape)} {tensor.dtype} {hash_of([tensor])}'.encode())
    return found.hexdigest()


def made_of(model: nn.Module, teacher: nn.Module, images: Any) -> Dict[str, Any]:
    """What a calibration must find unchanged to be resumed: the teacher, what the student keeps of it, the images.

    Of images in a tensor, 64 count; of a loader that is not of this package or of timm, only the length.
    """
    learned = {id(p) for ode in find_ode_blocks(model) for p in ode.shared.parameters()}
    if isinstance(images, Tensor):
        data = hash_of([torch.tensor(images.shape), images[::max(1, len(images) // 64)]])
    else:
        plain: Any = chain(images)[-1]
        known = isinstance(plain, ArrayLoader) or hasattr(getattr(plain, 'dataset', None), 'reader')
        data = hash_of_data(plain) if known else f'of {len(images)} batches'
    return {'student sha256': hash_of(p for p in model.parameters() if id(p) not in learned),
            'teacher sha256': fingerprint(teacher), 'images sha256': data}


def hash_of_data(*loaders: Any) -> str:
    """SHA-256 of the images and labels in memory, or of the names and labels of the files."""
    found = hashlib.sha256()
    for loader in loaders:
        plain = chain(loader)[-1]
        if isinstance(plain, ArrayLoader):
            found.update(hash_of([plain.images, plain.labels]).encode())
        else:
            files = [[*Path(path).parts[-2:], label] for path, label in plain.dataset.reader.samples]
            found.update(json.dumps(files).encode())
    return found.hexdigest()
