"""Resuming: what a run keeps after each epoch, and what must be the same when it continues."""
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Union

import torch
import yaml
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import nn

from ..distributed import in_first_process
from ..files import staged, to_json, write_text
from .config import FitConfig
from .loaders import chain
from .recipe import Recipe, Stage

__all__ = [
    'BEST',
    'HISTORY',
    'LAST',
    'RECIPE',
    'RUN',
    'check_about',
    'check_calibration',
    'check_recipe',
    'check_unused',
    'load_state',
    'models_of',
    'planned',
    'read_state',
    'save_state',
    'settings_to_resume',
]

LAST = 'last.pt'
BEST = 'best'
HISTORY = 'history.json'
RECIPE = 'recipe.yaml'
RUN = 'run.json'
PLAN = 'plan.json'


def models_of(task: TrainingTask) -> Dict[str, nn.Module]:
    """The model in training, and its moving average if there is one, without wrappers."""
    models = {'model': task.get_eval_model()}
    if task.has_ema():
        models['ema'] = task.get_eval_model(ema=True)
    return {name: unwrap_model(model) for name, model in models.items()}


def save_state(path: Path, task: TrainingTask, optimizer, scaler, history, settings) -> None:
    state: Dict[str, Any] = {name: module.state_dict() for name, module in models_of(task).items()}
    state.update(optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), history=history, settings=settings)
    with staged(path.parent, path.name) as aside:
        torch.save(state, aside / path.name)


def read_state(path: Path, device: torch.device, settings: Dict[str, Any], epochs: int) -> Dict[str, Any]:
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


def load_state(state: Dict[str, Any], path: str, models: Dict[str, nn.Module], optimizer, scaler) -> None:
    for name, module in models.items():
        try:
            module.load_state_dict(state[name])
        except RuntimeError as e:
            raise ValueError(f'{path} holds another model ({str(e).splitlines()[1].strip()}).') from e
    optimizer.load_state_dict(state['optimizer'])
    scaler.load_state_dict(state['scaler'])


def settings_to_resume(config: FitConfig, train_loader: Any, updates: int) -> Dict[str, Any]:
    """What must be the same when a run is resumed."""
    sizes = [part.batch_size for part in chain(train_loader) if type(getattr(part, 'batch_size', None)) is int]
    settings = {key: value for key, value in asdict(config).items() if key not in ('epochs', 'compile', 'norm_alarm')}
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
    before = Recipe.load(folder / RECIPE)
    if _without_end(before) != _without_end(recipe):
        then, now = (_flat(yaml.safe_load(of.to_yaml())) for of in (before, recipe))
        may_grow = (f'stages.{len(recipe.stages) - 1}.fit.epochs', 'fit.epochs' if len(recipe.stages) == 1 else '')
        other = [f'{key} was {then.get(key, "unset")} and is {now.get(key, "unset")}'
                 for key in dict.fromkeys((*then, *now)) if then.get(key) != now.get(key) and key not in may_grow]
        raise ValueError(f"'{folder / RECIPE}' is a different recipe: {'; '.join(other)}. Resume with that, or give "
                         'another folder.')


def _flat(tree: Any, at: str = '') -> Dict[str, Any]:
    """A tree of dicts and lists as one dict, with keys such as stages.0.fit.lr."""
    if not isinstance(tree, (dict, list)) or not tree:
        return {at: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, entry in pairs for k, v in _flat(entry, f'{at}.{key}'.lstrip('.')).items()}


def _without_end(recipe: Recipe) -> Any:
    """A recipe without the epochs of its last stage, which may be increased on resuming."""
    stages = [(stage.task, stage.train, asdict(recipe.fit_of(stage)),
               asdict(recipe.loss_of(stage)) if stage.task == 'trajectory' else None) for stage in recipe.stages]
    del stages[-1][2]['epochs']
    return replace(recipe, fit={'epochs': 1}, loss=None, stages=(Stage(),)), stages


def check_about(folder: Path, about: Dict[str, Any]) -> None:
    """Refuse to resume with different data or models."""
    if (folder / RUN).exists():
        _check_same(folder, json.loads((folder / RUN).read_text()), about)


def _check_same(folder: Path, before: Dict[str, Any], about: Dict[str, Any]) -> None:
    for name, value in about.items():
        if before.get(name) != value:
            raise ValueError(f"'{folder}' was made with {name} {before.get(name)}, but this run has {value}. "
                             'Resume with what the first run had, or give another folder.')


def check_calibration(
        folders: Sequence[Optional[Path]],
        minutes: Optional[float],
        epochs: Optional[Sequence[int]],
        resume: bool,
) -> None:
    """Refuse a folder with another calibration: one for other minutes, or one that began its second part."""
    first, second = folders
    if first is None or second is None:
        return
    check_unused(first.parent, resume, first.parent / PLAN, first / LAST, second / LAST)
    plan = first.parent / PLAN
    before = json.loads(plan.read_text())['minutes'] if plan.exists() else None
    if before != minutes and any(file.exists() for file in (plan, first / LAST, second / LAST)):
        then = 'epochs' if before is None else f'minutes={before:g}'
        now = f'minutes={minutes}' if epochs is None else f'epochs={tuple(epochs)}'
        raise ValueError(f"'{first.parent}' was calibrated with {then}, but this call has {now}. Resume with what the "
                         'first call had, or give another folder.')
    if epochs and (second / LAST).exists() and (first / HISTORY).exists() and len(
            json.loads((first / HISTORY).read_text())) < epochs[0]:
        raise ValueError(
            f"'{first.parent}' has already started unrolled training after fewer stepwise epochs. Calibrate into "
            'another folder.')


def planned(
        out: Union[str, Path, None], plan: Callable[[], Dict[str, Any]], about: Callable[[], Dict[str, Any]],
) -> Dict[str, Any]:
    """The plan of a calibration: that of its folder, if it is about the same things, or a new one, noted there.

    With several processes, all of them make a plan, because they train together to do so; that of the first counts.
    """
    path = None if out is None else Path(out) / PLAN

    def noted() -> Optional[Dict[str, Any]]:
        if path is None or not path.exists():
            return None
        found: Dict[str, Any] = {'share': 1., **json.loads(path.read_text())}
        _check_same(path.parent, found, {name: value for name, value in about().items() if name in found})
        return found

    def note() -> Dict[str, Any]:
        if path is not None:
            write_text(path, to_json({**made, **about()}))
        return made
    found: Any = in_first_process(noted)
    if found is None:
        made = plan()
        found = in_first_process(note)
    return dict(found)
