"""Save a model as a folder that `timm.create_model('local-dir:...')` rebuilds exactly, and send folders to the Hub."""
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import timm
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.models import get_model_args, save_for_hf
from timm.utils import unwrap_model
from torch import nn

from .blocks import OdeBlocks, find_ode_blocks
from .cards import model_card
from .config import PREFIX, OdeConfig
from .files import staged
from .merge import check_not_merged
from .solvers import Solver, Step
from .sources import CONFIG, WEIGHTS, check_whole, one_line

__all__ = ['Pushed', 'describe', 'push_to_hub', 'save_pretrained', 'save_reference', 'structure']

CARD, REFERENCE = 'README.md', 'test/tensors.safetensors'
# what a model's folder may hold to be sent; never a pickle
_SENT = (WEIGHTS, CONFIG, CARD, REFERENCE, 'recipe.yaml', 'earlier.yaml', 'results.json')
# attributes that do not change what an eval-mode model computes
_RUNTIME = ('training', 'grad_checkpointing', 'fused_attn', 'distilled_training')
_TOP = ('img_size', 'num_classes', 'in_chans', 'global_pool')  # arguments that a caller may override on loading


def save_pretrained(
        model: nn.Module,
        folder: Union[str, Path],
        *,
        base: Optional[str] = None,
        base_args: Optional[Dict[str, Any]] = None,
) -> Path:
    """Save an ODE-ViT, or any timm model, in timm's own format: config.json and model.safetensors.

    The folder holds the old model or the new one, also after an exception; a process that is killed in the very moment
    in which one takes the other's place may leave no config.json, and then the next save puts that right. A model is
    rebuilt once, without weights, to make sure that the folder describes it. Settings are those of this moment, such as
    `model.blocks.steps`.

    Args:
        model: Model made by `timm.create_model`, converted or not; may be wrapped for compilation or distribution.
        folder: Folder, made if need be; files of the same names are replaced.
        base: timm name of the base, for a converted model that was not made by `timm.create_model`.
        base_args: Keywords of the base, likewise.

    Returns:
        The folder.

    Raises:
        ValueError: The description would rebuild another model; the message names the first difference.
        OSError: The files could not be written; what was there remains.
    """
    model = unwrap_model(model)
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ValueError('The model is on the meta device, so it has no weights to save. Build it on another device.')
    architecture, args, rebuilt = _describe(model, base, base_args)
    rebuilt.pretrained_cfg = getattr(model, 'pretrained_cfg', None) or rebuilt.pretrained_cfg
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    folder = Path(folder)
    with staged(folder, WEIGHTS, CONFIG) as aside:
        only_config: Any = None  # neither True nor False: timm writes no weights
        save_for_hf(rebuilt, str(aside), safe_serialization=only_config)
        save_file(weights, aside / WEIGHTS, metadata={'format': 'pt'})
        path = aside / CONFIG
        config = json.loads(path.read_text())
        # timm takes the number of classes from the top, and transformers takes it from there only
        config.update(architecture=architecture, model_args={k: v for k, v in args.items() if k != 'num_classes'})
        if 'label_names' in config['pretrained_cfg']:  # where others look for them
            config['label_names'] = config['pretrained_cfg'].pop('label_names')
        path.write_text(json.dumps(config, indent=2) + '\n')
        (aside / WEIGHTS).chmod(path.stat().st_mode)  # safetensors lets nobody else read it
    return folder


@dataclass(frozen=True)
class Pushed:
    """What was sent to the Hub, or would be.

    Attributes:
        repo_id: The repository, 'org/name'.
        revision: The branch.
        files: 'new', 'changed' or 'same' for each file.
        url: Page of the commit, or of the pull request; None where nothing was sent.
    """
    repo_id: str
    revision: str
    files: Dict[str, str]
    url: Optional[str] = None

    def __str__(self) -> str:
        done = f'sent: {self.url}' if self.url else 'nothing was sent'
        return '\n'.join([f'{self.repo_id} ({self.revision}), {done}',
                          *(f'  {state:8}{name}' for name, state in self.files.items())])


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
    """Send a model to the Hugging Face Hub, from where `timm.create_model('hf-hub:org/name', pretrained=True)` has it.

    Sent are model.safetensors, config.json, README.md (the card) and test/tensors.safetensors, an input and the model's
    output for it, in one commit; of a folder also recipe.yaml and results.json. Files that the Hub has already are not
    sent again, and a card that is there is kept unless another one, or results or a licence for it, are given.

    Args:
        model: Model to send, or the folder of a saved one, which is sent as it is.
        repo_id: 'org/name'; made if need be.
        results: Rows for the card, as `json.loads(evaluate(...).to_json())` gives.
        dataset: Name of the data of the results, such as 'CIFAR-100'.
        card: Text of the card instead of a generated one.
        license: The Hub's identifier of the licence, for the generated card; None for that of the model's pretrained
            weights, as timm knows it.
        private: Whether a repository that is made is private; None for the Hub's default.
        revision: Branch to send to; made from main if need be.
        create_pr: Open a pull request instead of sending to the branch.
        message: Message of the commit.
        token: Access token; None for the one that `hf auth login` keeps.
        dry_run: Send nothing, say what would be sent.
        base: timm name of the base, as in `save_pretrained`.
        base_args: Keywords of the base, likewise.

    Returns:
        The files, with what became of each.

    Raises:
        ValueError: The model cannot be described, its licence is not known, or the folder is not one of a saved model,
            or has links out of it.
        OSError: The Hub refused; the message is one line.
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
                f"A folder is sent as it is, so {name} has no effect. Change '{folder / CARD}', or give a model.")
    _check_links(folder)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"'{folder}' has no {CONFIG} and {WEIGHTS}. Make it with save_pretrained(model, folder).")
    check_whole(folder / WEIGHTS)
    with torch.device('meta'):
        timm.create_model(f'local-dir:{folder}')  # it describes a model
    return send(folder, replace_card=True)


def _check_links(folder: Path) -> None:
    """Refuse a folder with links out of it: what they lead to may be somebody's secret."""
    inside = os.path.realpath(folder)
    for path in sorted(folder.rglob('*')):
        if path.is_symlink() and not any(part.startswith('.') for part in path.relative_to(folder).parts):
            target = os.path.realpath(path)
            if not os.path.exists(target) or os.path.commonpath([inside, target]) != inside:
                raise ValueError(f"'{path}' is a link to '{target}', which is not in the folder. Put a copy in its "
                                 'place, or remove it.')


def save_reference(model: nn.Module, folder: Path) -> None:
    """Store an input [2, C, H, W] and the model's output for it, so that others can check theirs."""
    size = resolve_model_data_config(model)['input_size']
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    path = folder / REFERENCE
    with torch.no_grad(), staged(path.parent, path.name) as aside:
        save_file({'input': images, 'output': model.cpu().float()(images).contiguous()}, aside / path.name)


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
    try:
        there, branch = _on_the_hub(api, repo_id, names, revision)
        if create_pr and not branch and there is not None:
            raise ValueError(f"There is no branch '{revision}' of {repo_id} to open a pull request for. Leave revision "
                             'out, or make the branch first.')
        files = {name: 'new' if there is None or name not in there else
                 'same' if _is_same(folder / name, there[name]) else 'changed' for name in names}
        if not replace_card and files.get(CARD) == 'changed':
            files[CARD] = 'same'
        send = [name for name, state in files.items() if state != 'same']
        if dry_run or (branch and not send):
            return Pushed(repo_id, revision, files)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if not branch:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        if not send:
            return Pushed(repo_id, revision, files, f'{api.endpoint}/{repo_id}/tree/{revision}')
        done = api.create_commit(
            repo_id, [CommitOperationAdd(name, folder / name) for name in send], commit_message=message,
            revision=revision, create_pr=create_pr)
    except Exception as e:  # which errors of the network there are depends on the client's version
        if isinstance(e, ValueError) and not isinstance(e, (json.JSONDecodeError, OSError)):
            raise  # what is said of names and cards
        raise OSError(f'{repo_id} on the Hub: {one_line(e)}') from e
    return Pushed(repo_id, revision, files, done.pr_url or done.commit_url)


def _on_the_hub(
        api: HfApi,
        repo_id: str,
        names: List[str],
        revision: str,
) -> Tuple[Optional[Dict[str, RepoFile]], bool]:
    """The files that are there, None without a repository; whether the branch is there. A new one starts as main."""
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


def describe(
        model: nn.Module,
        *,
        base: Optional[str] = None,
        base_args: Optional[Dict[str, Any]] = None,
) -> Tuple[str, Dict[str, Any]]:
    """Architecture and keywords with which `timm.create_model` rebuilds a model.

    Raises:
        ValueError: No description that rebuilds the model was found; the message says what to pass.
    """
    return _describe(model, base, base_args)[:2]


def _describe(
        model: nn.Module,
        base: Optional[str],
        base_args: Optional[Dict[str, Any]],
) -> Tuple[str, Dict[str, Any], Any]:
    check_not_merged(model)
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    architecture = base or cfg.get('architecture')
    hint = "Pass base='<timm name>' and base_args={...}, with which timm.create_model built it."
    if not architecture:
        raise ValueError(
            f'This {type(model).__name__} was not made by timm.create_model, so it has no name to reload it by. {hint}')
    args = get_model_args(model, base_args)
    blocks = find_ode_blocks(model)
    if blocks:
        # the settings are those of this moment
        args = {k: v for k, v in args.items() if not k.startswith(PREFIX)}
        if architecture == 'odevit_converted' or not architecture.startswith('odevit_'):
            own = dict(args.pop('base_args', None) or {}, **{k: v for k, v in args.items() if k not in ('base', *_TOP)})
            args = {'base': args.get('base', architecture), 'base_args': own,
                    **{k: v for k, v in args.items() if k in _TOP}}
            architecture = 'odevit_converted'
        args.update(_settings(blocks).to_args())
    try:
        args = json.loads(json.dumps(args))
    except TypeError as e:
        raise ValueError(f'A keyword of this model cannot be written as JSON ({e}). {hint}') from None
    with torch.device('meta'):
        rebuilt = timm.create_model(architecture, **args)
    difference = _first_difference(structure(model), structure(rebuilt))
    if difference:
        raise ValueError(f'{architecture} with {args} would not rebuild this model: {difference}. {hint}')
    return architecture, args, rebuilt


def _settings(blocks: List[OdeBlocks]) -> OdeConfig:
    """The settings from which all of a model's OdeBlocks follow."""
    config = blocks[0].config
    if len(blocks) > 1:  # stages: what each took from its own depth is left out
        config = replace(config, steps=tuple(b.steps for b in blocks), T=None, boundaries='uniform')
    return config


def structure(model: nn.Module) -> List[str]:
    """Kind and settings of every module but dropout, and the shape of every tensor, in order."""
    lines = []
    for name, module in model.named_modules():
        # steps follow from the settings of OdeBlocks, which are those of this thread
        if 'drop' not in name.rsplit('.', 1)[-1] and not isinstance(module, (Solver, Step)):
            about = '' if isinstance(module, nn.ParameterDict) else module.extra_repr()  # a device is no difference
            lines.append(f'{name}: {type(module).__name__}({about})')
            lines += [f'{name}.{k}'.strip('.') + f' = {v}' for k, v in sorted(vars(module).items())
                      if type(v) in (bool, int, float, str) and not k.startswith('_') and k not in _RUNTIME]
    lines += [f'{name}: {list(tensor.shape)}' for name, tensor in model.state_dict().items()]
    return lines


def _first_difference(ours: List[str], theirs: List[str]) -> str:
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return f'it has {a}, the rebuilt one {b}'
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        return f'one has {longer[min(len(ours), len(theirs))]}, the other nothing in its place'
    return ''
