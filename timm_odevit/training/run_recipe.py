"""train: run a recipe stage by stage, and save what is needed to resume it and to tell how the model was made."""
import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from ..data.preprocessing import renormalisation, warn_of_other_classes
from ..distributed import alone_in, rank_and_world
from ..files import staged, to_json, write_text
from ..hooks import random_states_kept
from ..loading.find_weights import CONFIG, WEIGHTS
from ..ode.blocks import find_ode_blocks
from ..saving.save import describe
from ..settings import one_line, shown
from .fit import count_updates, fit
from .loaders import count_classes, draw_sample, label_names, loader_chain, loaders
from .recipe import PARTS, Recipe
from .resume import BEST, HISTORY, RECIPE, RUN, check_about, check_recipe, hash_of, hash_of_data
from .tasks import StepwiseTask, TrajectoryDistillationTask

__all__ = ['train']

SAMPLE = 256  # images for measurements: init svd_data, boundaries, checkpoints


def train(
        recipe: Recipe,
        data: str | Path,
        out: str | Path,
        *,
        teacher: nn.Module | None = None,
        student: nn.Module | None = None,
        resume: bool = False,
        limit: int | None = None,
        command: dict[str, Any] | None = None,
        device: str | torch.device = 'cpu',
        progress: bool = True,
) -> list[dict[str, float]]:
    """Run a recipe.

    Writes to `out`: recipe.yaml; run.json, with what else must be the same to resume; stage0/, stage1/, ..., as `fit`
    writes them; and at the end best/, the best model of the last stage, and history.json, the records of all stages. A
    stage that does not train the student's own number of steps is validated and saved with the nearest one that it
    trains.

    Args:
        recipe: Recipe to run.
        data: Folder of images, see `folder_loaders`, or .npz of small images, see `array_loaders`.
        out: Folder for the results.
        teacher: timm model; None to train without one.
        student: Model to train as it is, ignoring the recipe's `ode`; None to make it from the teacher or, without one,
            from the recipe's `model`.
        resume: Continue the run in `out`.
        limit: Use only this many images of an .npz, for a rehearsal.
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
    """
    folder, rank = Path(out), rank_and_world()[0]
    if not isinstance(recipe, Recipe):
        raise TypeError(f'recipe must be a Recipe; got {shown(recipe)}. Recipe.load(...) reads one, by name or file.')
    if student is not None:
        recipe = replace(recipe, ode=None)
    for model in (teacher, student):
        if model is not None:
            device = next(model.parameters()).device
    with alone_in(folder), random_states_kept(device):
        check_recipe(folder, recipe, resume)
        _check_models(recipe, teacher, student)
        host: Any = student if student is not None else teacher
        if host is None:
            host = _create(recipe, count_classes(data)).to(device)
        train_loader, val_loader = loaders(
            recipe.batches, data, host, limit=limit, seed=recipe.seed, any_classes=recipe.embeds)
        names = label_names(train_loader)
        if teacher is not None and not recipe.embeds and rank == 0:
            for model in (host, teacher):
                warn_of_other_classes(model, names, data)
        about = _about(limit, train_loader, val_loader, teacher, student)
        check_about(folder, about)
        calibration = draw_sample(val_loader, SAMPLE, recipe.seed).to(device)
        student = _student(recipe, host, calibration)
        tasks = list(_tasks(recipe, student, teacher, calibration))
        for stage in recipe.stages:
            count_updates(train_loader, recipe.fit_of(stage).accumulate)
        if rank_and_world()[1] > 1:
            dist.barrier()  # all check the folder before the first process writes to it
        if rank == 0 and not (folder / RECIPE).exists():
            write_text(folder / RUN, to_json({**about, 'command': command}))
            write_text(folder / RECIPE, recipe.to_yaml())
        _name_classes(student, names, keep=teacher is not None)
        history = _train_stages(recipe, student, tasks, train_loader, val_loader, folder, resume, progress)
        if rank == 0:
            _publish(folder, recipe, history)
    return history


def _about(limit: int | None, train_loader: Any, val_loader: Any, *models: nn.Module | None) -> dict[str, Any]:
    """What must be the same when a run is resumed, beside the recipe."""
    return {'limit': limit, 'batches': len(train_loader), 'data sha256': hash_of_data(train_loader, val_loader), **{
        f'{name} sha256': None if model is None else hash_of(model.state_dict().values())
        for name, model in zip(('teacher', 'student'), models, strict=True)}}


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


def _train_stages(
        recipe: Recipe, student: nn.Module, tasks: Sequence[TrainingTask], train_loader: Any, val_loader: Any,
        folder: Path, resume: bool, progress: bool,
) -> list[dict[str, float]]:
    """Train stage by stage; returns the records of all epochs."""
    history: list[dict[str, float]] = []
    trainable = {name for name, p in student.named_parameters() if p.requires_grad}
    own = [ode.steps for ode in find_ode_blocks(student)]
    for i, (stage, task) in enumerate(zip(recipe.stages, tasks, strict=True)):
        for ode, steps in zip(find_ode_blocks(student), own, strict=True):
            counts = getattr(task, 'steps', None) or [steps]
            ode.steps = min(counts, key=lambda count: abs(count - steps))  # a count that is trained
        chosen = set(_names_of(student, stage.train, f'stages.{i}.train')) & trainable
        for name, p in student.named_parameters():
            p.requires_grad_(name in chosen)
        if progress and rank_and_world()[0] == 0:
            count = sum(p.numel() for p in student.parameters() if p.requires_grad)
            print(f'stage {i}: {stage.task}, {count:,} trainable parameters')
        config = replace(recipe.fit_of(stage), seed=recipe.seed + 1000 * i)
        arrays = loader_chain(train_loader)[-1]
        if isinstance(arrays, ArrayLoader):
            arrays.seed = config.seed  # for the order of the images
        records = fit(task, train_loader, val_loader, out=folder / f'stage{i}', resume=resume, progress=progress,
                      config=config)
        history += [{'stage': i, **record} for record in records]
    for name, p in student.named_parameters():
        p.requires_grad_(name in trainable)
    return history


def _publish(folder: Path, recipe: Recipe, history: list[dict[str, float]]) -> None:
    """Put the best model of the last stage, the recipe and the records in place."""
    best = folder / f'stage{len(recipe.stages) - 1}' / BEST
    with staged(folder / BEST, WEIGHTS, CONFIG) as aside:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(best / name, aside / name)
    for place in (folder / BEST, folder):
        write_text(place / RECIPE, recipe.to_yaml())  # epochs may have increased on resuming
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


def _check_models(recipe: Recipe, teacher: nn.Module | None, student: nn.Module | None) -> None:
    """Refuse models that do not suit the recipe."""
    if teacher is not None and recipe.model is not None:
        raise ValueError(
            f"The recipe names a model, '{recipe.model}', but there is also a teacher. Leave one of them out.")
    if teacher is not None and student is None and recipe.ode is None:
        raise ValueError('ode is null, so the teacher itself would be trained. Give ode, or a student.')
    if student is not None and teacher is not None and renormalisation(student, teacher)[0] is not None:
        if (recipe.loss or {}).get('checkpoints') == 'distance':
            raise ValueError('Student and teacher expect differently normalised images, so checkpoints must be uniform '
                             'or a list.')


def _create(recipe: Recipe, classes: int) -> nn.Module:
    """The recipe's model; one without weights has the classes of the data, unless the recipe says otherwise."""
    if recipe.model is None:
        raise ValueError('The recipe names no model, and there is no teacher. Give --teacher, or model in the recipe.')
    args = dict(recipe.model_args or {})
    if not args.get('pretrained'):
        args.setdefault('num_classes', classes)
    torch.manual_seed(recipe.seed)  # so that a new head is the same each time
    try:
        return timm.create_model(recipe.model, **args)
    except OSError as e:
        raise OSError(f"The weights of '{recipe.model}' could not be loaded: {one_line(e)} Without a "
                      'network, give --checkpoint FILE, or model_args.pretrained=false to train from random weights.'
                      ) from e


def _tasks(
        recipe: Recipe, student: nn.Module, teacher: nn.Module | None, calibration: Tensor,
) -> Iterator[TrainingTask]:
    """The task of each stage, which is checked before anything is written."""
    device = next(student.parameters()).device
    criterion = SoftTargetCrossEntropy() if recipe.batches.mixes else nn.CrossEntropyLoss()
    for i, stage in enumerate(recipe.stages):
        _names_of(student, stage.train, f'stages.{i}.train')
        try:
            if stage.task == 'labels':
                yield ClassificationTask(student, criterion, device=device, verbose=False)
            elif stage.task == 'trajectory':
                yield TrajectoryDistillationTask(
                    student, teacher, calibration=calibration.split(64), criterion=criterion, device=device,
                    verbose=False, config=recipe.loss_of(stage))
            elif teacher is None:
                raise ValueError("task 'stepwise' needs a teacher. Give one.")
            else:
                yield StepwiseTask(
                    student, teacher, embedding=recipe.loss_of(stage).embedding, device=device, verbose=False)
        except (TypeError, ValueError) as e:
            raise ValueError(f'stages.{i}: {e}') from e


def _names_of(student: nn.Module, parts: Sequence[str], where: str) -> list[str]:
    """Names of the parameters of the given parts, each of which must have some."""
    chosen = []
    for part in parts:
        found = [name for name, _ in student.named_parameters() if any(
            piece in f'.{name}' if piece.startswith('.') else name.startswith(piece) for piece in PARTS[part])]
        if not found:
            raise ValueError(f"{where}: the model has no parameters of the part '{part}'. Leave it out.")
        chosen += found
    return chosen
