"""The training loop, made of timm's parts: it trains any `timm.task.TrainingTask`."""
import json
import math
import os
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Union

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from timm.utils import dispatch_clip_grad, random_seed, unwrap_model
from torch import nn
from tqdm import tqdm

from ..evaluate import AMP_DTYPES, evaluate
from ..hub import describe, save_pretrained

__all__ = ['fit']

LAST = 'last.pt'
BEST = 'best'
HISTORY = 'history.json'


def fit(
        task: TrainingTask,
        train_loader: Any,
        val_loader: Optional[Iterable[Any]] = None,
        *,
        epochs: int,
        out: Optional[Union[str, Path]] = None,
        resume: bool = False,
        opt: str = 'adamw',
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        sched: str = 'cosine',
        warmup_epochs: int = 0,
        min_lr: float = 1e-6,
        clip_grad: Optional[float] = 1.,
        ema_decay: Optional[float] = None,
        amp: Optional[str] = None,
        seed: int = 0,
        progress: bool = True,
) -> List[Dict[str, float]]:
    """Train a task; with `out`, keep the last and the best state, so that an interrupted run can go on.

    `out/last.pt` is the whole training state after the last full epoch, `out/best` the model with the best top-1
    accuracy on `val_loader` (the last one without it) in timm's format, `out/history.json` one record an epoch. Each
    file is written aside and renamed, so it is whole or not there.

    Args:
        task: What to train, such as TrajectoryDistillationTask or timm's ClassificationTask; on its device.
        train_loader: Batches (images [B, C, H, W], labels [B]); all seeds are set before each epoch.
        val_loader: Batches held out from training, for choosing the best epoch.
        epochs: Number of epochs.
        out: Folder for the files; None keeps nothing.
        resume: Go on from `out/last.pt`, if it is there, with the same settings; epochs may be more.
        opt: timm optimizer.
        lr: Peak learning rate.
        weight_decay: Weight decay; not on norms, biases and embeddings.
        sched: timm scheduler, stepped every update.
        warmup_epochs: Epochs of linear warm-up.
        min_lr: Final learning rate.
        clip_grad: Largest norm of the gradient; None for no clipping.
        ema_decay: Decay of a moving average of the weights, which is then what is validated and saved as best.
        amp: 'bfloat16', 'float16' or None.
        seed: Seed of the run.
        progress: Show a progress bar.

    Returns:
        The history: epoch, seconds, lr, the mean of each part of the loss, and val_top1, val_top5, val_loss.

    Raises:
        FloatingPointError: The loss stopped being finite; the files of the epoch before remain.
        ValueError: A setting or the folder does not fit, or the model has no description to save it by.
    """
    if epochs < 1:
        raise ValueError(f'epochs must be at least 1; got {epochs!r}.')
    if clip_grad is not None and not clip_grad > 0:
        raise ValueError(f'clip_grad must be above 0, or None for no clipping; got {clip_grad!r}.')
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f'ema_decay must be at least 0 and below 1, or None; got {ema_decay!r}.')
    if amp not in AMP_DTYPES:
        raise ValueError(f"Unknown amp '{amp}'. Allowed: bfloat16, float16, or None.")
    try:
        updates = len(train_loader)
    except TypeError:
        raise ValueError('train_loader needs a length, for the learning-rate schedule.') from None
    if updates < 1:
        raise ValueError('train_loader is empty. Give more images, or a smaller batch size.')
    folder = Path(out) if out is not None else None
    if folder is not None and (folder / LAST).exists() and not resume:
        raise ValueError(f"'{folder}' holds a run already. Pass resume=True to go on with it, or another folder.")

    dtype = AMP_DTYPES[amp]
    device = task.device
    trainable: Any = task.get_trainable_module()
    if not any(p.requires_grad for p in trainable.parameters()):
        raise ValueError(
            'Every parameter of the model is frozen, as in a copy of a teacher that a task has frozen. '
            'Call model.requires_grad_(True) first.')
    optimizer = create_optimizer_v2(trainable, opt=opt, lr=lr, weight_decay=weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched=sched, num_epochs=epochs, warmup_epochs=warmup_epochs, warmup_lr=min_lr, min_lr=min_lr,
        step_on_epochs=False, updates_per_epoch=updates)
    if ema_decay is not None and not task.has_ema():
        task.setup_ema(decay=ema_decay, use_warmup=True)
    models = _models(task)
    scaler = torch.amp.GradScaler(device.type, enabled=amp == 'float16')
    history: List[Dict[str, float]] = []
    settings = dict(
        opt=opt, lr=lr, weight_decay=weight_decay, sched=sched, warmup_epochs=warmup_epochs, min_lr=min_lr,
        clip_grad=clip_grad, ema_decay=ema_decay, amp=amp, seed=seed)
    if resume and folder is not None and (folder / LAST).exists():
        history = _load(folder / LAST, task, optimizer, scaler, settings)
        if len(history) >= epochs:
            return history
    if folder is not None:
        describe(models['model'])  # better now than after the first epoch
        folder.mkdir(parents=True, exist_ok=True)
    best = max((record.get('val_top1', -math.inf) for record in history), default=-math.inf)

    with tqdm(total=epochs * updates, initial=len(history) * updates, unit='batch', disable=not progress) as bar:
        for epoch in range(len(history), epochs):
            random_seed(seed + epoch)  # an epoch depends on the seed and the weights, not on how it was reached
            started = time.perf_counter()
            bar.set_description(f'epoch {epoch + 1} of {epochs}')
            record = {'epoch': epoch + 1.}
            record.update(_train_epoch(
                task, train_loader, optimizer, scheduler, scaler, dtype, epoch, updates, clip_grad, bar))
            record['seconds'] = time.perf_counter() - started
            model = models['ema' if 'ema' in models else 'model']
            if val_loader is not None:
                result = evaluate(model, val_loader, amp_dtype=dtype).results[-1]
                record.update(val_top1=result.top1, val_top5=result.top5, val_loss=result.loss)
            history.append(record)
            if folder is not None:
                if record.get('val_top1', math.inf) > best:
                    save_pretrained(model, folder / BEST)
                _save(folder / LAST, task, optimizer, scaler, history, settings)
                _write(folder / HISTORY, lambda path: path.write_text(json.dumps(history, indent=2) + '\n'))
            best = max(best, record.get('val_top1', -math.inf))
            bar.set_postfix({key: f'{record[key]:.4g}' for key in ('loss', 'val_top1') if key in record})
    return history


def _train_epoch(task, loader, optimizer, scheduler, scaler, dtype, epoch, updates, clip_grad, bar):
    task.train()
    device = task.device
    sums: Dict[str, Any] = defaultdict(float)
    for i, (images, labels) in enumerate(loader):
        update = epoch * updates + i
        scheduler.step_update(update)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
            parts = task(images, labels)
        loss = parts['loss']
        values = {key: part.detach().float() for key, part in parts.items() if key != 'output'}
        value = values['loss'].item()
        if not math.isfinite(value):
            found = ', '.join(f'{key} {part.item():.4g}' for key, part in values.items())
            raise FloatingPointError(
                f'The loss is not finite in epoch {epoch + 1}, batch {i + 1} ({found}). '
                'Lower lr, or use amp bfloat16 or None.')
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clip_grad is not None:
            scaler.unscale_(optimizer)
            dispatch_clip_grad(task.get_clip_parameters(), clip_grad)
        scaler.step(optimizer)
        scaler.update()
        task.update_ema(step=update)
        for key, part in values.items():
            sums[key] = sums[key] + part  # stays on the device: one wait for it an update is enough
        bar.update()
    return {'lr': optimizer.param_groups[0]['lr'], **{key: float(total) / updates for key, total in sums.items()}}


def _models(task: TrainingTask) -> Dict[str, nn.Module]:
    """The model in training, and its moving average if there is one, without wrappers."""
    models = {'model': task.get_eval_model()}
    if task.has_ema():
        models['ema'] = task.get_eval_model(ema=True)
    return {name: unwrap_model(model) for name, model in models.items()}


def _save(path: Path, task: TrainingTask, optimizer, scaler, history, settings) -> None:
    state: Dict[str, Any] = {name: module.state_dict() for name, module in _models(task).items()}
    state.update(optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), history=history, settings=settings)
    _write(path, lambda temporary: torch.save(state, temporary))


def _load(path: Path, task: TrainingTask, optimizer, scaler, settings) -> List[Dict[str, float]]:
    try:
        state = torch.load(path, map_location=task.device, weights_only=True)
    except Exception as e:
        raise ValueError(f"'{path}' cannot be read ({str(e).splitlines()[0]}). Delete it to start anew.") from e
    if not isinstance(state, dict) or 'settings' not in state:
        raise ValueError(f"'{path}' is not the state of a run of fit(). Give the folder of one, or another folder.")
    for name, value in settings.items():
        if state['settings'][name] != value:
            raise ValueError(
                f"'{path}' was made with {name}={state['settings'][name]!r}, this run has {name}={value!r}. "
                'Resume with the settings of the first run, or start another folder.')
    for name, module in _models(task).items():
        try:
            module.load_state_dict(state[name])
        except RuntimeError as e:
            raise ValueError(f"'{path}' holds another model ({str(e).splitlines()[1].strip()}).") from e
    optimizer.load_state_dict(state['optimizer'])
    scaler.load_state_dict(state['scaler'])
    return state['history']


def _write(path: Path, write) -> None:
    temporary = path.with_name(f'.{path.name}.tmp')
    write(temporary)
    with open(temporary, 'rb') as f:
        os.fsync(f.fileno())
    os.replace(temporary, path)
