"""The training loop, epoch by epoch: a task, its optimizer and schedule, its first batch, its validation.

Tasks may have a title, teacher, counts, begin_update, embedding, labelled and config.
"""
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec, module_from_spec
from itertools import count, islice
from random import Random
from typing import Any

import torch
from timm.optim import Muon, create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import dispatch_clip_grad, random_seed, unwrap_model
from torch import Tensor, nn

from ..convert.block_kinds import own_blocks
from ..data.batches import Mapped, set_epoch
from ..data.preprocessing import check_labels
from ..distributed import in_first_process, over_processes, rank_and_world
from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings
from ..hooks import AMP_DTYPES, autocast, check_images, described
from ..settings import one_line
from .config import FitConfig

PASSES = 10_000  # over the data in an epoch, at most
_SCORES = {  # whether more or less of it is better, and how it is said
    'val_top1': (1, 'top-1 {:.1f} %'), 'val_loss': (-1, 'loss {:.4g}'), 'val_cosine': (1, 'cosine {:.4g}'),
    'val_error': (-1, 'squared error {:.4g}')}


def models_of(task: Any) -> dict[str, nn.Module]:
    """Also its moving average if there is one; without wrappers."""
    models = {'model': task.get_eval_model()}
    if task.has_ema():
        models['ema'] = task.get_eval_model(ema=True)
    return {name: unwrap_model(model) for name, model in models.items()}


class Trainer:
    """With timm's schedule over epochs of so many updates."""

    def __init__(self, task: Any, train_loader: Any, config: FitConfig, updates: int) -> None:
        self.task, self.loader, self.config, self.updates = task, train_loader, config, updates
        self.device, self.dtype = torch.device(task.device), AMP_DTYPES[config.amp]
        self.rank, self.world = rank_and_world()
        for name in ('trainable_module_ema', 'eval_model_ema'):  # left by an earlier fit
            if hasattr(task, name):
                delattr(task, name)
        if config.ema_decay is not None:
            task.setup_ema(decay=config.ema_decay, use_warmup=True)
        if self.world > 1:
            task.prepare_distributed(device_ids=[self.device.index] if self.device.type == 'cuda' else None)
        self.optimizer = create_optimizer(unwrap_model(task.get_trainable_module()), config)
        low = min(config.min_lr, config.lr)
        self.scheduler: Any = create_scheduler_v2(
            self.optimizer, sched=config.sched, num_epochs=config.epochs or 1, step_on_epochs=False,
            decay_epochs=10 ** 9,  # of 'step', which is a constant rate here
            warmup_epochs=config.warmup_epochs,  # type: ignore[arg-type]
            warmup_lr=low, min_lr=low, updates_per_epoch=updates)[0]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == 'float16')
        self.models = models_of(task)
        self.chosen = self.models.get('ema', self.models['model'])  # is validated and saved

    def epoch(self, epoch: int, val_loader: Any, done: Callable[[], Any]) -> dict[str, Any]:
        """Train and validate; returns the record, which depends only on the seed and the state."""
        order = (self.config.seed * 10_007 + epoch) % 2 ** 31
        random_seed(order * self.world % 2 ** 31, self.rank)
        set_epoch(self.loader, order)
        started = time.perf_counter()
        record = {'epoch': epoch + 1, **self.train(epoch, done), 'seconds': time.perf_counter() - started,
                  'updates': self.updates, 'amp': self.config.amp}
        if not all(torch.isfinite(p).all() for model in self.models.values() for p in model.parameters()):
            raise FloatingPointError(
                f'The weights are not finite after epoch {epoch + 1}. Lower lr, or use no float16.')
        return in_first_process(lambda: record if val_loader is None else {  # the others wait here
            **record, **validate(self.task, self.chosen, val_loader, self.dtype)})

    def train(self, epoch: int, done: Callable[[], Any]) -> dict[str, float]:
        task, accumulate = self.task, self.config.accumulate
        batches, i = self.updates * accumulate, -1
        seen: dict[str, list[Tensor]] = defaultdict(list)  # a part may be absent from some updates
        self.optimizer.zero_grad()
        for i, batch in enumerate(islice(self.loader, batches)):
            update, last = epoch * self.updates + i // accumulate, (i + 1) % accumulate == 0
            self.scheduler.step_update(update)
            if hasattr(task, 'begin_update'):
                task.begin_update(update, self.config.seed)
            with nullcontext() if last else task.no_sync():
                with _must_fit('train_loader', batch, task) if i == 0 else nullcontext():
                    images, labels = (x.to(self.device, non_blocking=True) for x in batch)
                    if i == 0:
                        task.train()
                    with autocast(self.device, self.dtype):
                        parts = task(images, labels)
                parts = {key: torch.as_tensor(part) for key, part in parts.items() if key != 'output'}
                if not math.isfinite(parts['loss'].item()):
                    values = ', '.join(f'{key} {part.item():.4g}' for key, part in parts.items())
                    raise FloatingPointError(f'The loss is not finite in epoch {epoch + 1}, batch {i + 1} ({values}). '
                                             f"{_blamed(self.models['model'], images)}Lower lr, or use no float16.")
                self.scaler.scale(parts['loss'] / accumulate).backward()
            for key, part in parts.items():
                seen[key].append(part.detach().float())  # one wait per batch is enough
            if last:
                self._step(update)
                done()
        if i < batches - 1:
            raise ValueError(f'train_loader gave {i + 1} batches in epoch {epoch + 1}, but its length is '
                             f'{len(self.loader)}.')
        means = {key: float(over_processes(torch.stack(values).mean())) for key, values in seen.items()}
        return {'lr': self.optimizer.param_groups[-1]['lr'], **means}

    def _step(self, update: int) -> None:
        if self.config.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            dispatch_clip_grad(self.task.get_clip_parameters(), self.config.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.task.update_ema(step=update)


def create_optimizer(model: nn.Module, config: FitConfig) -> Any:
    """timm's optimizer; Muon multiplies in float32 on a CPU, since most CPUs emulate bfloat16, 30 times slower."""
    optimizer = create_optimizer_v2(model, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay)
    if type(optimizer) is not Muon or next(model.parameters()).device.type != 'cpu':
        return optimizer
    spec: Any = find_spec('timm.optim.muon')
    own: Any = module_from_spec(spec)  # a copy: the dtype of its products is its module's
    spec.loader.exec_module(own)
    own.zeropower_via_newtonschulz = partial(own.zeropower_via_newtonschulz, dtype=torch.float32)
    return own.Muon(optimizer.param_groups, **optimizer.defaults)


class Stream:
    """In epochs of `count` batches, each from a new order of the data, over and over if it has fewer."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count, self.epoch = loader, count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._passes(), self.count)

    def _passes(self) -> Iterator[Any]:
        for i in count(PASSES * self.epoch):
            set_epoch(self.loader, i)
            empty = True
            for batch in _reordered(self.loader, i):
                empty = False
                yield batch
            if empty:
                return


def _reordered(loader: Any, seed: int) -> Any:
    """A list of batches in another order; other loaders have an order of their own for each epoch."""
    if isinstance(loader, Mapped):
        return Mapped(_reordered(loader.loader, seed), loader.change)
    return Random(seed).sample(loader, len(loader)) if isinstance(loader, (list, tuple)) else loader


def validate(task: Any, model: Any, loader: Any, dtype: Any, progress: bool = False) -> dict[str, float]:
    """Accuracy; without labels, how near the outputs are to the teacher's."""
    embedding, teacher = getattr(task, 'embedding', False), getattr(task, 'teacher', None)
    options: Any = dict(amp_dtype=dtype, progress=progress)
    if embedding or not getattr(task, 'labelled', True):
        result: Any = evaluate_embeddings(model, loader, teacher=teacher, **options)
        measures = ['cosine', 'error', 'neighbours'] if embedding else ['error']
    else:
        result, measures = evaluate(model, loader, **options), ['top1', 'top5', 'loss'][::-1 if teacher else 1]
    return {f'val_{key}': of for key in measures if (of := getattr(result.results[-1], key)) is not None}


def score_of(record: dict[str, Any] | None, default: float = -math.inf) -> float:
    """What chooses the best state, the first score of a record: loss under a teacher; top-1 of few images is noise."""
    for name, value in (record or {}).items():
        if name in _SCORES:
            return -math.inf if value is None or value != value else _SCORES[name][0] * value
    return default


def words_of(record: dict[str, float]) -> str:
    return ', '.join(words.format(record[name]) for name, (_, words) in _SCORES.items() if record.get(name) is not None)


def try_one_batch(val_loader: Any, task: Any, dtype: torch.dtype | None) -> float:
    """The first with images that can be read; returns the seconds that another such batch takes."""
    began = time.perf_counter()
    batch = next((batch for batch in val_loader if not isinstance(batch, (tuple, list)) or len(batch[0])), None)
    if batch is None:
        raise ValueError('val_loader is empty. Give at least one batch, or None.')
    read = time.perf_counter() - began
    with _must_fit('val_loader', batch, task):
        for _ in range(2):
            started = time.perf_counter()
            validate(task, models_of(task)['model'], [batch], dtype)
    return read + time.perf_counter() - started


@contextmanager
def _must_fit(name: str, batch: Any, task: Any) -> Iterator[None]:
    """If a first batch does not fit the model, say why, and restore the task's buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in task.buffers()]
    try:
        images, labels = batch
        check_images(images)
        used = getattr(getattr(task, 'config', None), 'task_weight', 1.) > 0
        criterion = getattr(task, 'criterion', None) if used else None
        if criterion is not None and labels.ndim == 1 and not labels.is_floating_point():  # others stop a GPU
            ignored = labels == getattr(criterion, 'ignore_index', -100)
            check_labels(labels.masked_fill(ignored, 0), getattr(models_of(task)['model'], 'num_classes', None))
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        for buffer, before in buffers:
            buffer.data.copy_(before)
        what = ', '.join(map(described, batch if isinstance(batch, (tuple, list)) else [batch]))
        raise ValueError(f'The first batch of {name}, {what}, is not (images, labels) that fit the model: '
                         f'{type(e).__name__}: {one_line(e)}') from e


def _blamed(model: nn.Module, images: Tensor) -> str:
    for name, tensors in (('images of the batch', [images]), ('weights of the model', model.parameters())):
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            return f'The {name} are not finite. '
    return ''


@contextmanager
def compiled_blocks(task: Any) -> Iterator[None]:
    """The blocks of student and teacher compiled by torch.compile: one graph for all layers, all steps and any K."""
    modules: list[Any] = []
    for model in (models_of(task)['model'], getattr(task, 'teacher', None)):
        if model is not None:
            try:
                modules += own_blocks(model)
            except TypeError:  # it has no blocks
                modules.append(model)
    own = [module.__dict__.get('forward') for module in modules]
    try:
        for module in modules:
            module.forward = torch.compile(module.forward)  # without the hooks that see states
        with torch._dynamo.config.patch(recompile_limit=256):
            yield
    finally:
        for module, before in zip(modules, own, strict=True):
            module.__dict__.pop('forward', None)
            if before is not None:
                module.forward = before


@contextmanager
def unfused_in_bfloat16(trainer: Trainer) -> Iterator[None]:
    """Attention by its own operations on a CPU in bfloat16, where PyTorch's fused kernel trains slower."""
    slow = trainer.device.type == 'cpu' and trainer.dtype is torch.bfloat16
    fused: list[Any] = [module for module in trainer.task.modules() if slow and getattr(module, 'fused_attn', False)]
    try:
        for module in fused:
            module.fused_attn = False
        yield
    finally:
        for module in fused:
            module.fused_attn = True
