"""The stages of a recipe: all prepared, then trained one after the other, and the best chosen."""
import copy
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
from torch import Tensor, nn

from ..convert.block_kinds import find_stages
from ..data.read import Data
from ..distributed import in_first_process, over_processes
from ..hooks import AMP_DTYPES, autocast, evaluating
from ..ode.blocks import find_ode_blocks
from ..saving.save import save_pretrained
from .config import FitConfig
from .fit import EPOCHS, count_updates, fit
from .matching import check_loss
from .monitor import score_of, try_one_batch, validate, words_of
from .recipe import PARTS, Recipe
from .resume import BEST, START, Plan
from .tasks import StepwiseTask, TrajectoryDistillationTask

__all__ = ['adapted', 'run_stages']

TRIED = 3  # batches by which the learning rate is scaled
EXACT = 1e-6  # a loss that is rounding


class PreparedStage(NamedTuple):
    task: Any
    names: set[str]  # of the parameters that learn
    config: FitConfig
    counts: list[list[int]]  # the numbers of steps that it trains, of each OdeBlocks
    share: float  # of the time, in any unit
    scaled: bool  # whether its learning rate is


def run_stages(
        recipe: Recipe, student: nn.Module, teacher: nn.Module | None, data: Data, sample: Tensor, plan: Plan, *,
        begin: Callable[[], None] = lambda: None, minutes: float | None = None, resume: bool = False,
        progress: bool = True,
) -> tuple[list[dict[str, float]], Any]:
    """Train a student in place; the records of all epochs, and the best state: its folder or, without one, its weights.

    `sample` are images [N, C, H, W] for checkpoints by distance. With a folder in `plan`, states are kept there, or
    else in memory. `begin` is called when everything has been checked. `minutes` replace what the recipe says.
    """
    own, folder = [ode.steps for ode in find_ode_blocks(student)], plan.folder
    stages = [_prepare(recipe, i, student, teacher, data, sample, own) for i in range(len(recipe.stages))]
    last, shares = stages[-1], [stage.share for stage in stages]
    trainable = {name for name, p in student.named_parameters() if p.requires_grad}
    if data.val is not None:
        in_first_process(lambda: try_one_batch(data.val, last.task, None))
    begin()
    scale = _scale_lr(stages[0], data, plan)
    _set_steps(student, last, own)
    states = [in_first_process(lambda: _start(student, last, data, plan, progress))]
    history: list[dict[str, float]] = []
    try:
        for i, stage in enumerate(stages if scale >= EXACT else []):
            config = replace(stage.config, lr=stage.config.lr * (scale if stage.scaled else 1.))
            if minutes is not None:
                part = in_first_process(partial(plan.minutes_of, i, minutes, shares))
                tenths = EPOCHS * config.warmup_epochs / (config.epochs or EPOCHS)
                config = replace(config, epochs=None, minutes=part, warmup_epochs=tenths)
            _set_steps(student, stage, own)
            _let_learn(student, stage.names & trainable)
            if progress:
                count = sum(p.numel() for p in student.parameters() if p.requires_grad)
                print(f"stage {i}: {getattr(stage.task, 'title', 'labels')}, {count:,} trainable parameters")
            out = None if folder is None else folder / f'stage{i}'
            records = fit(stage.task, data.train, data.val if out else None, out=out, resume=resume, progress=progress,
                          config=config)
            history += [{'stage': i, **record} for record in records]
            if (stage.counts, stage.task.embedding) == (last.counts, last.task.embedding):
                states.append((max(records, key=score_of), out / BEST) if out else _state(student, stage, data))
            plan.end(i)
    finally:
        _let_learn(student, trainable)
    return history, _best(states, folder)


def _prepare(
        recipe: Recipe, i: int, student: nn.Module, teacher: Any, data: Data, sample: Tensor, own: Sequence[int],
) -> PreparedStage:
    stage, loss = recipe.stages[i], recipe.loss_of(recipe.stages[i])
    task: Any
    criterion = SoftTargetCrossEntropy() if recipe.batches.mixes else nn.CrossEntropyLoss()
    config = replace(recipe.fit_of(stage), seed=recipe.seed + 1000 * i)
    names = _names_of(student, stage.train, f'stages.{i}.train')
    common: Any = {'device': next(student.parameters()).device, 'verbose': False}
    if stage.task == 'stepwise' and teacher is None:
        raise ValueError(f"stages.{i}: task 'stepwise' needs a teacher. Give one.")
    try:
        if stage.task == 'labels':
            task = ClassificationTask(student, criterion, **common)
            task.embedding = False
        elif stage.task == 'stepwise':
            task = StepwiseTask(student, teacher, embedding=loss.embedding, **common)
        else:
            task = TrajectoryDistillationTask(
                student, teacher, calibration=sample.split(64), criterion=criterion, config=loss, **common)
    except (TypeError, ValueError) as e:
        raise ValueError(f'stages.{i}: {e}') from e
    task.labelled = data.labelled or teacher is None
    count_updates(data.train, config.accumulate)
    updates = [each or ((steps,),) for each, steps in zip(getattr(task, 'counts', [None] * len(own)), own, strict=True)]
    counts = [sorted({k for of in each for k in of}) for each in updates]
    cost = sum(map(sum, updates[0])) / len(updates[0]) if updates else 1.
    cost *= 1. - (loss.patch_drop if stage.task == 'trajectory' else 0.)
    share = config.minutes or (config.epochs or 0) * cost
    return PreparedStage(task, names, config, counts, share, stage.scale_lr)


def _names_of(student: nn.Module, parts: Sequence[str], where: str) -> set[str]:
    chosen = set()
    for part in parts:
        names = [name for name, _ in student.named_parameters() if any(
            piece in f'.{name}' if piece.startswith('.') else name.startswith(piece) for piece in PARTS[part])]
        if not names:
            raise ValueError(f"{where}: the model has no parameters of the part '{part}'. Leave it out.")
        chosen.update(names)
    return chosen


def _let_learn(student: nn.Module, names: set[str]) -> None:
    for name, p in student.named_parameters():
        p.requires_grad_(name in names)


def _set_steps(student: nn.Module, stage: PreparedStage, own: Sequence[int]) -> None:
    """Give a student the number of steps that a stage trains which is nearest to its own."""
    for ode, steps, counts in zip(find_ode_blocks(student), own, stage.counts, strict=True):
        ode.steps = min(counts, key=lambda count: abs(count - steps))


@torch.no_grad()
def _scale_lr(stage: PreparedStage, data: Data, plan: Plan) -> float:
    """The factor on the learning rates: three times the loss of the first stage on a few batches, at most 1."""
    if plan.lr_scale is not None or not stage.scaled:
        return 1. if plan.lr_scale is None else plan.lr_scale
    device, losses = torch.device(stage.task.device), []
    with evaluating(stage.task.trainable_module):
        for images, labels in islice(data.train if data.val is None else data.val, TRIED):
            with autocast(device, AMP_DTYPES.get(stage.config.amp)):
                losses.append(over_processes(stage.task(images.to(device), labels.to(device))['loss']))
    plan.lr_scale = min(1., 3. * torch.stack(losses).mean().item())
    return plan.lr_scale


def _state(student: nn.Module, stage: PreparedStage, data: Data) -> tuple[dict[str, float], Any]:
    """What is measured of a student, and its weights."""
    record = {} if data.val is None else validate(stage.task, student, data.val, AMP_DTYPES.get(stage.config.amp))
    return record, copy.deepcopy(student.state_dict())


def _start(student: nn.Module, stage: PreparedStage, data: Data, plan: Plan, progress: bool) -> tuple[Any, Any]:
    if plan.folder is None:
        return _state(student, stage, data)
    if plan.start is None:
        save_pretrained(student, plan.folder / START)
        plan.start = _state(student, stage, data)[0]
        plan.write()
    if progress and plan.start:
        print(f'start: {words_of(plan.start)}')
    return plan.start, plan.folder / START


def _best(states: Sequence[tuple[dict[str, float], Any]], folder: Path | None) -> Any:
    """The best state; the last of equal ones."""
    best = max(range(len(states)), key=lambda i: (score_of(states[i][0]), i))
    if best == 0 and len(states) > 1:
        trained = max((record for record, _ in states[1:]), key=score_of)
        where = 'The model' if folder is None else f"'{folder / BEST}'"
        warnings.warn(
            f'Training ended worse than it started: {words_of(trained)} at best, {words_of(states[0][0])} before. '
            f'{where} is as it was before training. Try a lower lr, or more time.', stacklevel=4)
    return states[best][1]


def adapted(recipe: Recipe, student: nn.Module, teacher: nn.Module | None) -> Recipe:
    """A recipe without what a student cannot do; see Recipe.adapt."""
    ode = find_ode_blocks(student)[0]
    depends = ode.shared.depends_on_time
    fixed = ode.config.phases == ode.steps  # every step has a block of its own, so no other number can be learned
    stages = []
    for stage in recipe.stages:
        if stage.task == 'stepwise' and teacher is not None and (
                ode.config.steps_and_end[1] != len(find_stages(teacher)[0].blocks)):
            continue
        if stage.task == 'trajectory':
            loss = stage.loss or {}
            if 'steps' in loss and (fixed or depends):
                rest = {key: value for key, value in loss.items() if key not in ('steps', 'consistency_weight')}
                loss = {**rest, **({} if fixed else Recipe.load('elastic').stages[-1].loss or {})}
            try:
                check_loss(student, teacher, recipe.loss_of(replace(stage, loss=loss)))
            except ValueError:  # RoPE, say, which goes with all patches only
                loss = {key: value for key, value in loss.items() if key != 'patch_drop'}
            stage = replace(stage, loss=loss)
        stages.append(stage)
    decay = {'weight_decay': 0.} if fixed or depends else {}
    return replace(recipe, stages=tuple(stages), fit={**(recipe.fit or {}), **decay} or None, adapt=False)
