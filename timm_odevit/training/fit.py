"""fit: train any `timm.task.TrainingTask`, for epochs or for minutes."""
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from timm.task import TrainingTask
from tqdm import tqdm

from ..distributed import alone_in, in_first_process
from ..files import staged, to_json, write_text
from ..hooks import AMP_DTYPES, random_states_kept
from ..saving.save import describe, save_pretrained
from ..settings import one_line
from .config import BEST, HISTORY, LAST, RECIPE, FitConfig
from .loop import Stream, Trainer, compiled_blocks, models_of, score_of, try_one_batch, unfused_in_bfloat16

EPOCHS = 10  # into which minutes are divided, or more, unless validation takes long
TIMED = 2  # updates by which their time is found, at least
LONG = 10.  # seconds of an epoch that may be more than a pass


def fit(
        task: TrainingTask, train_loader: Any, val_loader: Iterable[Any] | None = None, *,
        out: str | Path | None = None, resume: bool = False, progress: bool = True, config: FitConfig | None = None,
        on_epoch: Callable[..., Any] | None = None, **settings: Any,
) -> list[dict[str, Any]]:
    """Train a task; with `out`, save the last and the best state, so that an interrupted run can be resumed.

    Writes `out/last.pt`, the state after the last epoch; `out/best`, in timm's format, the model with the
    lowest cross-entropy on `val_loader` (without a teacher, top-1; of embeddings, cosine; without a `val_loader`, the
    last); and `out/history.json`.
    Global random states and the mode are restored afterwards, so two calls at once need two processes, not threads.

    Args:
        task: Task to train, such as TrajectoryDistillationTask or timm's ClassificationTask; on its device.
        train_loader: Batches (images [B, C, H, W], labels [B]), with a length; of several processes, each has its part.
        val_loader: Batches held out from training, read after every epoch.
        out: Folder, shared by all processes; None saves nothing.
        resume: Go on from `out/last.pt`, if it exists, with the same settings, but perhaps more epochs.
        config: Or give any of FitConfig's settings as keywords, such as epochs=10.
        on_epoch: Is called with the record of each epoch once its files are written, in the first process.

    Returns:
        One record per epoch: epoch, seconds, updates, amp, lr, the mean of each part of the loss, and val_top1,
        val_top5, val_loss, or, if the task follows embeddings, val_cosine, val_error and val_neighbours.

    Raises:
        FloatingPointError: The loss stopped being finite; the files of the previous epoch remain.
        OSError: A file could not be written; or another process uses the folder.
        TypeError, ValueError: A setting, a loader or the folder is unsuitable.

    Examples:
        >>> history = fit(TrajectoryDistillationTask(student, teacher), loader, loader, out='run', epochs=10)
    """
    config = FitConfig.from_keywords(config, settings, 'fit')
    if not isinstance(task, TrainingTask):
        raise TypeError(f'fit trains a task; got a {type(task).__name__}. Give one, such as '
                        'timm.task.ClassificationTask(model, criterion).')
    if not any(p.requires_grad for p in task.parameters()):
        raise ValueError('No parameter may learn, as in a copy of a teacher. Call model.requires_grad_(True).')
    for name, loader in (('train_loader', train_loader), ('val_loader', val_loader)):
        if isinstance(loader, Iterator):
            raise ValueError(f'{name} is a {type(loader).__name__}, which gives its batches only once. Give a list of '
                             'batches, or a DataLoader.')
    updates = count_updates(train_loader, config.accumulate)
    folder, began, device = Path(out) if out is not None else None, time.perf_counter(), torch.device(task.device)
    history: list[dict[str, Any]] = []
    asked = {**vars(config), 'batch_size': getattr(train_loader, 'batch_size', None), 'updates_per_epoch': updates}
    del asked['epochs'], asked['compile']  # may change when the run is resumed
    plan: dict[str, Any] = {'epochs': config.epochs, 'updates': updates, 'amp': config.amp}
    state = None
    with alone_in(folder), random_states_kept(device), ExitStack() as stack:
        for module in task.modules():
            stack.callback(setattr, module, 'training', module.training)
        if folder is not None:
            describe(models_of(task)['model'])  # fails now, not after an epoch
            if (folder / RECIPE).exists():
                raise ValueError(f"'{folder}' holds the run of a recipe. Resume it with train (odevit distill, odevit "
                                 'finetune), or give another folder.')
            check_unused(folder / LAST, resume)
            if (folder / LAST).exists():
                state = _read_state(folder / LAST, asked)
                history, plan = state['history'], state['plan']
        if config.minutes is None:
            plan['epochs'] = config.epochs  # which may be more than before
            if len(history) > plan['epochs']:
                raise ValueError(f"'{folder}' already has {len(history)} epochs. Give at least as many.")
        validation = 0.
        if val_loader is not None and len(history) < (plan['epochs'] or EPOCHS):
            amp = AMP_DTYPES.get(config.amp)
            validation = in_first_process(lambda: try_one_batch(val_loader, task, amp))
        if not history and (config.minutes is not None or config.amp == 'auto'):
            plan = _measured(task, train_loader, val_loader, config, updates, validation, began)
        if config.minutes is not None:
            train_loader = Stream(train_loader, plan['updates'] * config.accumulate)
            config = replace(config, warmup_epochs=config.warmup_epochs * plan['epochs'] / EPOCHS)
        config = replace(config, epochs=plan['epochs'], minutes=None, amp=plan['amp'])
        trainer = Trainer(task, train_loader, config, plan['updates'])
        if state is not None:
            _load_state(state, trainer, folder)
            del state
        left = range(len(history), plan['epochs'])
        bar = stack.enter_context(tqdm(
            total=plan['epochs'] * trainer.updates, initial=len(history) * trainer.updates, unit='update',
            disable=not progress or trainer.rank > 0 or not left))
        stack.enter_context(unfused_in_bfloat16(trainer))
        if config.compile:
            stack.enter_context(compiled_blocks(task))
        for epoch in left:
            bar.set_description(f"{getattr(task, 'title', 'training')}, epoch {epoch + 1} of {plan['epochs']}")
            record = trainer.epoch(epoch, val_loader, bar.update)
            best = score_of(record, 1e99) >= max(map(score_of, history), default=-1e99)
            history.append(record)
            if folder is not None and trainer.rank == 0:
                if best:
                    save_pretrained(trainer.chosen, folder / BEST)
                write_text(folder / HISTORY, to_json(history))  # before the state, which says what is left to do
                _save_state(folder / LAST, trainer, history=history, settings=asked, plan=plan)
            if on_epoch is not None and trainer.rank == 0:
                on_epoch(record)
            bar.set_postfix({key: f'{record[key]:.4g}' for key in ('loss', 'val_top1', 'val_cosine') if key in record})
    return history


def check_same(where: Any, then: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if then.get(name) != value:
            what = (f"The {name.removesuffix(' sha256')} of the run in '{where}' is not this one's"
                    if name.endswith('sha256') else
                    f"'{where}' was made with {name} {then.get(name)}, but this run has {value}")
            raise ValueError(f'{what}. Resume with what the first run had, or give another folder.')


def check_unused(at: Path, resume: bool) -> None:
    if not resume and at.exists():
        raise ValueError(f"'{at.parent}' already holds a run. Pass resume=True to continue it, or give another folder.")


def _save_state(path: Path, trainer: Trainer, **more: Any) -> None:
    parts: Any = {**trainer.models, 'optimizer': trainer.optimizer, 'scaler': trainer.scaler}
    state = {name: part.state_dict() for name, part in parts.items()}
    state.update(task=trainer.task.get_task_state(), **more)
    with staged(path.parent, path.name) as aside:
        try:
            with open(aside / path.name, 'wb') as file:
                torch.save(state, file)
        except RuntimeError as e:  # hides the file's own
            raise OSError(one_line(e.__context__ or e)) from e


def _read_state(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location='cpu', weights_only=True)
        then = {**asked, **state['settings']}  # for settings younger than the file
        state['history'], state['plan']  # are needed, too
    except OSError:
        raise
    except Exception as e:
        raise ValueError(f"'{path}' is not a state saved by fit(), or truncated. Delete it to start again.") from e
    check_same(path, then, asked)
    return state


def _load_state(state: dict[str, Any], trainer: Trainer, where: Any) -> None:
    for name, module in trainer.models.items():  # all are checked before any is changed
        then, now = ({f'tensor {key}': list(value.shape) for key, value in of.items()}
                     for of in (state[name], module.state_dict()))
        check_same(where, then, {**dict.fromkeys(then), **now})
    trainer.optimizer.load_state_dict(state['optimizer'])  # which checks which parameters learn
    for name, module in trainer.models.items():
        module.load_state_dict(state[name])
    trainer.scaler.load_state_dict(state['scaler'])
    trainer.task.load_task_state(state.get('task'))


def count_updates(train_loader: Any, accumulate: int) -> int:
    updates = len(train_loader) // accumulate
    if updates < 1:
        few = f'has fewer than {accumulate} batches' if accumulate > 1 else 'is empty'
        raise ValueError(f'train_loader {few}. Give more images, or a smaller batch_size or accumulate.')
    return updates


def _measured(
        task: Any, train_loader: Any, val_loader: Any, config: FitConfig, updates: int, validation: float, began: float,
) -> Any:
    """A plan; `updates` are those of a pass, `validation` seconds of a batch."""
    seconds = {amp: _seconds_per_update(task, train_loader, replace(config, amp=amp))
               for amp in ((None, 'bfloat16') if config.amp == 'auto' else (config.amp,))}
    amp = min(seconds, key=seconds.__getitem__)
    epochs: Any = config.epochs
    if config.minutes is not None:
        epochs, updates = updates_in(60 * config.minutes - (time.perf_counter() - began), seconds[amp],
                                     validation * length_hint(val_loader, 1), max(updates, int(LONG / seconds[amp])))
    return in_first_process(lambda: {'epochs': epochs, 'updates': updates, 'amp': amp})


def _seconds_per_update(task: Any, train_loader: Any, config: FitConfig) -> float:
    """By a few on a copy of the task, in which each number of steps has its turn."""
    teacher = getattr(task, 'teacher', None)
    trial = copy.deepcopy(task, {} if teacher is None else {id(module): module for module in teacher.modules()})
    updates = 1 + max(TIMED, len(getattr(trial, 'counts', [()])[0]))
    config = replace(config, epochs=1, minutes=None, compile=False)
    done: list[float] = []
    trainer = Trainer(trial, Stream(train_loader, updates * config.accumulate), config, updates)
    with unfused_in_bfloat16(trainer):
        trainer.train(updates - 2, lambda: done.append(time.perf_counter()))  # timed: one round of all K
    return (done[-1] - done[0]) / (updates - 1)


def updates_in(seconds: float, update: float, validation: float, most: int) -> tuple[int, int]:
    """How many epochs of how many updates, at most `most`, fit into some seconds, by the seconds of each.

    Validation takes at most a fifth of them, unless one takes more.
    """
    most = math.ceil(max(min(most, 3600 / update), 4 * validation / update))  # at most an hour
    epochs = max(1, min(EPOCHS, int(seconds / (5 * validation or 1e-9))))
    each = int((seconds / epochs - validation) / update)
    if each < 1:
        return max(1, min(EPOCHS, int(seconds / (update + validation)))), 1
    return (epochs, each) if each <= most else (int(seconds / (most * update + validation)), most)
