"""Resuming: what a run keeps after each epoch, and what must be the same when it continues."""
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..data.arrays import ArrayLoader
from ..files import staged
from .config import FitConfig
from .loaders import loader_chain
from .recipe import Recipe

__all__ = [
    'BEST', 'HISTORY', 'LAST', 'RECIPE', 'RUN', 'START', 'check_about', 'check_recipe', 'check_unused', 'hash_of',
    'hash_of_data', 'load_state', 'models_of', 'read_state', 'save_state', 'settings_to_resume',
]

LAST = 'last.pt'
BEST = 'best'
START = 'start'
HISTORY = 'history.json'
RECIPE = 'recipe.yaml'
RUN = 'run.json'


def models_of(task: TrainingTask) -> dict[str, nn.Module]:
    """The model in training, and its moving average if there is one, without wrappers."""
    models = {'model': task.get_eval_model()}
    if task.has_ema():
        models['ema'] = task.get_eval_model(ema=True)
    return {name: unwrap_model(model) for name, model in models.items()}


def save_state(path: Path, task: TrainingTask, optimizer, scaler, history, settings) -> None:
    state: dict[str, Any] = {name: module.state_dict() for name, module in models_of(task).items()}
    state.update(optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), history=history, settings=settings)
    with staged(path.parent, path.name) as aside:
        torch.save(state, aside / path.name)


def read_state(path: Path, device: torch.device, settings: dict[str, Any], epochs: int) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:
        raise ValueError(f"'{path}' cannot be read; it may be truncated. Delete it to start again.") from e
    if not isinstance(state, dict) or 'settings' not in state:
        raise ValueError(f"'{path}' is not a state saved by fit(). Give the folder of a run, or a new folder.")
    # a setting that did not exist when the file was written counts as unchanged
    before = {name: state['settings'].get(name, value) for name, value in settings.items()}
    other = [name for name, value in settings.items() if before[name] != value]
    if other:
        theirs, ours = (', '.join(f'{name}={of[name]!r}' for name in other) for of in (before, settings))
        raise ValueError(f"'{path}' was made with {theirs}, but this run has {ours}. Resume with the settings of the "
                         'first run, or give another folder.')
    if len(state['history']) > epochs:
        raise ValueError(f"'{path.parent}' already has {len(state['history'])} epochs, but epochs={epochs}. Give more "
                         'epochs, or another folder.')
    return state


def load_state(state: dict[str, Any], path: str, models: dict[str, nn.Module], optimizer, scaler) -> None:
    for name, module in models.items():  # all before any is changed
        now, then = ({key: list(value.shape) for key, value in of.items()} for of in (module.state_dict(), state[name]))
        other = next((key for key in (*now, *then) if now.get(key) != then.get(key)), None)
        if other is not None:
            raise ValueError(f'{path} holds another model: its {other} has the shape {then.get(other)}, not '
                             f'{now.get(other)}.')
    try:
        optimizer.load_state_dict(state['optimizer'])
    except ValueError as e:
        raise ValueError(f'{path} was trained with other parameters frozen. Resume with those of the first run.') from e
    for name, module in models.items():
        module.load_state_dict(state[name])
    scaler.load_state_dict(state['scaler'])


def settings_to_resume(config: FitConfig, train_loader: Any, updates: int) -> dict[str, Any]:
    """What must be the same when a run is resumed."""
    sizes = [part.batch_size for part in loader_chain(train_loader) if type(getattr(part, 'batch_size', None)) is int]
    settings = {key: value for key, value in asdict(config).items() if key not in ('epochs', 'compile')}
    return {**settings, 'batch_size': sizes[0] if sizes else None, 'updates_per_epoch': updates}


def check_unused(folder: Path, resume: bool, *files: Path) -> None:
    """Refuse a folder in which a run left one of its files, unless that run is to be resumed."""
    if not resume and any(file.exists() for file in files):
        raise ValueError(f"'{folder}' already holds a run. Pass resume=True to continue it, or give another folder.")


def check_recipe(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Refuse a folder with another run."""
    check_unused(folder, resume, folder / RECIPE)
    if not (folder / RECIPE).exists():
        return
    then, now = ({'stages': len(of.stages), **_flat(yaml.safe_load(of.to_yaml()))}
                 for of in (Recipe.load(folder / RECIPE), recipe))
    may_grow = (f'stages.{len(recipe.stages) - 1}.fit.epochs', 'fit.epochs' if len(recipe.stages) == 1 else '')
    other = [f'{key} was {then.get(key, "unset")} and is {now.get(key, "unset")}'
             for key in dict.fromkeys((*then, *now)) if then.get(key) != now.get(key) and key not in may_grow]
    if other:
        raise ValueError(f"'{folder / RECIPE}' is a different recipe: {'; '.join(other)}. Resume with that, or give "
                         'another folder.')


def _flat(tree: Any, at: str = '') -> dict[str, Any]:
    """A tree of dicts and lists as one dict, with keys such as stages.0.fit.lr."""
    if not isinstance(tree, (dict, list)):
        return {at: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, entry in pairs for k, v in _flat(entry, f'{at}.{key}'.lstrip('.')).items()}


def check_about(folder: Path, about: dict[str, Any]) -> None:
    """Refuse to resume with different data or models."""
    before = json.loads((folder / RUN).read_text()) if (folder / RUN).exists() else about
    for name, value in about.items():
        if before.get(name) != value:
            what = f"'{folder}' was made with {name} {before.get(name)}, but this run has {value}"
            if name.endswith('sha256'):
                what = f"The {name.removesuffix(' sha256')} of the run in '{folder}' is not this one's"
            raise ValueError(f'{what}. Resume with what the first run had, or give another folder.')


def hash_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the concatenated bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def hash_of_data(*loaders: Any) -> str:
    """SHA-256 of the images and labels in memory, or of the names and labels of the files."""
    found = hashlib.sha256()
    for loader in loaders:
        plain = loader_chain(loader)[-1]
        if isinstance(plain, ArrayLoader):
            found.update(hash_of([plain.images, plain.labels]).encode())
        else:
            files = [[*Path(path).parts[-2:], label] for path, label in plain.dataset.reader.samples]
            found.update(json.dumps(files).encode())
    return found.hexdigest()
