"""What an untrusted config.json may say."""
import math
import re
from dataclasses import fields
from typing import Any, Dict, Optional

import torch
from safetensors import safe_open
from timm.models import PretrainedCfg

from ..errors import shown
from ..ode.config import PREFIX

__all__ = ['check_args', 'check_size']

# no timm model comes near these
_LARGEST = {'depth': 256, 'depths': 64, 'num_blocks': 256, 'layers': 256, f'{PREFIX}steps': 10_000,
            f'{PREFIX}phases': 256, 'num_classes': 10_000_000}
_LARGEST_NUMBER = 100_000
_LARGEST_MODEL = 2 ** 31  # numbers in all tensors together
_NESTED, _LONGEST = 4, 10_000
# keywords that choose files, or how a model is made: only the caller may give them
_CALLER = (
    'build', 'cache_dir', 'checkpoint_path', 'device', 'dtype', 'exportable', 'feature_cfg', 'feature_cls',
    'features_only', 'file', 'kwargs_filter', 'named', 'no_jit', 'out_indices', 'out_times', 'pretrained',
    'pretrained_cfg', 'pretrained_cfg_overlay', 'pretrained_filter_fn', 'pretrained_model_args', 'pretrained_strict',
    'pruned', 'scriptable', 'state_dict', 'url', 'variant')
_ABOUT_FILES = ('url', 'state_dict', 'hf_hub_filename', 'custom_load')
_MODES = {'interpolation': ('bicubic', 'bilinear', 'nearest', 'lanczos', 'box', 'hamming', 'random'),
          'crop_mode': ('center', 'squash', 'border', 'random')}


def check_args(where: str, cfg: Dict[str, Any], args: Any) -> None:
    """Refuse a config.json that no saved model would have.

    Args:
        where: Folder or repository, for messages.
        cfg: Its `pretrained_cfg`.
        args: Its `model_args`.

    Raises:
        ValueError: An entry is unknown, of the wrong type, too large, or one that only the caller may give.
    """
    known = {field.name for field in fields(PretrainedCfg)}
    for name, value in cfg.items():
        if name not in known:
            raise _refused(where, f'has an unknown entry {shown(name)} in pretrained_cfg')
        if name in _ABOUT_FILES and value:
            raise _refused(where, f"says where the weights are or how to read them ('{name}')")
        allowed = _allowed(name, value)
        if allowed:
            raise _refused(where, f'has {name} {shown(value)}; expected {allowed}')
    if not isinstance(cfg.get('num_classes'), int):
        raise _refused(where, f"has num_classes {shown(cfg.get('num_classes'))}; expected a whole number")
    _check_keywords(where, args)


def _check_keywords(where: str, args: Any) -> None:
    if not isinstance(args, dict):
        raise _refused(where, f'has {shown(args)} instead of keywords')
    for name, value in args.items():
        if name in _CALLER:
            raise _refused(where, f"gives '{name}', which only the caller of timm.create_model may give")
        if name == 'base_args' and value is not None:
            _check_keywords(where, value)
        else:
            _check(where, name, value)


def _allowed(name: str, value: Any) -> str:
    """Say what an entry of pretrained_cfg must be, if it is not; else ''."""
    if value is None:
        return ''
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if name in ('input_size', 'test_input_size', 'min_input_size'):
        good = len(values) == 3 and all(type(v) is int and 0 < v <= _LARGEST_NUMBER for v in values)
        return '' if good else f'three sizes from 1 to {_LARGEST_NUMBER:,}'
    if name in ('mean', 'std'):
        good = len(values) > 0 and all(_is_number(v) and (v > 0 or name == 'mean') for v in values)
        return '' if good else 'a number for each channel'
    if name.endswith('crop_pct'):
        return '' if _is_number(value) and 0.1 <= value <= 2 else 'a number from 0.1 to 2'
    if name in _MODES:
        return '' if value in _MODES[name] else ', '.join(_MODES[name])
    if name in ('num_classes', 'label_offset'):
        return '' if type(value) is int and -1 <= value <= _LARGEST['num_classes'] else 'a number of classes'
    if name == 'license':
        return '' if isinstance(value, str) else 'the name of a licence'
    if name in ('classifier', 'first_conv'):
        return '' if all(isinstance(v, str) for v in values) else 'names of modules'
    if name.startswith('label_'):
        return '' if isinstance(value, (list, tuple, dict)) else 'a name for each class'
    return ''


def check_size(model: torch.nn.Module, file: Optional[str]) -> None:
    """Refuse a model, built on the meta device, that is larger than its weights or, without them, than any of timm's.

    Raises:
        ValueError: Its tensors hold more than 2 ** 31 numbers, or more than twice the file's plus 10 ** 6.
    """
    total, limit = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())), _LARGEST_MODEL
    if file:
        with safe_open(file, framework='pt') as f:
            stored = sum(math.prod(f.get_slice(name).get_shape()) for name in f.keys())
        limit = min(limit, 2 * stored + 10 ** 6)  # some buffers are not stored
    if total > limit:
        raise ValueError(f'The model has {total:,} numbers in its tensors; at most {limit:,} are allowed for '
                         'these weights.')


def _check(where: str, name: str, value: Any, nested: int = 0) -> None:
    if not isinstance(name, str) or not re.fullmatch(r'[\w.-]{1,100}', name):
        raise _refused(where, f'has an unknown keyword {shown(name)}')
    if isinstance(value, (list, tuple, dict)):
        if nested == _NESTED or len(value) > _LONGEST:
            raise _refused(where, f'has {name} with {len(value)} entries, nested {nested} deep')
        for key, entry in value.items() if isinstance(value, dict) else ((name, v) for v in value):
            _check(where, key, entry, nested + 1)
    elif isinstance(value, str) and (len(value) > 500 or not value.isprintable()):
        raise _refused(where, f'has {name} {shown(value)}')
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        largest = _LARGEST.get(name, _LARGEST_NUMBER)
        if not _is_number(value) or abs(value) > largest or (isinstance(value, int) and value < 0):
            raise _refused(where, f'has {name} {shown(value)}; numbers from 0 to {largest:,} are allowed')


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (
        isinstance(value, int) or math.isfinite(value))


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f"The config.json of '{where}' {why}. No saved model has that, so nothing was built.")
