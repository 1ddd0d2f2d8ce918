"""The weights of a saved model, found and checked; what its config.json, maybe a stranger's, may ask for."""
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg
from torch import nn

from ..settings import one_line, printable, shown

CONFIG, WEIGHTS = 'config.json', 'model.safetensors'
_LARGEST = 100_000  # of a number in config.json, unless its name is below
_RANGES = {'depth': (0, 256), 'depths': (0, 64), 'num_blocks': (0, 256), 'layers': (0, 256),
           'num_classes': (-1, 10_000_000), 'img_size': (1, 4096), 'input_size': (1, 4096),
           'crop_pct': (0.1, 2)}  # an image is resized to its size / crop_pct
_LARGEST_MODEL = 2 ** 31  # numbers in all tensors together
# entries that choose files, or how they are read
CALLER = ('cache_dir', 'checkpoint_path', 'custom_load', 'hf_hub_filename', 'kwargs_filter',
           'pretrained_cfg', 'pretrained_cfg_overlay', 'pretrained_filter_fn', 'pretrained_model_args',
           'pretrained_strict', 'state_dict', 'url')


def weights_file(cfg: dict[str, Any], cache_dir: str | Path | None) -> str | None:
    """The safetensors file with a model's weights, downloaded if necessary; None if timm finds the weights itself."""
    source, file, repo = cfg.get('source') or '', str(cfg.get('file') or ''), str(cfg.get('hf_hub_id') or '')
    path = Path(str(cfg.get('hf_hub_filename') or WEIGHTS))
    if source == 'local-dir':
        path = Path(file, path)
    elif source != 'hf-hub' and (cfg.get('state_dict') or file or not repo):
        if not file.endswith('.safetensors'):
            return None
        path = Path(file)
    elif path.suffix == '.safetensors':
        where, _, revision = repo.partition('@')
        try:
            path = Path(hf_hub_download(where, path.as_posix(), revision=revision or None, cache_dir=cache_dir))
        except Exception as e:
            raise OSError(f'{path} of {repo} could not be downloaded: {one_line(e)}') from e
    if path.suffix != '.safetensors' or not path.is_file():
        raise ValueError(f"There are no weights in '{path}': only .safetensors files are read, because a pickle can "
                         'run code. Save with timm_odevit.save_pretrained.')
    try:
        with safe_open(path, framework='pt'):
            return str(path)
    except SafetensorError as e:
        raise ValueError(f"'{path}' is not a valid safetensors file ({one_line(e)}).") from None


def check_args(where: Any, cfg: dict[str, Any], args: dict[str, Any]) -> None:
    """Refuse a config.json whose `pretrained_cfg` or `model_args` would choose files, or need unbounded memory."""
    for tree in (cfg, args):
        for name, value, depth in _entries(tree):
            least, most = _RANGES.get(name.removeprefix('test_'), (-_LARGEST, _LARGEST))
            if name in CALLER and (value or tree is args):
                why = 'only the caller of timm.create_model may give it'
            elif isinstance(value, (int, float)) and not least <= value <= most:  # nor NaN
                why = f'numbers from {least:,} to {most:,} are allowed'
            elif depth > 10 or (tree is args and isinstance(value, list) and len(value) > 256):
                why = 'it is too long or too deep'
            elif not all(printable(text) for text in (name, value) if isinstance(text, str)):
                why = 'it cannot be printed'
            else:
                continue
            raise ValueError(f"The settings of '{where}' have {shown(name)} {shown(value)}: {why}.")
    PretrainedCfg(**cfg)  # TypeError for an unknown entry


def _entries(tree: Any, name: str = '', depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Name, value and depth; entries of a list have its name."""
    yield name, tree, depth
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from _entries(value, str(key), depth + 1)
    for value in tree if isinstance(tree, (list, tuple)) else ():
        yield from _entries(value, name, depth + 1)


def check_size(model: nn.Module, file: str | None) -> None:
    """Refuse a model on the meta device that is larger than its weights, or than any of timm's."""
    total, limit = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())), _LARGEST_MODEL
    if file:
        with safe_open(file, framework='pt') as f:
            stored = sum(math.prod(f.get_slice(name).get_shape()) for name in f.keys())
        limit = min(limit, 2 * stored + 10 ** 6)  # some buffers are not stored
    if total > limit:
        raise ValueError(f'The model has {total:,} numbers in its tensors; at most {limit:,} are allowed for its file.')
