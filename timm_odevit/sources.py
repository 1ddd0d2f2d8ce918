"""Where a saved model comes from, a folder or the Hub: its config.json may be a stranger's, its weights broken."""
import hashlib
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Union

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg

from .config import PREFIX

__all__ = ['CONFIG', 'WEIGHTS', 'check_args', 'check_size', 'check_whole', 'one_line', 'saved_in', 'weights_file']

CONFIG, WEIGHTS = 'config.json', 'model.safetensors'
# no model of timm's comes near these
_LARGEST = {'depth': 256, 'depths': 64, 'num_blocks': 256, 'layers': 256, f'{PREFIX}steps': 10_000,
            f'{PREFIX}phases': 256, 'num_classes': 10_000_000}
_LARGEST_NUMBER = 100_000
_LARGEST_MODEL = 2 ** 31  # numbers in all tensors together
_NESTED, _LONGEST = 4, 10_000
# keywords that choose files, or what is made of a model, which is for the caller to say
_CALLER = (
    'build', 'cache_dir', 'checkpoint_path', 'device', 'dtype', 'exportable', 'feature_cfg', 'feature_cls',
    'features_only', 'file', 'kwargs_filter', 'named', 'no_jit', 'out_indices', 'pretrained', 'pretrained_cfg',
    'pretrained_cfg_overlay', 'pretrained_filter_fn', 'pretrained_model_args', 'pretrained_strict', 'pruned',
    'scriptable', 'state_dict', 'url', 'variant')
_ABOUT_FILES = ('url', 'state_dict', 'hf_hub_filename', 'custom_load')
_MODES = {'interpolation': ('bicubic', 'bilinear', 'nearest', 'lanczos', 'box', 'hamming', 'random'),
          'crop_mode': ('center', 'squash', 'border', 'random')}


def saved_in(cfg: Union[str, Dict[str, Any], PretrainedCfg, None]) -> str:
    """The folder or the Hub repository whose config.json describes a model; '' for a model of the registry."""
    if not isinstance(cfg, dict):
        return ''
    return str(cfg.get({'hf-hub': 'hf_hub_id', 'local-dir': 'file'}.get(cfg.get('source') or '', ''), ''))


def check_args(where: str, cfg: Dict[str, Any], args: Any) -> None:
    """Refuse a config.json that no saved model has.

    Args:
        where: Folder or repository, for messages.
        cfg: Its `pretrained_cfg`.
        args: Its `model_args`.

    Raises:
        ValueError: An entry is unknown, of the wrong kind, too large, or for the caller to say.
    """
    known = {field.name for field in fields(PretrainedCfg)}
    for name, value in cfg.items():
        if name not in known:
            raise _refused(where, f'has an unknown entry {_shown(name)} in pretrained_cfg')
        if name in _ABOUT_FILES and value:
            raise _refused(where, f"says where weights lie or how they are read ('{name}')")
        allowed = _allowed(name, value)
        if allowed:
            raise _refused(where, f'has {name} {_shown(value)}; it takes {allowed}')
    if not isinstance(cfg.get('num_classes'), int):
        raise _refused(where, f"has num_classes {_shown(cfg.get('num_classes'))}; it takes a whole number")
    _check_keywords(where, args)


def _check_keywords(where: str, args: Any) -> None:
    if not isinstance(args, dict):
        raise _refused(where, f'has {_shown(args)} in the place of keywords')
    for name, value in args.items():
        if name in _CALLER:
            raise _refused(where, f"gives '{name}', which is for the caller of timm.create_model to say")
        if name == 'base_args' and value is not None:
            _check_keywords(where, value)
        else:
            _check(where, name, value)


def _allowed(name: str, value: Any) -> str:
    """What an entry of pretrained_cfg may be, if it is something else; else ''."""
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
        return '' if _is_number(value) and 0.1 <= value <= 2 else 'a share from 0.1 to 2'
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
    """Refuse a model, built on the meta device, that is larger than its weights, or without them than any of timm's.

    Raises:
        ValueError: Its tensors have more numbers than the file, or than 2 ** 31.
    """
    total, limit = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())), _LARGEST_MODEL
    if file:
        with safe_open(file, framework='pt') as f:
            stored = sum(math.prod(f.get_slice(name).get_shape()) for name in f.keys())
        limit = min(limit, 2 * stored + 10 ** 6)  # some buffers are not stored
    if total > limit:
        raise ValueError(f'A model of {total:,} numbers in its tensors; at most {limit:,} are built for these weights.')


def weights_file(cfg: Dict[str, Any], cache_dir: Union[str, Path, None] = None) -> Optional[str]:
    """The file with the weights of a model, downloaded if need be, and whole.

    Only safetensors are read from a saved folder or from the Hub: reading a pickle can run code.

    Args:
        cfg: The model's pretrained_cfg; source 'local-dir' or 'hf-hub', or else its file, or else its hf_hub_id.
        cache_dir: Folder for downloads instead of the Hub's own cache.

    Returns:
        Path of the file; None where timm is to look itself (`state_dict`, a file or a URL that the caller gave).

    Raises:
        ValueError: There is no model.safetensors, or it is not whole.
        OSError: It could not be downloaded; the message is one line.
    """
    source, file, repo = cfg.get('source') or '', cfg.get('file'), cfg.get('hf_hub_id')
    name = str(cfg.get('hf_hub_filename') or WEIGHTS)
    if source == 'local-dir':
        path = Path(str(file)) / name
        if not path.is_file():
            raise ValueError(f"'{file}' holds no {name}. {_no_pickle(Path(str(file)).glob('*'))}")
        check_whole(path)
        return str(path)
    if source != 'hf-hub' and (cfg.get('state_dict') or file):
        if file and str(file).endswith('.safetensors'):
            check_whole(Path(str(file)))
        return None
    if not repo:
        return None
    if not name.endswith('.safetensors'):
        raise ValueError(f"'{name}' of {repo} is not read. {_no_pickle([])}")
    path = _download(str(repo), name, cache_dir)
    try:
        check_whole(path)
    except ValueError as damage:
        try:
            path = _download(str(repo), name, cache_dir, force_download=True)
        except OSError as e:
            raise OSError(f'{damage} It could not be downloaded again: {one_line(e)}') from e
        try:
            check_whole(path)
        except ValueError as e:
            for file in {path, path.resolve()}:
                file.unlink()
            raise ValueError(f'{e} It came twice so from {repo}, and was taken out of the cache again.') from None
    return str(path)


def _download(repo: str, file: str, cache_dir: Union[str, Path, None], **kwargs: Any) -> Path:
    name, _, revision = repo.partition('@')
    try:
        return Path(hf_hub_download(name, file, revision=revision or None, cache_dir=cache_dir, **kwargs))
    except LocalEntryNotFoundError as e:
        raise OSError(f'{file} of {repo} is not on this machine, and cannot be downloaded: {one_line(e)}') from e
    except EntryNotFoundError:
        raise ValueError(f'{repo} on the Hub holds no {file}. {_no_pickle([])}') from None
    except HFValidationError:  # what the client says of names
        raise
    except Exception as e:  # which errors of the network there are depends on the client's version
        raise OSError(f'{file} of {repo} could not be downloaded: {one_line(e)}') from e


def check_whole(path: Path) -> None:
    """Raise ValueError for a damaged safetensors file.

    Its header is read; of a download, whose name in the cache is its SHA-256 on the Hub, every byte.
    """
    try:
        with safe_open(path, framework='pt') as f:
            others = {'model', 'model_ema', 'state_dict', 'state_dict_ema'}.intersection(f.keys())
    except SafetensorError as e:
        raise ValueError(f"'{path}' is not a whole safetensors file ({one_line(e)}).") from None
    if others:  # timm would look for the weights under such a name
        raise ValueError(f"'{path}' are not the weights of one model: it has a tensor named {others.pop()}.")
    expected = path.resolve().name
    if re.fullmatch('[0-9a-f]{64}', expected):
        found = hashlib.sha256()
        with open(path, 'rb') as f:
            while block := f.read(2 ** 24):
                found.update(block)
        if found.hexdigest() != expected:
            raise ValueError(f"'{path}' is damaged: its SHA-256 is {found.hexdigest()}, on the Hub {expected}.")


def _no_pickle(names: Iterable[Path]) -> str:
    pickles = sorted(path.name for path in names if path.suffix in ('.bin', '.pth', '.pt', '.pkl', '.ckpt'))
    found = f"{', '.join(pickles)} is not read, because reading a pickle can run code. " if pickles else ''
    return f'{found}Save the model with timm_odevit.save_pretrained(model, folder).'


def _check(where: str, name: str, value: Any, nested: int = 0) -> None:
    if not isinstance(name, str) or not re.fullmatch(r'[\w.-]{1,100}', name):
        raise _refused(where, f'has an unknown keyword {_shown(name)}')
    if isinstance(value, (list, tuple, dict)):
        if nested == _NESTED or len(value) > _LONGEST:
            raise _refused(where, f'has {name} with {len(value)} entries, {nested} deep')
        for key, entry in value.items() if isinstance(value, dict) else ((name, v) for v in value):
            _check(where, key, entry, nested + 1)
    elif isinstance(value, str) and (len(value) > 500 or not value.isprintable()):
        raise _refused(where, f'has {name} {_shown(value)}')
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        largest = _LARGEST.get(name, _LARGEST_NUMBER)
        if not _is_number(value) or abs(value) > largest or (isinstance(value, int) and value < 0):
            raise _refused(where, f'has {name} {_shown(value)}; numbers from 0 to {largest:,} are taken')


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (
        isinstance(value, int) or math.isfinite(value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:60]}...'


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f"The config.json of '{where}' {why}. No saved model has that, so nothing was built.")


def one_line(error: BaseException) -> str:
    """An error's message in one line of at most 400 characters."""
    text = ' '.join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f'{text[:400]} ...'
