"""How a model expects its images."""
import warnings
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from timm.data import resolve_input_data_config
from torch import Tensor

__all__ = ['count_held_out', 'data_config', 'labels_by_name', 'renormalisation', 'warn_of_other_classes']


def data_config(model: Any) -> Dict[str, Any]:
    cfg = resolve_input_data_config(model)  # mean and std have as many values as the model has channels
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)  # pretrained_cfg may have an older one
    return {**cfg, 'input_size': (model.in_chans, *(size or cfg['input_size'][1:]))}


def labels_by_name(model: Any, names: Optional[Sequence[str]]) -> Optional[List[int]]:
    """The label that a model has for each class of a data set, if both name the same classes in different orders."""
    own = _label_names(model)
    places = {name: i for i, name in enumerate(own or ())}
    if names is None or own is None or own == list(names) or sorted(places) != sorted(names):
        return None
    return [places[name] for name in names]


def warn_of_other_classes(model: Any, names: Optional[Sequence[str]], data: Any) -> None:
    """Warn if a data set has as many classes as a model, but names others."""
    own = _label_names(model)
    if names is None or own is None or own == list(names):
        return
    here, there = next((pair for pair in zip(names, own, strict=False) if pair[0] != pair[1]), (names[-1], own[-1]))
    warnings.warn(f"The classes of '{data}' are not those of the model, so labels are compared by number: '{here}' "
                  f"counts as '{there}'.", RuntimeWarning, stacklevel=3)


def _label_names(model: Any) -> Optional[List[str]]:
    names = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names')
    return list(names) if isinstance(names, (list, tuple)) and len(names) == model.num_classes else None


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
