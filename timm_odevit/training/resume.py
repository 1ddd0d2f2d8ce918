"""The files of a run: what it keeps after each epoch, what it plans, and what must be the same when it continues."""
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..distributed import rank_and_world
from ..files import staged, to_json, write_text
from .config import FitConfig

__all__ = ['BEST', 'HISTORY', 'LAST', 'RECIPE', 'RUN', 'START', 'Plan', 'check_about', 'check_unused', 'hash_of',
           'load_state', 'models_of', 'read_run', 'read_state', 'save_state', 'settings_to_resume']

LAST, BEST, START, HISTORY, RECIPE, RUN = 'last.pt', 'best', 'start', 'history.json', 'recipe.yaml', 'run.json'


def models_of(task: TrainingTask) -> dict[str, nn.Module]:
    """The model in training, and its moving average if there is one, without wrappers."""
    models = {'model': task.get_eval_model()}
    if task.has_ema():
        models['ema'] = task.get_eval_model(ema=True)
    return {name: unwrap_model(model) for name, model in models.items()}


def save_state(path: Path, task: TrainingTask, optimizer: Any, scaler: Any, **more: Any) -> None:
    state: dict[str, Any] = {name: module.state_dict() for name, module in models_of(task).items()}
    state.update(optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), **more)
    with staged(path.parent, path.name) as aside:
        torch.save(state, aside / path.name)


def read_state(path: Path, device: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:
        raise ValueError(f"'{path}' cannot be read; it may be truncated. Delete it to start again.") from e
    if not isinstance(state, dict) or 'settings' not in state:
        raise ValueError(f"'{path}' is not a state saved by fit(). Give another folder.")
    # a setting that did not exist when the file was written counts as unchanged
    before = {name: state['settings'].get(name, value) for name, value in settings.items()}
    other = [name for name, value in settings.items() if before[name] != value]
    if other:
        theirs, ours = (', '.join(f'{name}={of[name]!r}' for name in other) for of in (before, settings))
        raise ValueError(f"'{path}' was made with {theirs}, but this run has {ours}. Resume with the settings of the "
                         'first run, or give another folder.')
    return state


def load_state(state: dict[str, Any], path: str, models: dict[str, nn.Module], optimizer: Any, scaler: Any) -> None:
    for name, module in models.items():  # all before any is changed
        now, then = ({key: list(value.shape) for key, value in of.items()} for of in (module.state_dict(), state[name]))
        other = next((key for key in (*now, *then) if now.get(key) != then.get(key)), None)
        if other is not None:
            raise ValueError(f'{path} holds another model: its {other} has the shape {then.get(other)}, not '
                             f'{now.get(other)}.')
    try:
        optimizer.load_state_dict(state['optimizer'])
    except ValueError as e:
        raise ValueError(f'{path} was trained with other parameters frozen.') from e
    for name, module in models.items():
        module.load_state_dict(state[name])
    scaler.load_state_dict(state['scaler'])


def settings_to_resume(config: FitConfig, train_loader: Any, updates: int) -> dict[str, Any]:
    """What must be the same when a run is resumed."""
    size = getattr(train_loader, 'batch_size', None)
    settings = {key: value for key, value in asdict(config).items() if key not in ('epochs', 'compile')}
    return {**settings, 'batch_size': size if type(size) is int else None, 'updates_per_epoch': updates}


def check_unused(folder: Path, resume: bool, file: Path) -> None:
    """Refuse a folder in which a run left this file, unless that run is to be resumed."""
    if not resume and file.exists():
        raise ValueError(f"'{folder}' already holds a run. Pass resume=True to continue it, or give another folder.")


class Plan:
    """What a run of several stages has planned; kept in its run.json, if it has a folder.

    `about` is what must be the same when the run is resumed, and the command that started it.
    """

    def __init__(self, folder: Path | None = None, about: dict[str, Any] | None = None) -> None:
        self.folder, self.about, self.began = folder, about or {}, time.perf_counter()
        stored = {} if folder is None else read_run(folder).get('plan', {})
        self.lr_scale: float | None = stored.get('lr_scale')  # factor on the learning rates of stages that ask for one
        self.start: Any = stored.get('start')  # what was measured of the student before training
        self.minutes: list[float] = stored.get('minutes', [])  # of each stage that has begun
        self.spent: list[float] = stored.get('spent', [])  # by each stage that has ended
        self.resumed = len(self.minutes)

    def minutes_of(self, i: int, minutes: float, shares: Sequence[float]) -> float:
        """Minutes of a stage: its share of those that are left when it begins."""
        if i == len(self.minutes):
            left = minutes - sum(self.spent) - (time.perf_counter() - self.began) / 60
            self.minutes.append(max(1e-6, left * shares[i] / sum(shares[i:])))
            self.write()
        return self.minutes[i]

    def end(self, i: int) -> None:
        """Note what a stage took; of one that an earlier process began, at least what was planned."""
        if i == len(self.spent):
            taken = (time.perf_counter() - self.began) / 60
            self.spent.append(max(taken, self.minutes[i]) if i < self.resumed else taken)
            self.write()
        self.began = time.perf_counter()

    def write(self) -> None:
        if self.folder is not None and rank_and_world()[0] == 0:
            plan = {name: getattr(self, name) for name in ('lr_scale', 'start', 'minutes', 'spent')}
            write_text(self.folder / RUN, to_json({**self.about, 'plan': plan}))


def read_run(folder: Path) -> dict[str, Any]:
    """What a folder's run.json holds; nothing if it has none. Raises ValueError if it is damaged."""
    try:
        run = json.loads((folder / RUN).read_text(encoding='utf-8')) if (folder / RUN).exists() else {}
        if not isinstance(run, dict) or not isinstance(run.get('plan', {}), dict):
            raise ValueError
    except ValueError as e:
        raise ValueError(f"'{folder / RUN}' is damaged, so the run in this folder cannot be resumed. Put the file back "
                         'as it was, or start again in another folder.') from e
    return run


def check_about(folder: Path, about: dict[str, Any]) -> None:
    """Refuse to resume with different data, models or settings."""
    before = read_run(folder) or about
    for name, value in about.items():
        if before.get(name) != value:
            what = f"'{folder}' was made with {name} {before.get(name)}, but this run has {value}"
            if name.endswith('sha256'):
                what = f"The {name.removesuffix(' sha256')} of the run in '{folder}' is not this one's"
            raise ValueError(f'{what}. Resume with what the first run had, or give another folder.')


def hash_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the concatenated bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
