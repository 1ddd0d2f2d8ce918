"""Find, download and check the weights of a saved model."""
import hashlib
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Union

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg

from ..errors import one_line

__all__ = ['CONFIG', 'WEIGHTS', 'check_whole', 'saved_in', 'weights_file']

CONFIG, WEIGHTS = 'config.json', 'model.safetensors'


def saved_in(cfg: Union[str, Dict[str, Any], PretrainedCfg, None]) -> str:
    """Return the folder or Hub repository whose config.json describes a model; '' for a registered model."""
    if not isinstance(cfg, dict):
        return ''
    return str(cfg.get({'hf-hub': 'hf_hub_id', 'local-dir': 'file'}.get(cfg.get('source') or '', ''), ''))


def weights_file(cfg: Dict[str, Any], cache_dir: Union[str, Path, None] = None) -> Optional[str]:
    """Return the file with a model's weights, downloaded if necessary and checked for damage.

    Only safetensors are read from a saved folder or from the Hub: reading a pickle can run code.

    Args:
        cfg: The model's pretrained_cfg; source 'local-dir' or 'hf-hub' decides, or else file, or else hf_hub_id.
        cache_dir: Folder for downloads instead of the Hub's own cache.

    Returns:
        Path of the file; None if timm finds the weights itself (`state_dict`, a file or a URL that the caller gave).

    Raises:
        ValueError: There is no model.safetensors, or it is damaged.
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
        raise ValueError(f"'{name}' of {repo} is not read, only .safetensors files are. {_no_pickle([])}")
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
            raise ValueError(f'{e} Two downloads from {repo} were damaged; the cached file was removed.') from None
    return str(path)


def _download(repo: str, file: str, cache_dir: Union[str, Path, None], **kwargs: Any) -> Path:
    name, _, revision = repo.partition('@')
    try:
        return Path(hf_hub_download(name, file, revision=revision or None, cache_dir=cache_dir, **kwargs))
    except LocalEntryNotFoundError as e:
        raise OSError(f'{file} of {repo} is not on this machine, and cannot be downloaded: {one_line(e)}') from e
    except EntryNotFoundError:
        raise ValueError(f'{repo} on the Hub holds no {file}. {_no_pickle([])}') from None
    except HFValidationError:  # the client's message about a bad name
        raise
    except Exception as e:  # which network errors occur depends on the client's version
        raise OSError(f'{file} of {repo} could not be downloaded: {one_line(e)}') from e


def check_whole(path: Path) -> None:
    """Raise ValueError for a damaged safetensors file.

    Only its header is read; but for a download, whose name in the cache is its SHA-256 on the Hub, every byte is.
    """
    try:
        with safe_open(path, framework='pt') as f:
            others = {'model', 'model_ema', 'state_dict', 'state_dict_ema'}.intersection(f.keys())
    except SafetensorError as e:
        raise ValueError(f"'{path}' is not a valid safetensors file ({one_line(e)}).") from None
    if others:  # timm would look for the weights under such a name
        raise ValueError(f"'{path}' does not hold the weights of a single model: it has a tensor named {others.pop()}.")
    expected = path.resolve().name
    if re.fullmatch('[0-9a-f]{64}', expected):
        found = hashlib.sha256()
        with open(path, 'rb') as f:
            while block := f.read(2 ** 24):
                found.update(block)
        if found.hexdigest() != expected:
            raise ValueError(f"'{path}' is damaged: its SHA-256 is {found.hexdigest()}, but on the Hub {expected}.")


def _no_pickle(names: Iterable[Path]) -> str:
    pickles = sorted(path.name for path in names if path.suffix in ('.bin', '.pth', '.pt', '.pkl', '.ckpt'))
    found = f"{', '.join(pickles)} is not read, because reading a pickle can run code. " if pickles else ''
    return f'{found}Save the model with timm_odevit.save_pretrained(model, folder).'
