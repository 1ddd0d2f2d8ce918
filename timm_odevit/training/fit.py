"""The training loop, built from timm's parts: it trains any `timm.task.TrainingTask`."""
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from timm.utils import dispatch_clip_grad, random_seed
from tqdm import tqdm

from ..convert.merge import check_not_merged
from ..distributed import alone_in, in_first_process, over_processes, rank_and_world
from ..evaluation.accuracy import AMP_DTYPES
from ..files import to_json, write_text
from ..hooks import autocast, random_states_kept
from ..saving.save import describe, save_pretrained
from .config import FitConfig
from .loaders import set_epoch
from .monitor import (
    check_batch,
    check_loss_is_finite,
    muon_in_float32,
    must_fit,
    scalars,
    score_of,
    try_one_batch,
    unfused_in_bfloat16,
    validate,
)
from .resume import BEST, HISTORY, LAST, check_unused, load_state, models_of, read_state, save_state, settings_to_resume

__all__ = ['count_updates', 'fit']


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
    file is either complete or absent. While `fit` runs, no other process can use the folder.

    Data that does not fit is refused within seconds: one batch of `val_loader` goes through the model before anything
    else, in an iteration of its own, with workers of its own if it has any; the first training batch is checked when it
    arrives, so that the training data is not read an extra time. A refusal leaves weights, buffers and modes as they
    were, and neither check changes a result.

    The seed is local: afterwards, the global random states are what they were. Two calls in two threads at once draw
    from the same random states, so that neither result can be repeated; use processes for that.

    Under torch.distributed, the task is wrapped by its `prepare_distributed`, the first process validates and writes,
    and all processes read `out/last.pt` to resume, so they must share a file system.

    Args:
        task: Task to train, such as TrajectoryDistillationTask or timm's ClassificationTask; on its device.
        train_loader: Batches (images [B, C, H, W], labels [B]); before each epoch, all seeds are set, and its (or its
            sampler's) `set_epoch` is called if it has one. With several processes, each passes its part of the data.
        val_loader: Batches held out from training, for choosing the best epoch; it is read after every epoch, so an
            iterator, such as a generator, is refused.
        out: Folder for the files; None saves nothing.
        resume: Resume from `out/last.pt`, if it exists, with the same settings, batch size and updates per epoch;
            epochs may be increased.
        progress: Show a progress bar.
        config: Settings.
        **settings: Any of them, in place of `config`, such as epochs=10; see FitConfig.

    Returns:
        One record per epoch: epoch, seconds, lr, the mean of each part of the loss, and val_top1, val_top5, val_loss,
        or, if the task follows embeddings, val_cosine, val_error and val_neighbours; see EmbeddingResult.

    Raises:
        FloatingPointError: The loss stopped being finite; the message says which step of an ODE-ViT diverged, and the
            files of the previous epoch remain.
        OSError: A file could not be written, as on a full disk (files written earlier remain); or another process
            uses the folder.
        TypeError: A keyword is unknown.
        ValueError: A setting, a loader or the folder is unsuitable, or no description to save the model by was found.

    Examples:
        >>> task = TrajectoryDistillationTask(student, teacher)
        >>> history = fit(task, loader, loader, out='run', epochs=10)
        >>> best = timm.create_model('local-dir:run/best', pretrained=True)
    """
    config = FitConfig.from_keywords(config, settings, 'fit')
    updates = _check(task, train_loader, val_loader, config)
    folder = Path(out) if out is not None else None
    rank = rank_and_world()[0]
    with alone_in(folder), random_states_kept(task.device):
        kept = settings_to_resume(config, train_loader, updates)
        state: dict[str, Any] = {'history': []}
        if folder is not None:
            describe(models_of(task)['model'])  # fail now rather than after the first epoch
            check_unused(folder, resume, folder / LAST)
            if (folder / LAST).exists():
                state = read_state(folder / LAST, torch.device(task.device), kept, config.epochs)
        history: list[dict[str, float]] = state['history']
        left = range(len(history), config.epochs)
        if val_loader is not None and left:
            in_first_process(lambda: try_one_batch(val_loader, task, AMP_DTYPES[config.amp]))
        trainer = _Trainer(task, train_loader, config, updates)
        if history:
            load_state(state, f"'{folder}'", trainer.models, trainer.optimizer, trainer.scaler)
        del state
        bar = tqdm(total=config.epochs * updates, initial=len(history) * updates, unit='update',
                   disable=not progress or rank > 0 or not left)
        attention = unfused_in_bfloat16(task, trainer.device, trainer.dtype)
        with bar, muon_in_float32(), attention, scalars(folder if rank == 0 else None) as add_scalars:
            for epoch in left:
                bar.set_description(f"{getattr(task, 'title', 'training')}, epoch {epoch + 1} of {config.epochs}")
                record = trainer.epoch(epoch, val_loader, bar.update)
                best = max((score_of(before, -math.inf) for before in history), default=-math.inf)
                history.append(record)
                if folder is not None and rank == 0:
                    trainer.save(folder, history, kept, best=score_of(record, math.inf) > best)
                add_scalars(record)
                shown = ('loss', 'val_top1', 'val_cosine')
                bar.set_postfix({key: f'{record[key]:.4g}' for key in shown if key in record})
    return history


def _check(task: Any, train_loader: Any, val_loader: Any, config: FitConfig) -> int:
    """Refuse what cannot be trained; returns the updates per epoch."""
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
        raise ValueError(
            'Every parameter of the model is frozen, as in a copy of a teacher that a task has frozen. '
            'Call model.requires_grad_(True) first.')
    return updates


def count_updates(train_loader: Any, accumulate: int = 1) -> int:
    """Updates per epoch, at least 1.

    Raises:
        ValueError: The loader has no length, or too few batches.
    """
    try:
        batches = len(train_loader)
    except TypeError:
        raise ValueError('train_loader needs a length, for the learning-rate schedule.') from None
    if batches < accumulate or batches < 1:
        few = f'has fewer than {accumulate} batches' if accumulate > 1 else 'is empty'
        raise ValueError(f'train_loader {few}. Give more images, or a smaller batch size '
                         '(batch_size; in a recipe data.batch_size).')
    return batches // accumulate


class _Trainer:
    """A task in training, with its data, its optimizer and its schedule."""

    def __init__(self, task: Any, train_loader: Any, config: FitConfig, updates: int) -> None:
        self.task, self.loader, self.config, self.updates = task, train_loader, config, updates
        self.device, self.dtype = torch.device(task.device), AMP_DTYPES[config.amp]
        self.rank, self.world = rank_and_world()
        for name in ('trainable_module_ema', 'eval_model_ema'):  # left by an earlier fit
            if hasattr(task, name):
                delattr(task, name)
        if config.ema_decay is not None:
            task.setup_ema(decay=config.ema_decay, use_warmup=True)
        trainable = task.get_trainable_module()
        if config.compile:
            task.compile()
        if self.world > 1:
            task.prepare_distributed(device_ids=[self.device.index] if self.device.type == 'cuda' else None)
        self.optimizer = create_optimizer_v2(
            trainable, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, layer_decay=config.layer_decay)
        self.scheduler: Any = create_scheduler_v2(
            self.optimizer, sched=config.sched, num_epochs=config.epochs,
            warmup_epochs=config.warmup_epochs,  # type: ignore[arg-type]
            warmup_lr=config.min_lr, min_lr=config.min_lr, step_on_epochs=False, updates_per_epoch=updates)[0]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == 'float16')
        self.models = models_of(task)
        self.chosen = self.models['ema' if 'ema' in self.models else 'model']  # is validated and saved

    def epoch(self, epoch: int, val_loader: Any, done: Callable[[], Any]) -> dict[str, float]:
        """Train for one epoch and validate; returns its record, which depends only on the seed and the state."""
        random_seed((self.config.seed * 10_007 + epoch) * self.world % 2 ** 31, self.rank)
        set_epoch(self.loader, epoch)
        started = time.perf_counter()
        record: dict[str, float] = {'epoch': epoch + 1, **self._train(epoch, done)}
        record['seconds'] = time.perf_counter() - started
        if not all(torch.isfinite(p).all() for model in self.models.values() for p in model.parameters()):
            raise FloatingPointError(
                f'The weights are not finite after epoch {epoch + 1}; files written earlier remain. '
                'Start again in another folder with a lower lr, or with amp bfloat16 or None.')
        if val_loader is not None and self.rank == 0:
            record.update(validate(self.task, self.chosen, val_loader, self.dtype))
        if self.world > 1:
            records = [record]
            dist.broadcast_object_list(records)  # the others also wait here while the first validates
            record = records[0]
        return record

    def _train(self, epoch: int, done: Callable[[], Any]) -> dict[str, float]:
        """Train for one epoch; returns the learning rate and the mean of each part of the loss."""
        task, optimizer, scaler, accumulate = self.task, self.optimizer, self.scaler, self.config.accumulate
        batches, i = self.updates * accumulate, -1
        sums: dict[str, Any] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)  # a part may be absent from some updates
        optimizer.zero_grad()
        for i, batch in enumerate(self.loader):
            if i == batches:
                break
            update, last = epoch * self.updates + i // accumulate, (i + 1) % accumulate == 0
            images, labels = check_batch('train_loader', batch, task) if i == 0 else batch
            images, labels = (x.to(self.device, non_blocking=True) for x in (images, labels))
            self.scheduler.step_update(update)
            if hasattr(task, 'begin_update'):
                task.begin_update(update, self.config.seed)
            with nullcontext() if last else task.no_sync():
                with must_fit('train_loader', images, labels, task) if update == i == 0 else nullcontext():
                    if i == 0:
                        task.train()
                    with autocast(self.device, self.dtype):
                        parts = task(images, labels)
                parts = {key: part for key, part in parts.items() if key != 'output'}
                check_loss_is_finite(parts, images, task, epoch, i, self.dtype)
                scaler.scale(parts['loss'] / accumulate).backward()
            for key, part in parts.items():
                sums[key] += part.detach().float()  # stays on the device: one wait per batch is enough
                counts[key] += 1
            if last:
                if self.config.clip_grad is not None:
                    scaler.unscale_(optimizer)
                    dispatch_clip_grad(task.get_clip_parameters(), self.config.clip_grad)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                task.update_ema(step=update)
                done()
        if i < batches - 1:
            raise ValueError(f'train_loader gave {i + 1} batches in epoch {epoch + 1}, but its length is '
                             f'{len(self.loader)}. Give a loader that gives as many batches as its length.')
        means = {key: float(over_processes(value / counts[key])) for key, value in sums.items()}
        return {'lr': optimizer.param_groups[-1]['lr'], **means}

    def save(self, folder: Path, history: list[dict[str, float]], settings: dict[str, Any], best: bool) -> None:
        """Save the whole state, and the model if it is the best so far."""
        try:
            if best:
                save_pretrained(self.chosen, folder / BEST)
            write_text(folder / HISTORY, to_json(history))  # before the state, which says what is still to be trained
            save_state(folder / LAST, self.task, self.optimizer, self.scaler, history, settings)
        except OSError as e:
            raise OSError(f"Epoch {len(history)} could not be written to '{folder}': {str(e).splitlines()[0]}. Files "
                          'written earlier are intact; free some space, and resume.') from e
