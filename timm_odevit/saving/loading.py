"""Find, download and check the weights of a saved model; check what its config.json, maybe a stranger's, asks for."""
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg
from torch import nn

from ..ode.config import LARGEST_STEPS, PREFIX
from ..settings import one_line, printable, shown

__all__ = ['CONFIG', 'WEIGHTS', 'check_args', 'check_size', 'saved_in', 'weights_file']

CONFIG, WEIGHTS = 'config.json', 'model.safetensors'
# no timm model comes near these
_LARGEST = {'depth': 256, 'depths': 64, 'num_blocks': 256, 'layers': 256, f'{PREFIX}steps': LARGEST_STEPS,
            f'{PREFIX}phases': 256, 'num_classes': 10_000_000}
_LARGEST_NUMBER = 100_000  # of any other name
_LARGEST_MODEL = 2 ** 31  # numbers in all tensors together
_DEEPEST = 10  # lists and dicts inside of one another


def _numbers(values: Any, least: float, most: float, *kinds: type) -> bool:
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(
        type(value) in kinds and least <= value <= most for value in values)  # NaN is not


def _texts(values: Any, *kinds: type) -> bool:
    each = values.values() if isinstance(values, dict) else [values] if isinstance(values, str) else values
    return isinstance(values, kinds) and all(
        isinstance(value, int) or (isinstance(value, str) and printable(value)) for value in each)


# what an entry of pretrained_cfg must be; None is allowed, too
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    'input_size': (lambda v: _numbers(v, 1, _LARGEST_NUMBER, int) and len(v) == 3,
                   f'three sizes from 1 to {_LARGEST_NUMBER:,}'),
    'mean': (lambda v: _numbers(v, -_LARGEST_NUMBER, _LARGEST_NUMBER, int, float), 'a number for each channel'),
    'std': (lambda v: _numbers(v, 1e-9, _LARGEST_NUMBER, int, float), 'a number above 0 for each channel'),
    'crop_pct': (lambda v: _numbers([v], 0.1, 2, int, float), 'a number from 0.1 to 2'),
    'num_classes': (lambda v: _numbers([v], -1, _LARGEST['num_classes'], int), 'a number of classes'),
    'label_names': (lambda v: _texts(v, list, tuple, dict), 'a name for each class'),
    'label_descriptions': (lambda v: _texts(v, dict), 'a text for each class'),
}
_ANY: Any = (lambda v: isinstance(v, (int, float)) or _texts(v, str, list, tuple), 'text, a number, or a list of them')
_ABOUT_FILES = ('url', 'state_dict', 'hf_hub_filename', 'custom_load')
# keywords that choose files, or how they are read: only the caller may give them
_CALLER = ('cache_dir', 'checkpoint_path', 'file', 'kwargs_filter', 'pretrained', 'pretrained_cfg',
           'pretrained_cfg_overlay', 'pretrained_filter_fn', 'pretrained_model_args', 'pretrained_strict', 'state_dict',
           'url')
_SAVE = 'Save the model with timm_odevit.save_pretrained(model, folder).'


def saved_in(cfg: str | dict[str, Any] | PretrainedCfg | None) -> str:
    """The folder or Hub repository whose config.json describes a model; '' for a registered model."""
    if not isinstance(cfg, dict):
        return ''
    return str(cfg.get({'hf-hub': 'hf_hub_id', 'local-dir': 'file'}.get(cfg.get('source') or '', ''), ''))


def weights_file(cfg: dict[str, Any], cache_dir: str | Path | None = None) -> str | None:
    """The safetensors file with a model's weights, downloaded if necessary; None if timm finds the weights itself.

    Raises:
        ValueError: There is no model.safetensors, or it is damaged.
        OSError: It could not be downloaded; the message is one line.
    """
    source, file, repo = cfg.get('source') or '', cfg.get('file'), cfg.get('hf_hub_id')
    name = str(cfg.get('hf_hub_filename') or WEIGHTS)
    if source == 'local-dir':
        path = Path(str(file)) / name
        if not path.is_file():
            pickles = sorted(p.name for p in path.parent.glob('*') if p.suffix in ('.bin', '.pth', '.pt', '.pkl'))
            why = f"{', '.join(pickles)} is not read, because reading a pickle can run code. " if pickles else ''
            raise ValueError(f"'{file}' holds no {name}. {why}{_SAVE}")
    elif source != 'hf-hub' and (cfg.get('state_dict') or file):
        if str(file).endswith('.safetensors'):
            _check_weights(Path(str(file)))
        return None
    elif not repo:
        return None
    elif not name.endswith('.safetensors'):
        raise ValueError(f"'{name}' of {repo} is not read, only .safetensors files are. {_SAVE}")
    else:
        where, _, revision = str(repo).partition('@')
        try:
            path = Path(hf_hub_download(where, name, revision=revision or None, cache_dir=cache_dir))
        except LocalEntryNotFoundError as e:
            raise OSError(f'{name} of {repo} is not on this machine, and cannot be downloaded: {one_line(e)}') from e
        except EntryNotFoundError:
            raise ValueError(f'{repo} on the Hub holds no {name}. {_SAVE}') from None
        except Exception as e:  # which network errors occur depends on the client's version
            raise OSError(f'{name} of {repo} could not be downloaded: {one_line(e)}') from e
    _check_weights(path)
    return str(path)


def _check_weights(path: Path) -> None:
    """Raise ValueError for a file that does not hold the weights of one model in safetensors."""
    try:
        with safe_open(path, framework='pt') as f:
            others = {'model', 'model_ema', 'state_dict', 'state_dict_ema'}.intersection(f.keys())
    except SafetensorError as e:
        raise ValueError(f"'{path}' is not a valid safetensors file ({one_line(e)}).") from None
    if others:  # timm would look for the weights under such a name
        raise ValueError(f"'{path}' does not hold the weights of a single model: it has a tensor named {others.pop()}.")


def check_args(where: str, cfg: dict[str, Any], args: Any) -> None:
    """Refuse a config.json whose `pretrained_cfg` or `model_args` would choose files, or need unbounded memory.

    Building the model, on the meta device, refuses what it does not know; `check_size` refuses what is too large.

    Raises:
        ValueError: An entry is unknown, too large, or one that only the caller may give.
    """
    def refused(why: str) -> ValueError:
        return ValueError(f"The config.json of '{where}' {why}. No saved model has that, so nothing was built.")
    known = {field.name for field in fields(PretrainedCfg)}
    for name, value in cfg.items():
        if name not in known:
            raise refused(f'has an unknown entry {shown(name)} in pretrained_cfg')
        if name in _ABOUT_FILES and value:
            raise refused(f"says where the weights are or how to read them ('{name}')")
        good, expected = _EXPECTED.get(re.sub('^(test|min)_', '', name), _ANY)
        if (value is not None and not good(value)) or (name == 'num_classes' and value is None):
            raise refused(f'has {name} {shown(value)}; expected {expected}')
    if not isinstance(args, dict) or not isinstance(args.get('base_args') or {}, dict):
        raise refused(f'has {shown(args)} instead of keywords')
    for name, value, depth in _entries(args):
        most = _LARGEST.get(name, _LARGEST_NUMBER)
        least = -most if isinstance(value, float) else 0  # no size or count is below 0, but a scale may be
        if depth > _DEEPEST:
            raise refused(f'has lists inside of lists, {depth} deep, in {shown(name)}')
        if name in _CALLER:
            raise refused(f"gives '{name}', which only the caller of timm.create_model may give")
        if isinstance(value, (int, float)) and not least <= value <= most:  # nor NaN
            raise refused(f'has {name} {shown(value)}; numbers from {least:,} to {most:,} are allowed')
        if isinstance(value, (list, dict)) and len(value) > 10_000:
            raise refused(f'has {len(value)} entries in {name}')
        if any(isinstance(text, str) and (len(text) > 500 or not text.isprintable()) for text in (name, value)):
            raise refused(f'has {shown(name)} {shown(value)}')


def _entries(tree: Any, name: str = '', depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Name, value and depth of everything in keywords; entries of a list have its name."""
    yield name, tree, depth
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from _entries(value, key, depth + 1)
    for value in tree if isinstance(tree, list) else ():
        yield from _entries(value, name, depth + 1)


def check_size(model: nn.Module, file: str | None) -> None:
    """Raise ValueError for a model on the meta device that is larger than its weights or, without, than any of timm's.
    """
    total, limit = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())), _LARGEST_MODEL
    if file:
        with safe_open(file, framework='pt') as f:
            stored = sum(math.prod(f.get_slice(name).get_shape()) for name in f.keys())
        limit = min(limit, 2 * stored + 10 ** 6)  # some buffers are not stored
    if total > limit:
        raise ValueError(
            f'The model has {total:,} numbers in its tensors; at most {limit:,} are allowed for these weights.')
