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
        raise ValueError(f"'{path}' cannot be read ({str(e).splitlines()[0]}). Delete it to start anew.") from e
    if not isinstance(state, dict) or 'settings' not in state:
        raise ValueError(f"'{path}' is not the state of a run of fit(). Give the folder of one, or another folder.")
    # a setting that is newer than the file was not in use
    before = {name: state['settings'].get(name, value) for name, value in settings.items()}
    other = [name for name, value in settings.items() if before[name] != value]
    if other:
        theirs, ours = (', '.join(f'{name}={of[name]!r}' for name in other) for of in (before, settings))
        raise ValueError(f"'{path}' was made with {theirs}, this run has {ours}. Resume with the settings of the first "
                         'run, or start another folder.')
    if len(state['history']) > epochs:
        raise ValueError(f"'{path.parent}' has {len(state['history'])} epochs already, and epochs={epochs}. Give more, "
                         'or another folder.')
    return state


def load_state(state: Dict[str, Any], path: str, models: Dict[str, nn.Module], optimizer, scaler) -> None:
    for name, module in models.items():
        try:
            module.load_state_dict(state[name])
        except RuntimeError as e:
            raise ValueError(f'{path} holds another model ({str(e).splitlines()[1].strip()}).') from e
    optimizer.load_state_dict(state['optimizer'])
    scaler.load_state_dict(state['scaler'])
