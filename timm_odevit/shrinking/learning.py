"""Minutes of training, of which the best state is kept."""
import copy
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from ..convert.block_kinds import find_stages
from ..convert.conversion import convert_
from ..convert.sizing import choose_size, predict_parameters
from ..evaluation.accuracy import in_batches
from ..files import to_json, write_text
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.config import OdeConfig
from ..saving.save import save_pretrained
from ..training.calibrate import calibrate_
from ..training.fit import fit
from ..training.minutes import EPOCHS, Stream, loss_before, seconds_per_update, updates_in
from ..training.monitor import score_of
from ..training.recipe import Recipe
from ..training.resume import BEST, HISTORY
from ..training.tasks import StepwiseTask, TrajectoryDistillationTask
from .judge import SAMPLE, Held, Images, value_of

__all__ = ['Learned', 'learn', 'smallest_size']

PLAN = 'plan.json'
TRIALS = 4  # each halves the range that is left: 4 find the size to 5 % of the model's parameters
VALIDATION = 0.1  # share of the minutes, which sets how many images choose: at least so many
FEWEST = 128
# share of the minutes; task, keywords of the loss and of fit
PARTS: tuple[tuple[float, str, dict[str, Any], dict[str, Any]], ...] = (
    (0.15, 'stepwise', {}, dict(opt='adamw', lr=3e-3)),
    (0.45, 'unrolled', dict(kd_weight=0.1, patch_drop=0.5), dict(opt='muon', lr=1e-3, sched='step')),
    (0.40, 'any steps', dict(kd_weight=0.3), dict(opt='muon', lr=1e-3)))
# whose last stage is for any number of steps, by whether the block depends on time
ELASTIC = {False: 'autonomous', True: 'elastic'}


@dataclass(frozen=True)
class Learned:
    """What a training came to.

    Attributes:
        model: The student, in the best of its states.
        scores: What was measured on the images that choose after each tenth of each part, in percent.
        amp: The mixed precision in which it was trained; None for none.
    """
    model: nn.Module
    scores: dict[str, list[float]]
    amp: str | None


def learn(
        student: nn.Module, teacher: nn.Module, images: Images, minutes: float, folder: Path, *,
        amps: Sequence[str | None] = (None, 'bfloat16'), progress: bool = True,
) -> Learned:
    """Train a student for some minutes, first step by step if its steps are the teacher's, then unrolled.

    The best state is saved in folder/best, also if the training is interrupted, and so is all that continues it.

    Args:
        student: Student, from `convert_` or `plain_student`; it is trained in place.
        teacher: The model.
        images: Images, of which only as many choose as take a tenth of the minutes.
        minutes: Minutes.
        folder: Folder for the states; a training that it holds continues.
        amps: Mixed precisions to choose from, by the time of an update.
        progress: Show progress bars.
    """
    torch.manual_seed(0)
    began = time.perf_counter()
    file = folder / PLAN
    plan = json.loads(file.read_text()) if file.is_file() else {}
    tasks, options, rate = _parts(student, teacher, images, plan.get('rate'))
    shares = {name: share for share, name, *_ in PARTS if name in tasks}
    if not plan:
        tried = time.perf_counter()
        value_of(student, _first(images.choosing, FEWEST), images.measure)
        fitting = VALIDATION * minutes * 60 / (EPOCHS * len(tasks)) / (time.perf_counter() - tried)
        plan = {'choosing': max(FEWEST, int(FEWEST * fitting)), 'rate': rate, 'updates': {}, 'spent': 0.}
    images = images._replace(choosing=_first(images.choosing, plan['choosing']))
    tried = time.perf_counter()
    start = value_of(student, images.choosing, images.measure)
    validation = (time.perf_counter() - tried) / 60
    first = copy.deepcopy(student)
    scores: dict[str, list[float]] = {}
    try:
        for name, make in tasks.items():
            chosen = options[name]
            if name not in plan['updates']:  # by the time of an update now, since a machine may be busy at first
                seconds = {amp: seconds_per_update(student, images.loader, make, {**chosen, 'amp': amp})
                           for amp in ([plan['amp']] if 'amp' in plan else amps)}
                plan['amp'] = min(seconds, key=seconds.__getitem__)
                to_come = sum(share for other, share in shares.items() if other not in plan['updates'])
                left = minutes - plan['spent'] - (time.perf_counter() - began) / 60
                plan['updates'][name] = updates_in(
                    left * shares[name] / to_come - EPOCHS * validation, seconds[plan['amp']])
                write_text(file, to_json(plan))
            updates, started = plan['updates'][name], time.perf_counter()
            task = make(student)
            task.title = name
            loader = Stream(images.loader, max(1, updates // EPOCHS), EPOCHS * list(tasks).index(name))
            history = fit(task, loader, in_batches(images.choosing[:2]), epochs=min(updates, EPOCHS), amp=plan['amp'],
                          out=folder / name.replace(' ', '_'), resume=True, progress=progress, **chosen)
            scores[name] = _scores(history)
            outside = time.perf_counter() - started - sum(record['seconds'] for record in history)  # also to save
            validation = max(validation, outside / 60 / len(history))
            plan['spent'] += (time.perf_counter() - began) / 60
            began = time.perf_counter()
            write_text(file, to_json(plan))
    finally:
        best = _best(first, start, folder, tasks)
        save_pretrained(best, folder / BEST)
    return Learned(best, scores, plan['amp'])


def smallest_size(
        model: nn.Module, images: Images, base: OdeConfig, keep: float, minutes: float, progress: bool,
) -> OdeConfig:
    """A binary search over the number of parameters, between one shared block and the model itself.

    A student that does not keep the share as initialised, of what is measured of the model on the images that choose,
    is calibrated, each for a fourth of the minutes.

    Returns:
        Settings of the smallest that kept enough; of one phase per layer, which is the model itself, if none did.
    """
    def kept(student: nn.Module) -> float:
        return value_of(student, images.choosing, images.measure)
    exact = best = choose_size(model, 1., base, init='svd_data')
    low, high, wanted = predict_parameters(model, replace(exact, phases=1)), count_parameters(model), keep * kept(model)
    tried: list[Any] = [exact]
    for _ in range(TRIALS):
        middle = (low + high) // 2
        config = choose_size(model, middle, base, init='svd_data')
        if config in tried:
            break  # nothing lies between
        tried.append(config)
        student = copy.deepcopy(model)
        pictures = images.learned.images[:SAMPLE].to(next(model.parameters()).device)
        convert_(student, config, images=pictures, keep_original=False)
        found = kept(student)
        if found < wanted:
            calibrate_(student, model, images.loader, minutes=minutes / TRIALS, progress=progress)
            found = kept(student)
        if progress:
            print(f'{count_parameters(student):,} parameters: {found:.1f} % {images.measure}, {wanted:.1f} % wanted')
        if found >= wanted:
            best, high = config, count_parameters(student)
        else:
            low = middle
    return best


def _first(held: Held, count: int) -> Held:
    return Held(*(of[:count] for of in held))


def _parts(
        student: nn.Module, teacher: nn.Module, images: Images, rate: float | None,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], float]:
    """By the names of the parts, what makes the task of a student, and keywords of `fit`; and the learning rate.

    It is relative to that of a student that has everything to learn; None for what the first images say.
    """
    ode = find_ode_blocks(student)[0]
    layers = len(find_stages(teacher)[0].blocks)
    own = ode.config.phases == ode.steps  # every step has a block of its own, so that no other number can be learned
    decay = 0. if ode.shared.depends_on_time or own else 0.05
    embedding = images.measure == 'cosine'
    tasks: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    stepwise = partial(StepwiseTask, teacher=teacher, embedding=embedding, verbose=False)
    steps_are_layers = ode.config.steps_and_end[1] == layers
    if rate is None:
        rate = min(1., 3. * loss_before(stepwise(student), islice(images.loader, 1))) if steps_are_layers else 1.
    for _, name, loss, chosen in PARTS:
        if name == 'stepwise':
            if not steps_are_layers:
                continue
            tasks[name] = stepwise
        else:
            loss = {**loss, 'embedding': embedding}
            if name == 'any steps' and not own:
                loss = {**loss, **(Recipe.load(ELASTIC[ode.shared.depends_on_time]).stages[-1].loss or {})}
            try:
                TrajectoryDistillationTask(student, teacher, verbose=False, **loss)
            except ValueError:  # RoPE, say, which goes with all patches only
                loss = {key: value for key, value in loss.items() if key != 'patch_drop'}
            tasks[name] = partial(TrajectoryDistillationTask, teacher=teacher, verbose=False, **loss)
        options[name] = {**chosen, 'lr': chosen['lr'] * rate, 'weight_decay': decay}
    return tasks, options, rate


def _scores(history: list[dict[str, float]]) -> list[float]:
    """What was measured after each epoch, in percent."""
    return [score_of(record, 0.) * (100. if 'val_cosine' in record else 1.) for record in history]


def _best(first: nn.Module, start: float, folder: Path, names: Iterable[str]) -> nn.Module:
    """The best of the states at the start and in the folders of the parts."""
    found = {}
    for name in names:
        part = folder / name.replace(' ', '_')
        if (part / HISTORY).is_file() and (part / BEST).is_dir():
            found[part] = max(_scores(json.loads((part / HISTORY).read_text())))
    if max(found.values(), default=-1.) <= start:
        return first
    part = max(found, key=found.__getitem__)
    best = timm.create_model(f'local-dir:{part / BEST}', pretrained=True)
    return best.to(next(first.parameters())).eval()
