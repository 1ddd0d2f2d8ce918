"""The training loop, made of timm's parts: it trains any `timm.task.TrainingTask`."""
import math
import random
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Union

import numpy as np
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2, muon
from timm.scheduler import create_scheduler_v2
from timm.task import TrainingTask
from timm.utils import dispatch_clip_grad, random_seed, reduce_tensor, unwrap_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..blocks import find_ode_blocks
from ..evaluate import AMP_DTYPES, evaluate
from ..files import locked, staged, to_json, write_text
from ..hub import describe, save_pretrained
from ..merge import check_not_merged
from ..patches import hooked
from ..settings import takes
from ..spans import check_images
from .config import FitConfig

__all__ = ['alone_in', 'count_updates', 'fit']

LAST = 'last.pt'
BEST = 'best'
HISTORY = 'history.json'


@takes(FitConfig)
def fit(
        task: TrainingTask,
        train_loader: Any,
        val_loader: Optional[Iterable[Any]] = None,
        *,
        out: Optional[Union[str, Path]] = None,
        resume: bool = False,
        progress: bool = True,
        config: FitConfig,
) -> List[Dict[str, float]]:
    """Train a task; with `out`, keep the last and the best state, so that an interrupted run can go on.

    `out/last.pt` is the whole training state after the last full epoch, `out/best` the model with the best top-1
    accuracy on `val_loader` (the last one without it) in timm's format, `out/history.json` one record an epoch. Each
    file is written aside and renamed, so it is whole or not there, and no other process can use the folder meanwhile.

    What does not fit is refused in the first seconds: one batch of `val_loader` goes through the model before anything
    else, by an iteration of its own, with its workers if it has any; the first training batch is looked at when it
    comes, so that the training data is read as often as without. A refusal leaves weights, buffers and modes as they
    were, and neither look changes a result.

    Where torch.distributed runs, the task is wrapped by its `prepare_distributed`, the first process validates and
    writes, and all of them read `out/last.pt` to resume: they need one file system.

    Args:
        task: What to train, such as TrajectoryDistillationTask or timm's ClassificationTask; on its device.
        train_loader: Batches (images [B, C, H, W], labels [B]); all seeds are set before each epoch, and its (or its
            sampler's) `set_epoch` is called if it has one. Of several processes, each gets a part of its own.
        val_loader: Batches held out from training, for choosing the best epoch; it is read after every epoch, so an
            iterator, such as a generator, is refused.
        out: Folder for the files; None keeps nothing.
        resume: Go on from `out/last.pt`, if it is there, with the same settings, the same size of batches and as many
            updates an epoch; epochs may be more.
        progress: Show a progress bar.
        config: Settings; or give each of them as a keyword, such as epochs=10, see FitConfig.

    Returns:
        The history: epoch, seconds, lr, the mean of each part of the loss, and val_top1, val_top5, val_loss.

    Raises:
        FloatingPointError: The loss stopped being finite; the message says which step of an ODE-ViT diverged, and the
            files of the epoch before remain.
        OSError: A file could not be written, as on a full disk; what was written before remains. Or another process
            uses the folder.
        TypeError: A keyword is unknown.
        ValueError: A setting, a loader or the folder does not fit, or the model has no description to save it by.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in ('epochs', 'compile')}
    epochs, amp = config.epochs, config.amp
    updates = count_updates(train_loader, config.accumulate)
    for name, loader in (('train_loader', train_loader), ('val_loader', val_loader)):
        if isinstance(loader, Iterator):
            raise ValueError(f'{name} is a {type(loader).__name__}, which gives its batches once, and it is read in '
                             'every epoch. Give a list of batches, or a DataLoader.')
    sizes = [part.batch_size for part in _chain(train_loader) if type(getattr(part, 'batch_size', None)) is int]
    settings.update(batch_size=sizes[0] if sizes else None, updates_per_epoch=updates)
    folder = Path(out) if out is not None else None
    dtype = AMP_DTYPES[amp]
    device = torch.device(task.device)
    check_not_merged(_models(task)['model'])
    trainable: Any = task.get_trainable_module()
    if not any(p.requires_grad for p in trainable.parameters()):
        raise ValueError(
            'Every parameter of the model is frozen, as in a copy of a teacher that a task has frozen. '
            'Call model.requires_grad_(True) first.')
    world, rank = (dist.get_world_size(), dist.get_rank()) if _distributed() else (1, 0)
    with alone_in(folder):
        state: Dict[str, Any] = {'history': []}
        if folder is not None:
            describe(_models(task)['model'])  # better now than after the first epoch
            if (folder / LAST).exists():
                if not resume:
                    raise ValueError(
                        f"'{folder}' holds a run already. Pass resume=True to go on with it, or another folder.")
                state = _read(folder / LAST, device, settings, epochs)
        history: List[Dict[str, float]] = state['history']
        if val_loader is not None and len(history) < epochs:
            _in_first_process(lambda: _look_at(val_loader, task, dtype))

        for name in ('trainable_module_ema', 'eval_model_ema'):  # of a fit before
            if hasattr(task, name):
                delattr(task, name)
        if config.ema_decay is not None:
            task.setup_ema(decay=config.ema_decay, use_warmup=True)
        if config.compile:
            task.compile()
        if world > 1:
            task.prepare_distributed(device_ids=[device.index] if device.type == 'cuda' else None)
        optimizer = create_optimizer_v2(
            trainable, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, layer_decay=config.layer_decay)
        scheduler, _ = create_scheduler_v2(
            optimizer, sched=config.sched, num_epochs=epochs, warmup_epochs=config.warmup_epochs,
            warmup_lr=config.min_lr, min_lr=config.min_lr, step_on_epochs=False, updates_per_epoch=updates)
        models = _models(task)
        scaler = torch.amp.GradScaler(device.type, enabled=amp == 'float16')
        if history:
            _load(state, f"'{folder}'", models, optimizer, scaler)
        del state
        if len(history) == epochs:
            return history
        best = max((record.get('val_top1', -math.inf) for record in history), default=-math.inf)

        bar = tqdm(total=epochs * updates, initial=len(history) * updates, unit='update',
                   disable=not progress or rank > 0)
        run = _Run(task, train_loader, config, optimizer, scheduler, scaler, updates, bar)
        with bar, _muon_for(device):
            for epoch in range(len(history), epochs):
                # an epoch depends on the seed and the weights, not on how it was reached
                random_seed((config.seed * 10_007 + epoch) * world % 2 ** 31, rank)
                parts: Any = (train_loader, getattr(train_loader, 'sampler', None))
                for part in parts:
                    if hasattr(part, 'set_epoch'):
                        part.set_epoch(epoch)
                started = time.perf_counter()
                bar.set_description(f'epoch {epoch + 1} of {epochs}')
                record = {'epoch': epoch + 1.}
                record.update(run.train(epoch))
                record['seconds'] = time.perf_counter() - started
                if not all(torch.isfinite(p).all() for module in models.values() for p in module.parameters()):
                    raise FloatingPointError(
                        f'The weights are not finite after epoch {epoch + 1}; what was written before it remains. '
                        'Start another folder with a lower lr, or with amp bfloat16 or None.')
                model = models['ema' if 'ema' in models else 'model']
                if val_loader is not None and rank == 0:
                    result = evaluate(model, val_loader, amp_dtype=dtype).results[-1]
                    record.update(val_top1=result.top1, val_top5=result.top5, val_loss=result.loss)
                if world > 1:
                    records = [record]
                    dist.broadcast_object_list(records)  # and nobody runs ahead while the first process validates
                    record = records[0]
                history.append(record)
                if folder is not None and rank == 0:
                    try:
                        if record.get('val_top1', math.inf) > best:
                            save_pretrained(model, folder / BEST)
                        _save(folder / LAST, task, optimizer, scaler, history, settings)
                        write_text(folder / HISTORY, to_json(history))
                    except OSError as e:
                        raise OSError(
                            f"Epoch {epoch + 1} could not be written to '{folder}': {str(e).splitlines()[0]}. What was "
                            'written before is whole; make room, and resume.') from e
                best = max(best, record.get('val_top1', -math.inf))
                bar.set_postfix({key: f'{record[key]:.4g}' for key in ('loss', 'val_top1') if key in record})
        return history


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
        few = f'has less than {accumulate} batches' if accumulate > 1 else 'is empty'
        raise ValueError(f'train_loader {few}. Give more images, or a smaller batch size.')
    return batches // accumulate


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _in_first_process(do: Callable[[], Any]) -> None:
    """Of several processes, only the first does it; what it refuses, all refuse."""
    refused: List[Any] = [None]
    if not _distributed() or dist.get_rank() == 0:
        try:
            do()
        except (OSError, ValueError) as e:
            refused = [e]
    if _distributed():
        dist.broadcast_object_list(refused)
    if refused[0] is not None:
        raise refused[0]


@contextmanager
def alone_in(folder: Optional[Path]) -> Iterator[None]:
    """Let no other run use a folder; of several processes of one run, the first has the lock. None is no folder.

    Raises:
        OSError: Another run uses it, or it cannot be written to.
    """
    with ExitStack() as stack:
        if folder is not None:
            _in_first_process(lambda: stack.enter_context(locked(folder)))
        yield


def _chain(loader: Any) -> List[Any]:
    """A loader, and those that it takes its batches from."""
    parts: List[Any] = []
    while loader is not None:
        parts.append(loader)
        loader = getattr(loader, 'loader', getattr(loader, 'source', None))
    return parts


@contextmanager
def _undisturbed(loader: Any, device: torch.device) -> Iterator[None]:
    """Put back what one more iteration changes: random states, and the workers that a DataLoader keeps."""
    parts = _chain(loader)
    owners = [owner for part in parts for owner in (
        part, getattr(part, 'sampler', None), getattr(part, 'batch_sampler', None),
        getattr(getattr(part, 'batch_sampler', None), 'sampler', None))]
    found = [getattr(owner, 'generator', None) for owner in owners]
    states = [(generator, generator.get_state()) for generator in found if isinstance(generator, torch.Generator)]
    workers = [(part, part._iterator) for part in parts if isinstance(part, DataLoader)]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []):
        try:
            for part, _ in workers:
                part._iterator = None
            yield
        finally:
            for part, kept in workers:
                part._iterator = kept
            for generator, state in states:
                generator.set_state(state)
            random.setstate(python)
            np.random.set_state(numpy)


def _look_at(val_loader: Any, task: TrainingTask, dtype: Optional[torch.dtype]) -> None:
    """Validate one batch, and leave everything as it was."""
    with _undisturbed(val_loader, task.device):
        for batch in val_loader:
            images, labels = _checked('val_loader', batch, task)
            with _fitting('val_loader', images, labels, task):
                evaluate(_models(task)['model'], [(images, labels)], amp_dtype=dtype)
            return
    raise ValueError('val_loader is empty. Give at least one batch, or None.')


def _checked(name: str, batch: Any, task: TrainingTask) -> Any:
    """The images and labels of a first batch.

    Raises:
        ValueError: It is no batch, or a label is none of the model's.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = f'{len(batch)} things' if isinstance(batch, (tuple, list)) else f'a {type(batch).__name__}'
        raise ValueError(f'{name} must give batches (images, labels); got {found}.')
    images, labels = batch
    try:
        check_images(images)
    except ValueError as e:
        raise ValueError(f'{name}: {e}') from None
    given, criterion = getattr(labels, 'labels', labels), getattr(task, 'criterion', None)
    classes = getattr(_models(task)['model'], 'num_classes', 0)
    used = classes and (criterion is not None or name == 'val_loader')  # some tasks do not look at labels
    if used and isinstance(given, Tensor) and given.ndim == 1 and not given.is_floating_point():
        wrong = given[((given < 0) | (given >= classes)) & (given != getattr(criterion, 'ignore_index', -100))]
        if len(wrong):
            raise ValueError(f'{name} has label {int(wrong[0])}, and the {classes} classes of the model have 0 to '
                             f'{classes - 1}. Create the model with the num_classes of the data.')
    return images, labels


@contextmanager
def _fitting(name: str, images: Tensor, labels: Any, task: TrainingTask) -> Iterator[None]:
    """Say what a batch does not fit, and leave the task's buffers and modes as they were before it."""
    buffers = [(buffer, buffer.clone()) for buffer in task.buffers()]
    modes = [(module, module.training) for module in task.modules()]
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as e:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, mode in modes:
            module.training = mode
        labels = getattr(labels, 'labels', labels)
        found = [f'{x.dtype} {list(x.shape)}' if isinstance(x, Tensor) else type(x).__name__ for x in (images, labels)]
        raise ValueError(f'The first batch of {name} (images {found[0]}, labels {found[1]}) does not fit the model: '
                         f'{type(e).__name__}: {" ".join(str(e).split())}') from e


@dataclass
class _Run:
    """What an epoch of training needs."""
    task: Any
    loader: Any
    config: FitConfig
    optimizer: Any
    scheduler: Any
    scaler: Any
    updates: int
    bar: Any

    def train(self, epoch: int) -> Dict[str, float]:
        """Train for one epoch; returns the learning rate and the mean of each part of the loss."""
        task, loader, optimizer, scaler, config = self.task, self.loader, self.optimizer, self.scaler, self.config
        updates, accumulate, device, dtype = self.updates, config.accumulate, task.device, AMP_DTYPES[config.amp]
        sums: Dict[str, Any] = defaultdict(float)
        optimizer.zero_grad()
        i = -1
        for i, batch in enumerate(loader):
            if i == updates * accumulate:
                break
            images, labels = _checked('train_loader', batch, task) if i == 0 else batch
            update, last = epoch * updates + i // accumulate, (i + 1) % accumulate == 0
            if i % accumulate == 0:
                self.scheduler.step_update(update)
            if hasattr(task, 'begin_update'):
                task.begin_update(update, config.epochs * updates, config.seed)
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with nullcontext() if last else task.no_sync():
                with _fitting('train_loader', images, labels, task) if update == 0 and i == 0 else nullcontext():
                    if i == 0:
                        task.train()
                    with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
                        parts = task(images, labels)
                loss = parts['loss']
                values = {key: part.detach().float() for key, part in parts.items() if key != 'output'}
                value = values['loss'].item()
                if not math.isfinite(value):
                    found = ', '.join(f'{key} {part.item():.4g}' for key, part in values.items())
                    raise FloatingPointError(
                        f'The loss is not finite in epoch {epoch + 1}, batch {i + 1} ({found}). '
                        f'{_diverging(task, images, dtype)}Lower lr, or use amp bfloat16 or None.')
                scaler.scale(loss / accumulate).backward()
            for key, part in values.items():
                sums[key] = sums[key] + part  # stays on the device: one wait for it a batch is enough
            if not last:
                continue
            if config.clip_grad is not None:
                scaler.unscale_(optimizer)
                dispatch_clip_grad(task.get_clip_parameters(), config.clip_grad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            task.update_ema(step=update)
            self.bar.update()
        if i < updates * accumulate - 1:
            raise ValueError(f'train_loader gave {i + 1} batches in epoch {epoch + 1}, and its length is '
                             f'{len(loader)}. Give one that gives as many in every epoch.')
        means = {key: torch.as_tensor(value / (updates * accumulate)) for key, value in sums.items()}
        if _distributed():
            means = {key: reduce_tensor(value.to(device), dist.get_world_size()) for key, value in means.items()}
        return {'lr': optimizer.param_groups[-1]['lr'],  # without the parts that were not computed
                **{key: float(value) for key, value in means.items() if not value.isnan()}}


@contextmanager
def _muon_for(device: torch.device) -> Iterator[None]:
    """Let timm's Muon multiply in float32 on a CPU, instead of in bfloat16, which most CPUs emulate 30 times slower."""
    original = muon.zeropower_via_newtonschulz
    if device.type == 'cpu':
        muon.zeropower_via_newtonschulz = partial(original, dtype=torch.float32)
    try:
        yield
    finally:
        muon.zeropower_via_newtonschulz = original


@torch.no_grad()
def _diverging(task: TrainingTask, images: Tensor, dtype: Optional[torch.dtype]) -> str:
    """Where in an ODE-ViT the state stops being finite, in words; nothing for another model or another reason."""
    model = _models(task)['model'].eval()
    odes = find_ode_blocks(model)
    if not odes or odes[0].config.adaptive:
        return ''
    with odes[0].at(getattr(task, 'drawn', odes[0].steps)):  # as many steps as there were
        return _watch(model, images, dtype)


def _watch(model: nn.Module, images: Tensor, dtype: Optional[torch.dtype]) -> str:
    found: List[str] = []

    def look(where: str):
        def hook(_: nn.Module, args: Any, out: Tensor) -> None:
            if not found and not torch.isfinite(out).all():
                found.append(where)
        return hook
    hooks = [(step, 'after', look(f'step {i + 1} of {ode.steps}, from t = {step.t:g} to {step.t + step.h:g}'))
             for ode in find_ode_blocks(model) for i, step in enumerate(ode.bound_steps)]
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        return 'Weights of the model are not finite. '
    with hooked(*hooks), torch.autocast(images.device.type, dtype) if dtype is not None else nullcontext():
        model(images)
    return f'The field diverges: the state is not finite after {found[0]}. ' if found else ''


def _models(task: TrainingTask) -> Dict[str, nn.Module]:
    """The model in training, and its moving average if there is one, without wrappers."""
    models = {'model': task.get_eval_model()}
    if task.has_ema():
        models['ema'] = task.get_eval_model(ema=True)
    return {name: unwrap_model(model) for name, model in models.items()}


def _save(path: Path, task: TrainingTask, optimizer, scaler, history, settings) -> None:
    state: Dict[str, Any] = {name: module.state_dict() for name, module in _models(task).items()}
    state.update(optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), history=history, settings=settings)
    with staged(path.parent, path.name) as aside:
        torch.save(state, aside / path.name)


def _read(path: Path, device: torch.device, settings: Dict[str, Any], epochs: int) -> Dict[str, Any]:
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


def _load(state: Dict[str, Any], path: str, models: Dict[str, nn.Module], optimizer, scaler) -> None:
    for name, module in models.items():
        try:
            module.load_state_dict(state[name])
        except RuntimeError as e:
            raise ValueError(f'{path} holds another model ({str(e).splitlines()[1].strip()}).') from e
    optimizer.load_state_dict(state['optimizer'])
    scaler.load_state_dict(state['scaler'])
