"""Where a saved model comes from, a folder or the Hub: its config.json may be a stranger's, its weights broken."""
import hashlib
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Union

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg

from .config import PREFIX

__all__ = ['WEIGHTS', 'check_args', 'check_size', 'one_line', 'saved_in', 'weights_file']

WEIGHTS = 'model.safetensors'
# no model of timm's comes near these
_LARGEST = {'depth': 1024, 'depths': 1024, 'num_blocks': 1024, 'layers': 1024, f'{PREFIX}steps': 10_000,
            f'{PREFIX}phases': 1024, 'num_classes': 10_000_000}
_LARGEST_NUMBER = 100_000
_LARGEST_MODEL = 2 ** 34  # numbers in all tensors together
_NESTED, _LONGEST = 4, 10_000
# keywords that choose files or what is loaded, which is for the caller to say
_CALLER = ('cache_dir', 'checkpoint_path', 'exportable', 'file', 'pretrained', 'pretrained_cfg',
           'pretrained_cfg_overlay', 'pretrained_filter_fn', 'pretrained_strict', 'scriptable', 'state_dict', 'url')
_ABOUT_FILES = ('url', 'state_dict', 'hf_hub_filename', 'custom_load')


def saved_in(cfg: Union[str, Dict[str, Any], PretrainedCfg, None]) -> str:
    """The folder or the Hub repository whose config.json describes a model; '' for a model of the registry."""
    if not isinstance(cfg, dict):
        return ''
    return str(cfg.get({'hf-hub': 'hf_hub_id', 'local-dir': 'file'}.get(cfg.get('source') or '', ''), ''))


def check_args(where: str, cfg: Dict[str, Any], args: Dict[str, Any]) -> None:
    """Refuse a config.json that no saved model has.

    Args:
        where: Folder or repository, for messages.
        cfg: Its `pretrained_cfg`.
        args: Its `model_args`, with what the caller changed.

    Raises:
        ValueError: An entry is unknown, of the wrong kind, too large, or about files.
    """
    known = {field.name for field in fields(PretrainedCfg)}
    for name, value in cfg.items():
        if name not in known:
            raise _refused(where, f"has an unknown entry '{name}' in pretrained_cfg")
        if name in _ABOUT_FILES and value:
            raise _refused(where, f"says where weights lie or how they are read ('{name}')")
        if name not in ('file', 'hf_hub_id', 'label_names', 'label_descriptions'):
            _check(where, name, value)
    for name, kind, length in (('input_size', int, 3), ('mean', float, None), ('std', float, None)):
        values = cfg.get(name, (1, 1, 1))
        if not isinstance(values, (list, tuple)) or length not in (None, len(values)) or not all(
                _is_number(v) and isinstance(v, (kind, int)) and (v > 0 or name == 'mean') for v in values):
            needed = 'three sizes' if length else 'numbers'
            raise _refused(where, f'has {name} {_shown(values)}, and {needed} are needed')
    for name, value in args.items():
        if name in _CALLER:
            raise _refused(where, f"gives '{name}', which is for the caller of timm.create_model to say")
        _check(where, name, value)
        if name == 'base_args':
            if not isinstance(value, dict):
                raise _refused(where, f'has base_args {_shown(value)}, and keywords are needed')
            check_args(where, {}, value)


def check_size(model: torch.nn.Module) -> None:
    """Refuse a model, built on the meta device, that no machine could hold.

    Raises:
        ValueError: Its tensors have more than 2 ** 34 numbers.
    """
    total = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if total > _LARGEST_MODEL:
        raise ValueError(f'A model of {total:,} numbers in its tensors; at most {_LARGEST_MODEL:,} are built.')


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
    if source == 'local-dir':
        path = Path(str(file)) / WEIGHTS
        if not path.is_file():
            raise ValueError(f"'{file}' holds no {WEIGHTS}. {_no_pickle(Path(str(file)).glob('*'))}")
        _check_whole(path)
        return str(path)
    if source != 'hf-hub' and (cfg.get('state_dict') or file):
        if file and str(file).endswith('.safetensors'):
            _check_whole(Path(str(file)))
        return None
    if not repo:
        return None
    path = _download(str(repo), cache_dir)
    try:
        _check_whole(path)
    except ValueError:
        path = _download(str(repo), cache_dir, force_download=True)
        try:
            _check_whole(path)
        except ValueError as e:
            for file in {path, path.resolve()}:
                file.unlink()
            raise ValueError(f'{e} It came twice so from {repo}, and was taken out of the cache again.') from None
    return str(path)


def _download(repo: str, cache_dir: Union[str, Path, None], **kwargs: Any) -> Path:
    name, _, revision = repo.partition('@')
    try:
        return Path(hf_hub_download(name, WEIGHTS, revision=revision or None, cache_dir=cache_dir, **kwargs))
    except LocalEntryNotFoundError as e:
        raise OSError(f'{WEIGHTS} of {repo} is not on this machine, and cannot be downloaded: {one_line(e)}') from e
    except EntryNotFoundError:
        raise ValueError(f'{repo} on the Hub holds no {WEIGHTS}. {_no_pickle([])}') from None
    except ValueError:  # what the client says of names
        raise
    except Exception as e:  # which errors of the network there are depends on the client's version
        raise OSError(f'{WEIGHTS} of {repo} could not be downloaded: {one_line(e)}') from e


def _check_whole(path: Path) -> None:
    """Only a header is read, and of a download, whose name in the cache is its SHA-256 on the Hub, every byte."""
    try:
        with safe_open(path, framework='pt'):
            pass
    except SafetensorError as e:
        raise ValueError(f"'{path}' is not a whole safetensors file ({one_line(e)}).") from None
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
    if isinstance(value, (list, tuple, dict)):
        if nested == _NESTED or len(value) > _LONGEST:
            raise _refused(where, f'has {name} with {len(value)} entries, {nested} deep')
        for key, entry in value.items() if isinstance(value, dict) else ((name, v) for v in value):
            _check(where, str(key), entry, nested + 1)
    elif isinstance(value, str) and (len(value) > 500 or '\0' in value):
        raise _refused(where, f'has {name} {_shown(value)}')
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        largest = _LARGEST.get(name, _LARGEST_NUMBER)
        if not _is_number(value) or (isinstance(value, int) and not 0 <= value <= largest):
            raise _refused(where, f'has {name} {_shown(value)}; whole numbers from 0 to {largest:,} are taken')


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (
        isinstance(value, int) or math.isfinite(value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:60]}...'


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f"The config.json of '{where}' {why}. No saved model has that, so nothing was built.")


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
