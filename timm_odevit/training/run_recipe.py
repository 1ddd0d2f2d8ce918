"""train: run a recipe stage by stage, and save what is needed to resume it and to tell how the model was made."""
import copy
import json
import math
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from operator import mul
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask, TrainingTask
from torch import Tensor, nn

from ..convert.conversion import convert_
from ..data.arrays import ArrayLoader
from ..data.preprocessing import warn_of_other_classes
from ..distributed import alone_in, in_first_process, rank_and_world
from ..evaluation.accuracy import AMP_DTYPES
from ..files import staged, to_json, write_text
from ..hooks import lent, random_states_kept, surely
from ..loading import CONFIG, WEIGHTS
from ..ode.blocks import find_ode_blocks
from ..saving.save import describe, save_pretrained
from ..settings import number, one_line, shown
from .config import FitConfig
from .fit import count_updates, fit
from .loaders import count_classes, draw, label_names, loader_chain, loaders
from .minutes import Stream, seconds_per_update, share_minutes
from .monitor import score_of, try_one_batch, validate
from .recipe import FIT, PARTS, Recipe
from .resume import BEST, HISTORY, RECIPE, RUN, START, check_about, check_recipe, hash_of, hash_of_data
from .tasks import StepwiseTask, TrajectoryDistillationTask

__all__ = ['train']

SAMPLE = 256  # images for measurements: init svd_data, checkpoints


def train(
        recipe: Recipe,
        data: str | Path,
        out: str | Path,
        *,
        teacher: nn.Module | None = None,
        student: nn.Module | None = None,
        minutes: float | None = None,
        resume: bool = False,
        limit: int | None = None,
        command: dict[str, Any] | None = None,
        device: str | torch.device = 'cpu',
        progress: bool = True,
) -> list[dict[str, float]]:
    """Run a recipe.

    Writes to `out`: recipe.yaml; run.json, with what else must be the same to resume; stage0/, stage1/, ..., as `fit`
    writes them; and at the end best/, the best model of the last stage with its recipe, and history.json, the records
    of all stages. A given student is validated first and saved in start/; if training ends worse than that, best/ holds
    the model from start/, and a warning says so. A stage that does not train the student's own number of steps is
    validated and saved with the nearest one that it trains; the recipe in best/ has numbers of steps in place of shares
    of the student's own number.

    Args:
        recipe: Recipe to run.
        data: Folder of images, see `folder_loaders`, or .npz of small images, see `array_loaders`.
        out: Folder for the results.
        teacher: timm model; None to train without one.
        student: Model to train as it is, ignoring the recipe's `ode`; None to make it from the teacher or, without one,
            from the recipe's `model`.
        minutes: Train for about so long instead of the recipe's epochs: the stages share the minutes as these would,
            and one without the time for an epoch has a shorter one. recipe.yaml says how many epochs came of it.
        resume: Continue the run in `out`.
        limit: Use only this many images of each part of the data, for a rehearsal.
        command: What to record in run.json, so that `odevit distill --resume` knows data and models by name.
        device: Device for a student that is built without a teacher.
        progress: Show progress bars.

    Returns:
        The records of all epochs, as returned by `fit`, each with its stage.

    Raises:
        TypeError: The recipe is not a Recipe.
        ValueError: Recipe, models, data and folder do not fit together; nothing has been trained.
        FloatingPointError: The loss stopped being finite; the files of the previous epoch remain.
        OSError: A file could not be written (files written earlier remain); or another process uses the folder.

    Examples:
        >>> recipe = Recipe.load('autonomous', ['data.batch_size=8', 'stages.0.fit.epochs=1', 'stages.1.fit.epochs=1'])
        >>> history = train(recipe, 'photos', 'run', teacher=teacher)
        >>> best = timm.create_model('local-dir:run/best', pretrained=True)
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f'recipe must be a Recipe; got {shown(recipe)}. Recipe.load(...) reads one, by name or file.')
    if student is not None:
        recipe = replace(recipe, ode=None)
    for model in (teacher, student):
        if model is not None:
            device = next(model.parameters()).device
    given, folder, (rank, world), began = student, Path(out), rank_and_world(), time.perf_counter()
    with alone_in(folder), random_states_kept(device), lent(teacher):
        new = not (folder / RECIPE).exists()
        plan = None if new or not (folder / RUN).exists() else json.loads((folder / RUN).read_text()).get('epochs')
        if minutes is not None:
            number(0., open='(')('minutes', minutes)
            recipe = recipe.with_epochs(plan or [])
        check_recipe(folder, recipe, resume)
        host = _host(recipe, data, teacher, student, device)
        train_loader, val_loader = loaders(
            recipe.batches, data, host, limit=limit, seed=recipe.seed, any_classes=recipe.embeds)
        names = label_names(train_loader)
        if teacher is not None and not recipe.embeds and rank == 0:
            for model in (host, teacher):
                warn_of_other_classes(model, names, data)
        about = {'limit': limit, 'batches': len(train_loader),
                 'data sha256': hash_of_data(train_loader, val_loader),
                 **({} if minutes is None else {'minutes': minutes})}
        for name, model in (('teacher', teacher), ('student', student)):
            about[f'{name} sha256'] = None if model is None else hash_of(model.state_dict().values())
        check_about(folder, about)
        sample = draw(getattr(val_loader, 'dataset', val_loader), SAMPLE, recipe.seed)[0].to(device)
        student = _student(recipe, host, sample)
        own = [ode.steps for ode in find_ode_blocks(student)]
        stages = [_prepare(i, recipe, student, teacher, sample, train_loader) for i in range(len(recipe.stages))]
        if new and (progress or minutes is not None):
            epochs: list[float] = [config.epochs for *_, config in stages]
            seconds = [_seconds(i, recipe, student, teacher, sample, train_loader, val_loader)
                       for i in range(len(stages))]
            if minutes is not None:
                left = in_first_process(lambda: minutes - (time.perf_counter() - began) / 60)
                epochs = plan = share_minutes(left, epochs, seconds)
                recipe = recipe.with_epochs(plan)
                stages = [_prepare(i, recipe, student, teacher, sample, train_loader) for i in range(len(stages))]
            if progress and rank == 0:
                print(f"{' + '.join(f'{n:.3g}' for n in epochs)} epochs: about "
                      f'{sum(map(mul, epochs, seconds)) / 60:.3g} minutes')
        if world > 1:
            dist.barrier()  # all check the folder before the first process writes to it
        if rank == 0 and new:
            write_text(folder / RUN, to_json({**about, 'epochs': plan, 'command': command}))
            write_text(folder / RECIPE, recipe.to_yaml())
        _name_classes(student, names, keep=teacher is not None)
        start = None if given is None else in_first_process(
            lambda: _start(student, own, stages[-1], val_loader, folder, progress))
        history = _train_stages(
            student, own, stages, plan, train_loader, val_loader, folder, resume, progress and rank == 0)
        if rank == 0:
            _publish(folder, recipe, recipe.without_shares(own[0]) if len(own) == 1 else recipe, history, start)
    return history


def _host(
        recipe: Recipe, data: str | Path, teacher: nn.Module | None, student: nn.Module | None,
        device: str | torch.device,
) -> Any:
    """The model to convert or to train: the student, the teacher or, without them, the recipe's.

    One without weights has the classes of the data, unless the recipe says otherwise.
    """
    if teacher is not None and recipe.model is not None:
        raise ValueError(f"The recipe names a model, '{recipe.model}', but there is a teacher. Leave one of them out.")
    if teacher is not None and student is None and recipe.ode is None:
        raise ValueError('ode is null, so the teacher itself would be trained. Give ode, or a student.')
    if student is not None or teacher is not None:
        return student if student is not None else teacher
    if recipe.model is None:
        raise ValueError('The recipe names no model, and there is no teacher. Give --teacher, or model in the recipe.')
    args = dict(recipe.model_args or {})
    if not args.get('pretrained'):
        args.setdefault('num_classes', count_classes(data))
    torch.manual_seed(recipe.seed)  # so that a new head is the same each time
    try:
        return timm.create_model(recipe.model, **args).to(device)
    except OSError as e:
        raise OSError(f"The weights of '{recipe.model}' could not be loaded: {one_line(e)} Without a network, give "
                      '--checkpoint FILE, or model_args.pretrained=false for random weights.') from e
    except Exception as e:  # of any kind, for keywords that do not fit
        raise ValueError(f"Cannot build '{recipe.model}' with {args}: {one_line(e)}") from e


def _student(recipe: Recipe, host: nn.Module, images: Tensor) -> nn.Module:
    """The student: the host converted by the recipe, or itself."""
    if recipe.ode is not None:
        host = copy.deepcopy(host).requires_grad_(True)
        torch.manual_seed(recipe.seed)
        convert_(host, recipe.config, images=images, keep_original=False)
    if recipe.grad_checkpointing:
        host.set_grad_checkpointing()  # type: ignore[operator]
    describe(host)  # fail now rather than after the first epoch
    return host


def _prepare(
        i: int, recipe: Recipe, student: nn.Module, teacher: nn.Module | None, sample: Tensor, train_loader: Any,
) -> tuple[TrainingTask, set[str], FitConfig]:
    """The task of a stage, the names of the parameters that it trains, and the settings of its fit; all checked."""
    stage = recipe.stages[i]
    task: TrainingTask
    device = next(student.parameters()).device
    criterion = SoftTargetCrossEntropy() if recipe.batches.mixes else nn.CrossEntropyLoss()
    config = replace(recipe.fit_of(stage), seed=recipe.seed + 1000 * i)
    names = _names_of(student, stage.train, f'stages.{i}.train')
    try:
        if stage.task == 'labels':
            task = ClassificationTask(student, criterion, device=device, verbose=False)
        elif stage.task == 'trajectory':
            task = TrajectoryDistillationTask(
                student, teacher, calibration=sample.split(64), criterion=criterion, device=device, verbose=False,
                config=recipe.loss_of(stage))
        elif teacher is None:
            raise ValueError("task 'stepwise' needs a teacher. Give one.")
        else:
            task = StepwiseTask(
                student, teacher, embedding=recipe.loss_of(stage).embedding, device=device, verbose=False)
    except (TypeError, ValueError) as e:
        raise ValueError(f'stages.{i}: {e}') from e
    count_updates(train_loader, config.accumulate)
    return task, names, config


def _seconds(
        i: int, recipe: Recipe, student: nn.Module, teacher: nn.Module | None, sample: Tensor, train_loader: Any,
        val_loader: Any,
) -> float:
    """Seconds that an epoch of a stage takes with its validation, by trying a few updates and a batch."""
    task, names, config = _prepare(i, recipe, student, teacher, sample, train_loader)

    def make(trial: nn.Module) -> TrainingTask:
        for name, p in trial.named_parameters():
            p.requires_grad_(p.requires_grad and name in names)
        return _prepare(i, recipe, trial, teacher, sample, train_loader)[0]
    options = {name: getattr(config, name) for name in FIT if name not in ('epochs', 'compile')}
    update = seconds_per_update(student, train_loader, make, options)
    started = time.perf_counter()
    in_first_process(lambda: try_one_batch(val_loader, task, AMP_DTYPES[config.amp]))
    validation = (time.perf_counter() - started) / 2 * len(val_loader)  # it runs twice
    return update * count_updates(train_loader, config.accumulate) + in_first_process(lambda: validation)


def _start(
        student: nn.Module, own: list[int], stage: tuple[TrainingTask, set[str], FitConfig], val_loader: Any,
        folder: Path, progress: bool,
) -> dict[str, float]:
    """Validate a student before training, as the last stage does, and save it in start/; returns its record."""
    task, _, config = stage
    path = folder / START / HISTORY
    if not path.exists():
        _set_steps(student, task, own)
        save_pretrained(student, folder / START)
        record = validate(task, student, val_loader, AMP_DTYPES[config.amp])
        write_text(path, to_json([{'epoch': 0, **record}]))
    found: dict[str, float] = json.loads(path.read_text())[0]
    if progress:
        print(f'start: {_score_in_words(found)}')
    return found


def _set_steps(student: nn.Module, task: TrainingTask, own: list[int]) -> None:
    """Give a student the number of steps that a stage trains which is nearest to its own."""
    trained = getattr(task, 'counts', [None] * len(own))
    for ode, steps, counts in zip(find_ode_blocks(student), own, trained, strict=True):
        ode.steps = min((k for of in counts or [[steps]] for k in of), key=lambda count: abs(count - steps))


def _score_in_words(record: dict[str, float]) -> str:
    return f"top-1 {record['val_top1']:.1f} %" if 'val_top1' in record else f"cosine {record['val_cosine']:.4f}"


def _train_stages(
        student: nn.Module, own: list[int], stages: Sequence[tuple[TrainingTask, set[str], FitConfig]],
        plan: Sequence[float] | None, train_loader: Any, val_loader: Any, folder: Path, resume: bool, progress: bool,
) -> list[dict[str, float]]:
    """Train stage by stage; returns the records of all epochs."""
    history, trainable = [], {name for name, p in student.named_parameters() if p.requires_grad}

    def let_learn(names: set[str]) -> None:
        for name, p in student.named_parameters():
            p.requires_grad_(name in names)
    try:
        for i, (task, names, config) in enumerate(stages):
            _set_steps(student, task, own)
            let_learn(names & trainable)
            if progress:
                count = sum(p.numel() for p in student.parameters() if p.requires_grad)
                print(f"stage {i}: {getattr(task, 'title', 'labels')}, {count:,} trainable parameters")
            if isinstance(arrays := loader_chain(train_loader)[-1], ArrayLoader):
                arrays.seed = config.seed  # for the order of the images
            part = max(config.accumulate, int(plan[i] * len(train_loader))) if plan and plan[i] < 1 else 0
            records = fit(task, Stream(train_loader, part) if part else train_loader, val_loader,
                          out=folder / f'stage{i}', resume=resume, progress=progress, config=config)
            history += [{'stage': i, **record} for record in records]
    finally:
        surely(lambda: let_learn(trainable))
    return history


def _publish(
        folder: Path, recipe: Recipe, trained: Recipe, history: list[dict[str, float]], start: dict[str, float] | None,
) -> None:
    """Put the best model of the last stage, the recipe and the records in place; `trained` is the model's recipe.

    If the start is better, it is the best model.
    """
    last = len(recipe.stages) - 1
    best = folder / f'stage{last}' / BEST
    top = max((record for record in history if record['stage'] == last), key=lambda record: score_of(record, -math.inf))
    if start is not None and score_of(top, -math.inf) < score_of(start, -math.inf):
        warnings.warn(
            f'Training ended worse than it started: {_score_in_words(top)} in the best epoch of the last stage, '
            f"{_score_in_words(start)} before. '{folder / BEST}' holds the model from before training, '{best}' the "
            'best epoch. Try a lower lr, or more epochs.', stacklevel=3)
        best = folder / START
    with staged(folder / BEST, WEIGHTS, CONFIG) as aside:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(best / name, aside / name)
    write_text(folder / BEST / RECIPE, trained.to_yaml())
    write_text(folder / RECIPE, recipe.to_yaml())  # epochs may have increased on resuming
    write_text(folder / HISTORY, to_json(history))


def _name_classes(model: Any, names: list[str] | None, keep: bool) -> None:
    """Put the names of the classes into a model's pretrained_cfg, unless it is to keep its own.

    What it says about other classes goes: a model that is trained on labels without names has none.
    """
    cfg: Any = getattr(model, 'pretrained_cfg', None)
    own = (cfg or {}).get('label_names')
    if not isinstance(cfg, dict) or (keep and (not names or (own and len(own) == model.num_classes))):
        return
    stale = ('tag', 'label_names', 'label_descriptions') if own != names or not names else ()
    kept = {key: value for key, value in cfg.items() if key not in stale}
    known = {'label_names': names} if names and len(names) == model.num_classes else {}
    model.pretrained_cfg = model.default_cfg = {**kept, 'num_classes': model.num_classes, **known}


def _names_of(student: nn.Module, parts: Sequence[str], where: str) -> set[str]:
    """Names of the parameters of the given parts, each of which must have some."""
    chosen = set()
    for part in parts:
        found = [name for name, _ in student.named_parameters() if any(
            piece in f'.{name}' if piece.startswith('.') else name.startswith(piece) for piece in PARTS[part])]
        if not found:
            raise ValueError(f"{where}: the model has no parameters of the part '{part}'. Leave it out.")
        chosen.update(found)
    return chosen
