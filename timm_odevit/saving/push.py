"""push_to_hub: send a saved model to the Hugging Face Hub."""
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import timm
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from torch import nn

from ..errors import one_line
from ..hooks import on_meta
from ..loading.find_weights import CONFIG, WEIGHTS, check_whole
from ..settings import checks_keywords
from .cards import model_card
from .save import CARD, REFERENCE, save_pretrained, save_reference

__all__ = ['EARLIER', 'Pushed', 'push_to_hub']

# recipes of the runs before the last one, in order
EARLIER = ('earlier.yaml', 'earlier2.yaml', 'earlier3.yaml', 'earlier4.yaml')
# the files of a model's folder that are sent; never a pickle
_SENT = (WEIGHTS, CONFIG, CARD, REFERENCE, 'recipe.yaml', *EARLIER, 'results.json')


@dataclass(frozen=True)
class Pushed:
    """What was sent to the Hub, or would be.

    Attributes:
        repo_id: The repository, 'org/name'.
        revision: The branch.
        files: 'new', 'changed' or 'same' for each file; 'unknown' if the Hub could not be asked.
        sizes: Bytes of each file.
        card: Text of the card.
        url: Page of the commit or of the pull request; None if nothing was sent.
    """
    repo_id: str
    revision: str
    files: Dict[str, str]
    sizes: Dict[str, int]
    card: str
    url: Optional[str] = None

    def __str__(self) -> str:
        done = f'sent: {self.url}' if self.url else 'nothing was sent'
        unknown = ['The Hub could not be reached, so it is not known which files it already has.']
        return '\n'.join([
            f'{self.repo_id} ({self.revision}), {done}', *(unknown if 'unknown' in self.files.values() else ()),
            *(f'  {state:8}{self.sizes[name]:>12,} bytes  {name}' for name, state in self.files.items())])


@checks_keywords
def push_to_hub(
        model: Union[nn.Module, str, Path],
        repo_id: str,
        *,
        results: Sequence[Mapping[str, Any]] = (),
        dataset: str = '',
        card: Optional[str] = None,
        license: Optional[str] = None,
        private: Optional[bool] = None,
        revision: str = 'main',
        create_pr: bool = False,
        message: str = 'Model by timm-odevit',
        token: Union[str, bool, None] = None,
        dry_run: bool = False,
        base: Optional[str] = None,
        base_args: Optional[Dict[str, Any]] = None,
) -> Pushed:
    """Send a model to the Hugging Face Hub, for `timm.create_model('hf-hub:org/name', pretrained=True)` to load.

    One commit holds model.safetensors, config.json, README.md (the card) and test/tensors.safetensors (an input and the
    model's output for it); from a folder, also recipe.yaml, earlier.yaml and results.json. Files that the Hub already
    has are not sent again, and its card is kept unless a card, or results or a licence for one, are given.

    Args:
        model: Model to send, or the folder of a saved model, which is sent as it is.
        repo_id: 'org/name'; created if it does not exist.
        results: Rows for the card, as returned by `json.loads(evaluate(...).to_json())`.
        dataset: Name of the dataset of the results, such as 'CIFAR-100'.
        card: Text of the card, instead of a generated one.
        license: The Hub's identifier of the licence, for the generated card; None for the one that timm states for
            the model's pretrained weights.
        private: Whether a new repository is private; None for the Hub's default.
        revision: Branch to send to; created from main if it does not exist.
        create_pr: Open a pull request instead of sending to the branch.
        message: Commit message.
        token: Access token; None for the one that `hf auth login` stored.
        dry_run: Send nothing; report what would be sent. Works without a network, but then cannot say what the Hub
            already has.
        base: timm name of the base, as in `save_pretrained`.
        base_args: Keywords of the base, as in `save_pretrained`.

    Returns:
        What was sent, file by file.

    Raises:
        ValueError: The model cannot be described, its licence is not known, or the folder holds no saved model,
            or other files, or links that lead out of it.
        OSError: The Hub refused, or could not be reached; the message is one line.
    """
    send = partial(_send, repo_id=repo_id, private=private, revision=revision, create_pr=create_pr, message=message,
                   token=token, dry_run=dry_run)
    if isinstance(model, nn.Module):
        with tempfile.TemporaryDirectory() as temporary:
            folder = save_pretrained(model, Path(temporary) / 'model', base=base, base_args=base_args)
            saved: Any = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
            save_reference(saved, folder)
            known = license or saved.pretrained_cfg.get('license')
            if not card and not known:
                raise ValueError("The licence of these weights is not known. Give license=, such as 'apache-2.0'.")
            text = card or model_card(f'hf-hub:{repo_id}', saved, results=results, dataset=dataset, license=known)
            (folder / CARD).write_text(text, encoding='utf-8')
            return send(folder, replace_card=bool(card or results or license))
    folder = Path(model)
    given = dict(results=results, dataset=dataset, card=card, license=license, base=base, base_args=base_args)
    for name, value in given.items():
        if value:
            raise ValueError(
                f"A folder is sent as it is, so {name} has no effect. Edit '{folder / CARD}', or give a model.")
    _check_links(folder)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"'{folder}' must hold {CONFIG} and {WEIGHTS}. Create it with save_pretrained(model, folder).")
    check_whole(folder / WEIGHTS)
    with on_meta():
        timm.create_model(f'local-dir:{folder}')  # raises unless it describes a model
    return send(folder, replace_card=True)


def _check_links(folder: Path) -> None:
    """Refuse a folder with links that lead out of it: their targets may be secret."""
    inside = os.path.realpath(folder)
    for path in sorted(folder.rglob('*')):
        if path.is_symlink() and not any(part.startswith('.') for part in path.relative_to(folder).parts):
            target = os.path.realpath(path)
            if not os.path.exists(target) or os.path.commonpath([inside, target]) != inside:
                raise ValueError(f"'{path}' is a link to '{target}', which is not in the folder. Replace the "
                                 'link with a copy, or remove it.')


def _send(
        folder: Path,
        *,
        replace_card: bool,
        repo_id: str,
        private: Optional[bool],
        revision: str,
        create_pr: bool,
        message: str,
        token: Union[str, bool, None],
        dry_run: bool,
) -> Pushed:
    paths = [path.relative_to(folder) for path in folder.rglob('*') if path.is_file()]
    names = sorted(path.as_posix() for path in paths if not any(part.startswith('.') for part in path.parts))
    unknown = [name for name in names if name not in _SENT]
    if unknown:
        more = f' and {len(unknown) - 5} more' if len(unknown) > 5 else ''
        raise ValueError(f"'{folder}' holds {', '.join(unknown[:5])}{more}; only {', '.join(_SENT)} are sent. Move the "
                         'rest elsewhere.')
    api = HfApi(token=token, library_name='timm_odevit')
    pushed = partial(Pushed, repo_id, revision, sizes={name: (folder / name).stat().st_size for name in names},
                     card=(folder / CARD).read_text(encoding='utf-8') if CARD in names else '')
    try:
        there, branch = _on_the_hub(api, repo_id, names, revision)
        if create_pr and not branch and there is not None:
            raise ValueError(f"{repo_id} has no branch '{revision}' to open a pull request against. Leave revision "
                             'out, or create the branch first.')
        files = {name: 'new' if there is None or name not in there else
                 'same' if _is_same(folder / name, there[name]) else 'changed' for name in names}
        if not replace_card and files.get(CARD) == 'changed':
            files[CARD] = 'same'
        send = [name for name, state in files.items() if state != 'same']
        if dry_run or (branch and not send):
            return pushed(files=files)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if not branch:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        if not send:
            return pushed(files=files, url=f'{api.endpoint}/{repo_id}/tree/{revision}')
        done = api.create_commit(
            repo_id, [CommitOperationAdd(name, folder / name) for name in send], commit_message=message,
            revision=revision, create_pr=create_pr)
    except Exception as e:  # which network errors occur depends on the client's version
        if isinstance(e, ValueError) and not isinstance(e, (json.JSONDecodeError, OSError)):
            raise  # about names and cards
        if dry_run and not isinstance(e, HfHubHTTPError):  # no answer at all
            return pushed(files=dict.fromkeys(names, 'unknown'))
        raise OSError(f'{repo_id} on the Hub: {one_line(e)}') from e
    return pushed(files=files, url=done.pr_url or done.commit_url)


def _on_the_hub(
        api: HfApi, repo_id: str, names: List[str], revision: str,
) -> Tuple[Optional[Dict[str, RepoFile]], bool]:
    """Return the files on the Hub (None without a repository), and whether the branch exists; a new one copies main."""
    try:
        found = api.get_paths_info(repo_id, names, revision=revision)
    except RevisionNotFoundError:
        if revision == 'main':  # an empty repository
            return {}, True
        return _on_the_hub(api, repo_id, names, 'main')[0], False
    except RepositoryNotFoundError:
        return None, revision == 'main'
    return {file.path: file for file in found if isinstance(file, RepoFile)}, True


def _is_same(path: Path, there: RepoFile) -> bool:
    content = path.read_bytes()
    if there.lfs is not None:
        return hashlib.sha256(content).hexdigest() == there.lfs.sha256
    return hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest() == there.blob_id  # as git names a file
