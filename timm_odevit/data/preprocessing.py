"""How a model expects its images."""
from typing import Any, Dict, Optional, Tuple

import torch
from timm.data import resolve_input_data_config
from torch import Tensor

__all__ = ['count_held_out', 'data_config', 'renormalisation']


def data_config(model: Any) -> Dict[str, Any]:
    cfg = resolve_input_data_config(model)  # mean and std have as many values as the model has channels
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)  # pretrained_cfg may have an older one
    return {**cfg, 'input_size': (model.in_chans, *(size or cfg['input_size'][1:]))}


def count_held_out(count: int, share: float) -> int:
    """Return how many of `count` images are held out: at least one, but not all."""
    if not 0 < share < 1:
        raise ValueError(f'The share held out must lie between 0 and 1; got {share!r}.')
    return min(count - 1, max(1, round(share * count)))


def renormalisation(model: Any, teacher: Any) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """Return scale and shift [1, C, 1, 1] from images normalised for a model to images normalised for its teacher.

    Returns:
        Two tensors; None twice if both expect the same, or if one does not say what it expects.

    Raises:
        ValueError: They take images with different numbers of channels.
    """
    if any(key not in (getattr(m, 'pretrained_cfg', None) or {}) for m in (model, teacher) for key in ('mean', 'std')):
        return None, None
    cfgs = [resolve_input_data_config(m) for m in (model, teacher)]
    mean, mean_t = (torch.tensor(cfg['mean']).view(1, -1, 1, 1) for cfg in cfgs)
    std, std_t = (torch.tensor(cfg['std']).view(1, -1, 1, 1) for cfg in cfgs)
    if mean.shape != mean_t.shape:
        raise ValueError(f'The teacher takes images with {mean_t.shape[1]} channels, the model with {mean.shape[1]}. '
                         'Give a teacher with as many channels as the model.')
    if torch.equal(mean, mean_t) and torch.equal(std, std_t):
        return None, None
    return std / std_t, (mean - mean_t) / std_t
