"""fit: train any `timm.task.TrainingTask`, for epochs or for minutes."""
import copy
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timm.task import TrainingTask
from tqdm import tqdm

from ..convert.merge import check_not_merged
from ..distributed import alone_in, in_first_process, rank_and_world
from ..hooks import AMP_DTYPES, random_states_kept
from ..saving.save import describe
from .config import FitConfig
from .loop import Stream, Trainer
from .monitor import scalars, score_of, try_one_batch, unfused_in_bfloat16
from .resume import LAST, check_unused, load_state, models_of, read_state, settings_to_resume

__all__ = ['EPOCHS', 'count_updates', 'fit', 'updates_in']

EPOCHS = 10  # into which minutes are divided at least, for the progress bar and for validation
TRIED = 2  # updates by which their time is found, at least
LONG = 10.  # seconds of an epoch that may be more than a pass over the data


def fit(
        task: TrainingTask,
        train_loader: Any,
        val_loader: Iterable[Any] | None = None,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        progress: bool = True,
        config: FitConfig | None = None,
        **settings: Any,
) -> list[dict[str, float]]:
    """Train a task; with `out`, save the last and the best state, so that an interrupted run can be resumed.

    `out/last.pt` is the whole training state after the last complete epoch, `out/best` the model with the best top-1
    accuracy, or cosine with the teacher's embeddings, on `val_loader` (without one, the last model) in timm's format,
    `out/history.json` one record per epoch, and `out/tensorboard` the same for TensorBoard, if it is installed. Each
    file is complete or absent, and no other process can use the folder meanwhile.

    One batch of `val_loader` and the first training batch are tried first; a refusal leaves weights, buffers and modes
    as they were. With minutes, and with amp 'auto', a few updates are timed on a copy of the task; a resumed run
    continues exactly as was planned then.

    Afterwards, the global random states are what they were. Two calls at once need two processes, not threads. Under
    torch.distributed, the first process validates and writes, and all must share a file system.

    Args:
        task: Task to train, such as TrajectoryDistillationTask or timm's ClassificationTask; on its device.
        train_loader: Batches (images [B, C, H, W], labels [B]); before each epoch, all seeds are set, and its (or its
            sampler's) `set_epoch` is called if it has one. With several processes, each passes its part of the data.
        val_loader: Batches held out from training, for choosing the best epoch; read after every epoch.
        out: Folder for the files; None saves nothing.
        resume: Resume from `out/last.pt`, if it exists, with the same settings, batch size and updates per epoch;
            epochs may be increased.
        progress: Show a progress bar.
        config: Settings.
        **settings: Any of them, in place of `config`, such as epochs=10 or minutes=60; see FitConfig.

    Returns:
        One record per epoch: epoch, seconds, lr, the mean of each part of the loss, and val_top1, val_top5, val_loss,
        or, if the task follows embeddings, val_cosine, val_error and val_neighbours; see EmbeddingResult.

    Raises:
        FloatingPointError: The loss stopped being finite; the files of the previous epoch remain.
        OSError: A file could not be written (files written earlier remain); or another process uses the folder.
        TypeError: A keyword is unknown, or neither epochs nor minutes are given.
        ValueError: A setting, a loader or the folder is unsuitable, or no description to save the model by was found.

    Examples:
        >>> task = TrajectoryDistillationTask(student, teacher)
        >>> history = fit(task, loader, loader, out='run', epochs=10)
        >>> best = timm.create_model('local-dir:run/best', pretrained=True)
    """
    config = FitConfig.from_keywords(config, settings, 'fit')
    updates = _check(task, train_loader, val_loader, config)
    folder, began = Path(out) if out is not None else None, time.perf_counter()
    rank = rank_and_world()[0]
    with alone_in(folder), random_states_kept(task.device):
        state: dict[str, Any] = {'history': []}
        asked, amp = settings_to_resume(config, train_loader, updates), AMP_DTYPES.get(config.amp)
        if folder is not None:
            describe(models_of(task)['model'])  # fail now rather than after the first epoch
            check_unused(folder, resume, folder / LAST)
            if (folder / LAST).exists():
                state = read_state(folder / LAST, torch.device(task.device), asked)
        history: list[dict[str, float]] = state['history']
        plan: dict[str, Any] = state.get('plan') or {'epochs': config.epochs, 'updates': updates, 'amp': config.amp}
        if config.minutes is None:
            plan['epochs'] = config.epochs  # which may be more than before
        if history and len(history) > plan['epochs']:
            raise ValueError(f"'{folder}' already has {len(history)} epochs, but epochs={plan['epochs']}. Give more "
                             'epochs, or another folder.')
        validation = 0.
        if val_loader is not None and len(history) != plan['epochs']:
            validation = in_first_process(lambda: try_one_batch(val_loader, task, amp))
        if not history and (config.minutes is not None or config.amp == 'auto'):
            plan = _measured(task, train_loader, val_loader, config, updates, validation, began)
        if config.minutes is not None:
            train_loader = Stream(train_loader, plan['updates'] * config.accumulate)
            config = replace(config, warmup_epochs=config.warmup_epochs * plan['epochs'] / EPOCHS)
        config = replace(config, epochs=plan['epochs'], minutes=None, amp=plan['amp'])
        trainer = Trainer(task, train_loader, config, plan['updates'])
        if history:
            load_state(state, f"'{folder}'", trainer.models, trainer.optimizer, trainer.scaler)
        del state
        left = range(len(history), plan['epochs'])
        bar = tqdm(total=plan['epochs'] * trainer.updates, initial=len(history) * trainer.updates, unit='update',
                   disable=not progress or rank > 0 or not left)
        attention = unfused_in_bfloat16(task, trainer.device, trainer.dtype)
        with bar, attention, scalars(folder if rank == 0 else None) as add_scalars:
            for epoch in left:
                bar.set_description(f"{getattr(task, 'title', 'training')}, epoch {epoch + 1} of {plan['epochs']}")
                record = trainer.epoch(epoch, val_loader, bar.update)
                best = max(map(score_of, history), default=-1e99)
                history.append(record)
                if folder is not None and rank == 0:
                    trainer.save(folder, history, asked, plan, best=score_of(record, 1e99) > best)
                add_scalars(record)
                shown = ('loss', 'val_top1', 'val_cosine')
                bar.set_postfix({key: f'{record[key]:.4g}' for key in shown if key in record})
    return history


def _check(task: Any, train_loader: Any, val_loader: Any, config: FitConfig) -> int:
    """Refuse what cannot be trained; returns the updates of a pass over the data."""
    if not isinstance(task, TrainingTask):
        raise TypeError(f'fit trains a task; got a {type(task).__name__}. Give one, such as '
                        'TrajectoryDistillationTask(model, teacher) or timm.task.ClassificationTask(model, criterion).')
    updates = count_updates(train_loader, config.accumulate)
    for name, loader in (('train_loader', train_loader), ('val_loader', val_loader)):
        if isinstance(loader, Iterator):
            raise ValueError(f'{name} is a {type(loader).__name__}, which gives its batches only once, but it is read '
                             'in every epoch. Give a list of batches, or a DataLoader.')
    check_not_merged(models_of(task)['model'])
    if not torch.is_grad_enabled():
        raise RuntimeError('Gradients are off, as in torch.no_grad() or torch.inference_mode(). Train outside of it.')
    trainable: Any = task.get_trainable_module()
    if not any(p.requires_grad for p in trainable.parameters()):
        raise ValueError('Every parameter of the model is frozen. Call model.requires_grad_(True) first.')
    return updates


def count_updates(train_loader: Any, accumulate: int = 1) -> int:
    """Updates per pass over the data; ValueError if there is none."""
    try:
        batches = len(train_loader)
    except TypeError:
        raise ValueError('train_loader needs a length, for the learning-rate schedule.') from None
    if batches < accumulate or batches < 1:
        few = f'has fewer than {accumulate} batches' if accumulate > 1 else 'is empty'
        raise ValueError(f'train_loader {few}. Give more images, or a smaller batch size '
                         '(batch_size; in a recipe data.batch_size).')
    return batches // accumulate


def _measured(
        task: Any, train_loader: Any, val_loader: Any, config: FitConfig, updates: int, validation: float, began: float,
) -> dict[str, Any]:
    """Epochs, updates of each and mixed precision, by the time of an update on a copy; the first process decides.

    `updates` are those of a pass over the data, `validation` the seconds of a batch of it, `began` when minutes began.
    """
    seconds = {amp: _seconds_per_update(task, train_loader, replace(config, amp=amp))
               for amp in ((None, 'bfloat16') if config.amp == 'auto' else (config.amp,))}

    def plan() -> dict[str, Any]:
        amp = min(seconds, key=seconds.__getitem__)
        epochs, each = config.epochs, updates
        if config.minutes is not None:
            batches = 0 if val_loader is None else len(val_loader) if hasattr(val_loader, '__len__') else 1
            epochs, each = updates_in(60 * config.minutes - (time.perf_counter() - began), seconds[amp],
                                      validation * batches, max(updates, int(LONG / seconds[amp])))
        return {'epochs': epochs, 'updates': each, 'amp': amp}
    planned: dict[str, Any] = in_first_process(plan)
    return planned


def _seconds_per_update(task: Any, train_loader: Any, config: FitConfig) -> float:
    """Seconds of an update, by a few on a copy of the task, in which each number of steps has its turn."""
    teacher = getattr(task, 'teacher', None)
    trial = copy.deepcopy(task, {} if teacher is None else {id(module): module for module in teacher.modules()})
    updates = 1 + max(TRIED, len(getattr(trial, 'counts', [None])[0] or ()))
    config = replace(config, epochs=1, minutes=None, compile=False)
    done: list[float] = []
    trainer = Trainer(trial, Stream(train_loader, updates * config.accumulate), config, updates)
    with unfused_in_bfloat16(trial, trainer.device, trainer.dtype):
        trainer.train(0, lambda: done.append(time.perf_counter()))
    return (done[-1] - done[0]) / (updates - 1)


def updates_in(seconds: float, update: float, validation: float, most: int) -> tuple[int, int]:
    """How many epochs of how many updates, at most `most`, fit into some seconds; at least one of one.

    `update` and `validation` are the seconds of an update and of the validation after each epoch.
    """
    each = int((seconds / EPOCHS - validation) / update)
    if each < 1:
        return max(1, min(EPOCHS, int(seconds / (update + validation)))), 1
    if each <= most:
        return EPOCHS, each
    return int(seconds / (most * update + validation)), most
