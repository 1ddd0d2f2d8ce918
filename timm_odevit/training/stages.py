"""The stages of a recipe: all prepared, then trained one after the other, and the best chosen."""
import copy
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask
from timm.utils import random_seed
from torch import nn

from ..data.read import Data
from ..distributed import in_first_process, over_processes
from ..files import to_json, write_text
from ..hooks import AMP_DTYPES, autocast, evaluating
from ..ode.blocks import find_ode_blocks
from ..saving.save import save_pretrained
from .config import BEST, RUN, START, FitConfig
from .fit import EPOCHS, count_updates, fit
from .loop import score_of, try_one_batch, validate, words_of
from .recipe import PARTS, Recipe, Stage, prefixed
from .tasks import TrajectoryDistillationTask

SCALING = 3  # batches by which the learning rate is scaled
SAMPLE = 256  # images for checkpoints by distance
EXACT = 1e-6  # a loss that is rounding


class PreparedStage(NamedTuple):
    task: Any
    names: set[str]  # of the parameters that learn
    config: FitConfig
    counts: list[tuple[int, ...]]  # the numbers of steps that it trains, of each OdeBlocks
    share: float  # of the time, in any unit
    scaled: bool  # whether its learning rate is


class Run:
    """Trains a student in place; states are kept in a folder or, without, in memory.

    The folder's run.json holds `about`, what must be the same when the run is resumed, and what was planned.
    """

    def __init__(self, recipe: Recipe, student: nn.Module, teacher: Any, data: Data,
                 folder: Path | None = None, about: dict[str, Any] | None = None) -> None:
        self.recipe, self.student, self.data, self.folder, self.about = recipe, student, data, folder, about or {}
        self.began, self.odes = time.perf_counter(), find_ode_blocks(student)
        self.own = [ode.steps for ode in self.odes]
        self.stages: list[PreparedStage] = []
        for i, stage in enumerate(recipe.stages):
            with prefixed(f'stages.{i}: '):
                self.stages.append(self._prepared(i, stage, teacher))
        if data.val is not None:  # what does not fit is refused before anything is written
            in_first_process(lambda: try_one_batch(data.val, self.stages[-1].task, None))
        # lr_scale; start, what was measured of the student before training; minutes of each stage that has begun
        self.plan: dict[str, Any] = {} if folder is None else read_run(folder).get('plan', {})

    def _prepared(self, i: int, stage: Stage, teacher: Any) -> PreparedStage:
        recipe, student = self.recipe, self.student
        config, loss = replace(recipe.fit_of(stage), seed=recipe.seed + 1000 * i), recipe.loss_of(stage)
        criterion = SoftTargetCrossEntropy() if recipe.batches.mixes else nn.CrossEntropyLoss()
        names = _names_of(student, stage.train)
        count_updates(self.data.train, config.accumulate)
        if stage.task == 'labels':
            task: Any = ClassificationTask(student, criterion, device=next(student.parameters()).device, verbose=False)
            task.embedding = False
        else:
            sample = self.data.sample('train', SAMPLE, recipe.seed)[0] if loss.checkpoints == 'distance' else None
            task = TrajectoryDistillationTask(
                student, teacher, criterion=criterion, config=loss, calibration=sample, verbose=False)
        task.labelled = self.data.labelled or teacher is None
        share = config.minutes or float(config.epochs or 0)
        if config.minutes is None and self.own:
            counts = recipe.counts_of(stage, self.own[0])
            share *= sum(map(sum, counts)) / len(counts)
            if stage.task == 'trajectory':
                share *= 1. - loss.patch_drop
        return PreparedStage(
            task, names, config, [recipe.trained_at(own, i) for own in self.own], share, stage.scale_lr)

    def write(self) -> None:
        if self.folder is not None:
            write_text(self.folder / RUN, to_json({**self.about, 'plan': self.plan}))

    def train(self, minutes: float | None, progress: bool, resume: bool = False,
              on_epoch: Callable[..., Any] | None = None) -> tuple[list[Any], Any]:
        """The records of all epochs, and the best state: its folder, or weights. Minutes are those of all stages."""
        student, last = self.student, self.stages[-1]
        trainable = {name for name, p in student.named_parameters() if p.requires_grad}
        scale = self._scale_lr(self.stages[0])
        self._set_steps(last)
        states = [in_first_process(lambda: self._start(last, progress))]
        history: list[Any] = []
        try:
            for i, stage in enumerate(self.stages if scale >= EXACT else []):
                config = replace(stage.config, lr=stage.config.lr * (scale if stage.scaled else 1.))
                if minutes is not None:
                    part = in_first_process(partial(self._minutes_of, i, minutes))
                    tenths = EPOCHS * config.warmup_epochs / (config.epochs or EPOCHS)
                    config = replace(config, epochs=None, minutes=part, warmup_epochs=tenths)
                self._set_steps(stage)
                _let_learn(student, stage.names)
                if progress:
                    count = sum(p.numel() for p in student.parameters() if p.requires_grad)
                    print(f"stage {i}: {getattr(stage.task, 'title', 'labels')}, {count:,} trainable parameters")
                out = self.folder and self.folder / f'stage{i}'
                records = fit(stage.task, self.data.train, self.data.val if out else None, out=out, resume=resume,
                              progress=progress, config=config, on_epoch=on_epoch)
                history += [{'stage': i, **record} for record in records]
                alike = [(of.counts, of.task.embedding, type(of.task)) for of in (stage, last)]
                if alike[0] == alike[1]:  # so scores compare
                    states.append((max(records, key=score_of), out / BEST) if out else self._state(stage))
        finally:
            _let_learn(student, trainable)
        record, best = max(reversed(states), key=lambda state: score_of(state[0]))  # the last of equal ones
        if best is states[0][1] and len(states) > 1:
            trained = max((record for record, _ in states[1:]), key=score_of)
            where = 'The model' if self.folder is None else f"'{self.folder / BEST}'"
            warnings.warn(
                f'Training ended worse than it started: {words_of(trained)} at best, {words_of(record)} before. '
                f'{where} is as it was before training. Try a lower lr, or more time.', stacklevel=3)
        return history, best

    def _minutes_of(self, i: int, minutes: float) -> float:
        """Minutes of a stage: its share of those that are left when it begins, at least half of its share of all."""
        planned = self.plan.setdefault('minutes', [])
        if i == len(planned):
            gone = max(sum(planned), (time.perf_counter() - self.began) / 60)
            shares = [stage.share for stage in self.stages]
            planned.append(shares[i] * max((minutes - gone) / sum(shares[i:]), minutes / sum(shares) / 2))
            self.write()
        return planned[i]

    def _set_steps(self, stage: PreparedStage) -> None:
        """Of the numbers of steps that a stage trains, those nearest to the student's own."""
        for ode, own, counts in zip(self.odes, self.own, stage.counts, strict=True):
            ode.steps = min(counts, key=lambda count: abs(count - own))

    @torch.no_grad()
    def _scale_lr(self, stage: PreparedStage) -> float:
        """The factor on the learning rates: three times the loss of the first stage on a few batches, at most 1."""
        if 'lr_scale' not in self.plan and any(each.scaled for each in self.stages):
            device, losses = stage.task.device, []
            random_seed(self.recipe.seed)
            with evaluating(stage.task.trainable_module):
                for images, labels in islice(self.data.train, SCALING):
                    with autocast(device, AMP_DTYPES.get(stage.config.amp)):
                        losses.append(over_processes(stage.task(images.to(device), labels.to(device))['loss']))
            self.plan['lr_scale'] = min(1., 3. * torch.stack(losses).mean().abs().item())  # JaSMin is below 0
        return self.plan.get('lr_scale', 1.)

    def _state(self, stage: PreparedStage, progress: bool = False) -> tuple[dict[str, float], Any]:
        amp, val = AMP_DTYPES.get(stage.config.amp), self.data.val
        record = {} if val is None else validate(stage.task, self.student, val, amp, progress)
        return record, copy.deepcopy(self.student.state_dict())

    def _start(self, stage: PreparedStage, progress: bool) -> tuple[Any, Any]:
        if self.folder is None:
            return self._state(stage)
        if 'start' not in self.plan:
            save_pretrained(self.student, self.folder / START)
            self.plan['start'] = self._state(stage, progress)[0]
            self.write()
        start = self.plan['start']
        if progress and start:
            print(f'start: {words_of(start)}')
        return start, self.folder / START


def _names_of(student: nn.Module, parts: Sequence[str]) -> set[str]:
    chosen = set()
    for part in parts:
        names = [name for name, p in student.named_parameters() if p.requires_grad and any(
            piece in f'.{name}' if piece.startswith('.') else name.startswith(piece) for piece in PARTS[part])]
        if not names:
            raise ValueError(f"the model has no parameters of the part '{part}', or none that may learn. Leave it out "
                             'of train.')
        chosen.update(names)
    return chosen


def _let_learn(student: nn.Module, names: set[str]) -> None:
    for name, p in student.named_parameters():
        p.requires_grad_(name in names)


def read_run(folder: Path) -> Any:
    try:
        found = json.loads((folder / RUN).read_text(encoding='utf-8')) if (folder / RUN).exists() else {}
        found.get('plan', {}).items()
        return found
    except (AttributeError, ValueError) as e:
        raise ValueError(f"'{folder / RUN}' is damaged. Start again in another folder.") from e
