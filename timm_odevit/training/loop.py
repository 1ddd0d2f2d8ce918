"""The training loop: a task, its optimizer and its schedule, epoch by epoch."""
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import dispatch_clip_grad, random_seed

from ..data.batches import set_epoch
from ..distributed import over_processes, rank_and_world
from ..files import to_json, write_text
from ..hooks import AMP_DTYPES, autocast
from ..saving.save import save_pretrained
from .config import FitConfig
from .monitor import check_batch, check_loss_is_finite, must_fit, validate
from .optimizer import create_optimizer, create_schedule
from .resume import BEST, HISTORY, LAST, models_of, save_state

__all__ = ['Trainer']


class Trainer:
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
        self.optimizer = create_optimizer(trainable, config)
        self.scheduler = create_schedule(self.optimizer, config, updates)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == 'float16')
        self.models = models_of(task)
        self.chosen = self.models['ema' if 'ema' in self.models else 'model']  # is validated and saved

    def epoch(self, epoch: int, val_loader: Any, done: Callable[[], Any]) -> dict[str, float]:
        """Train for one epoch and validate; returns its record, which depends only on the seed and the state."""
        order = (self.config.seed * 10_007 + epoch) % 2 ** 31
        random_seed(order * self.world % 2 ** 31, self.rank)
        set_epoch(self.loader, order)
        started = time.perf_counter()
        record: dict[str, float] = {'epoch': epoch + 1, **self.train(epoch, done)}
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

    def train(self, epoch: int, done: Callable[[], Any]) -> dict[str, float]:
        """Train for one epoch; returns the learning rate and the mean of each part of the loss."""
        task, accumulate = self.task, self.config.accumulate
        batches, i = self.updates * accumulate, -1
        sums: dict[str, Any] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)  # a part may be absent from some updates
        self.optimizer.zero_grad()
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
                self.scaler.scale(parts['loss'] / accumulate).backward()
            for key, part in parts.items():
                sums[key] += part.detach().float()  # stays on the device: one wait per batch is enough
                counts[key] += 1
            if last:
                self._step(update)
                done()
        if i < batches - 1:
            raise ValueError(f'train_loader gave {i + 1} batches in epoch {epoch + 1}, but its length is '
                             f'{len(self.loader)}. Give a loader that gives as many batches as its length.')
        means = {key: float(over_processes(value / counts[key])) for key, value in sums.items()}
        return {'lr': self.optimizer.param_groups[-1]['lr'], **means}

    def _step(self, update: int) -> None:
        if self.config.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            dispatch_clip_grad(self.task.get_clip_parameters(), self.config.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.task.update_ema(step=update)

    def save(self, folder: Path, history: Any, settings: dict[str, Any], plan: dict[str, Any], best: bool) -> None:
        """Save the whole state, and the model if it is the best so far."""
        try:
            if best:
                save_pretrained(self.chosen, folder / BEST)
            write_text(folder / HISTORY, to_json(history))  # before the state, which says what is still to be trained
            save_state(folder / LAST, self.task, self.optimizer, self.scaler, history=history, settings=settings,
                       plan=plan)
        except OSError as e:
            raise OSError(f"Epoch {len(history)} could not be written to '{folder}': {str(e).splitlines()[0]}. Files "
                          'written earlier are intact; free some space, and resume.') from e
