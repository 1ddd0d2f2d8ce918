"""The state of a run: saved after each epoch, and read to resume."""
from pathlib import Path
from typing import Any, Dict

import torch
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import nn

from ..files import staged

__all__ = ['BEST', 'HISTORY', 'LAST', 'load_state', 'models_of', 'read_state', 'save_state']

LAST = 'last.pt'
BEST = 'best'
HISTORY = 'history.json'


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
        raise ValueError(f"'{path}' cannot be read ({str(e).splitlines()[0]}). Delete it to start again.") from e
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
