"""train: run a recipe, stage by stage, and keep what is needed to resume and to say how the model was made."""
import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Union

import timm
import torch
import torch.distributed as dist
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask, TrainingTask
from torch import nn

from ..convert.conversion import convert_
from ..data.arrays import ArrayLoader
from ..data.preprocessing import renormalisation
from ..distributed import alone_in, rank_and_world
from ..files import staged, to_json, write_text
from ..ode.blocks import find_ode_blocks
from ..saving.save import describe
from ..saving.weights import CONFIG, WEIGHTS
from .cache import CachedLoader, hash_of
from .fit import count_updates, fit
from .loaders import draw_sample, hash_of_data, loaders, unmixed
from .recipe import PARTS, Recipe
from .state import BEST, HISTORY
from .stepwise import StepwiseTask
from .trajectory import TrajectoryDistillationTask

__all__ = ['train']

RECIPE = 'recipe.yaml'
RUN = 'run.json'
SAMPLE = 256  # images for what is measured: init svd_data, boundaries, checkpoints


def train(
        recipe: Recipe,
        data: Union[str, Path],
        out: Union[str, Path],
        *,
        teacher: Optional[nn.Module] = None,
        student: Optional[nn.Module] = None,
        resume: bool = False,
        limit: Optional[int] = None,
        cache: Optional[Union[str, Path]] = None,
        device: Union[str, torch.device] = 'cpu',
        progress: bool = True,
) -> List[Dict[str, float]]:
    """Run a recipe.

    Writes to `out`: recipe.yaml, and run.json with what else must be the same to resume; stage0/, stage1/, ... as `fit`
    does; and at the end best/, the best model of the last stage, and history.json, the records of all stages. A stage
    that is not trained with the student's own number of steps is validated and saved with the nearest one that it is.

    Args:
        recipe: What to do.
        data: Folder of images, see `folder_loaders`, or .npz of small images, see `array_loaders`.
        out: Folder for the results.
        teacher: timm model; None to train without one.
        student: Model to train, as it is, whatever `ode` of the recipe says; None to make it by `build_student`.
        resume: Go on with the run in `out`.
        limit: Use that many images of an .npz only, to rehearse.
        cache: Folder for the cached states of the teacher, if the recipe wants them; several runs may share it. By
            default `out`/cache.
        device: Device of a student that is built here without a teacher.
        progress: Show progress bars.

    Returns:
        The records of all epochs, as `fit` gives them, each with its stage.

    Raises:
        ValueError: Recipe, models, data and folder do not fit; nothing is trained then.
        FloatingPointError: The loss stopped being finite; the files of the epoch before remain.
        OSError: A file could not be written, and what was written before remains; or another run uses the folder.
    """
    folder = Path(out)
    if student is not None:
        recipe = replace(recipe, ode=None)
    with alone_in(folder):
        _check_recipe(folder, recipe, resume)
        _check_models(recipe, teacher, student)
        for model in (teacher, student):
            if model is not None:
                device = next(model.parameters()).device
        host: Any = student if student is not None else teacher
        if host is None:
            host = _create(recipe, device)
        train_loader, val_loader = loaders(recipe, data, host, limit=limit)
        about = {
            'limit': limit, 'batches': len(train_loader), 'data sha256': hash_of_data(train_loader, val_loader), **{
                f'{name} sha256': None if model is None else hash_of(model.state_dict().values())
                for name, model in (('teacher', teacher), ('student', student))}}
        _check_about(folder, about)
        calibration = draw_sample(val_loader, SAMPLE, recipe.seed).to(device)
        if student is None:
            student = build_student(recipe, host, images=calibration)
        if recipe.grad_checkpointing:
            student.set_grad_checkpointing()  # type: ignore[operator]
        describe(student)  # better now than after the first epoch
        for i, stage in enumerate(recipe.stages):
            _named(student, stage.train, f'stages.{i}.train')
        tasks = [_task(recipe, i, student, teacher, calibration) for i in range(len(recipe.stages))]
        for stage in recipe.stages:
            count_updates(train_loader, recipe.fit_of(stage).accumulate)
        cached: Any = train_loader
        if recipe.cache:
            cached = CachedLoader(
                train_loader, teacher, cache or folder / 'cache', views=recipe.cache, progress=progress)
        rank, world = rank_and_world()
        if world > 1:
            dist.barrier()  # all have looked at the folder before the first writes to it
        if rank == 0 and not (folder / RECIPE).exists():
            write_text(folder / RUN, to_json(about))
            write_text(folder / RECIPE, recipe.to_yaml())
        history: List[Dict[str, float]] = []
        trainable = {name for name, p in student.named_parameters() if p.requires_grad}
        own = [ode.steps for ode in find_ode_blocks(student)]
        for i, (stage, task) in enumerate(zip(recipe.stages, tasks, strict=True)):
            for ode, steps in zip(find_ode_blocks(student), own, strict=True):
                counts = getattr(task, 'steps', None) or [steps]
                ode.steps = min(counts, key=lambda count: abs(count - steps))  # validated and saved as it was trained
            learning = _choose(student, stage.train, trainable)
            if progress and rank == 0:
                print(f'stage {i}: {stage.task}, {sum(p.numel() for p in learning):,} parameters learn')
            config = replace(recipe.fit_of(stage), seed=recipe.seed + 1000 * i)
            arrays = unmixed(train_loader)
            if isinstance(arrays, ArrayLoader):
                arrays.seed = config.seed  # of the order of the images
            loader = train_loader if stage.task == 'labels' else cached
            records = fit(task, loader, val_loader, out=folder / f'stage{i}', resume=resume, progress=progress,
                          config=config)
            history += [{'stage': float(i), **record} for record in records]
        for name, p in student.named_parameters():
            p.requires_grad_(name in trainable)
        if rank == 0:
            best = folder / f'stage{len(recipe.stages) - 1}' / BEST
            with staged(folder / BEST, WEIGHTS, CONFIG) as aside:
                for name in (WEIGHTS, CONFIG):
                    shutil.copyfile(best / name, aside / name)
            write_text(folder / RECIPE, recipe.to_yaml())  # with more epochs, if it was resumed for more
            write_text(folder / HISTORY, to_json(history))
        return history


def build_student(recipe: Recipe, teacher: nn.Module, images: Optional[torch.Tensor] = None) -> nn.Module:
    """The student of a recipe: a converted copy of the teacher, or with `ode: null` the model as it is.

    Args:
        recipe: The recipe.
        teacher: Model to convert; it is not changed.
        images: Calibration images [B, C, H, W], for what the conversion measures.
    """
    if recipe.ode is None:
        return teacher
    student = copy.deepcopy(teacher).requires_grad_(True)
    torch.manual_seed(recipe.seed)
    convert_(student, recipe.config, images=images, keep_original=False)
    return student


def _without_end(recipe: Recipe) -> Any:
    """A recipe but for the epochs of its last stage, which may become more."""
    *others, last = recipe.stages
    fit = {**(recipe.fit or {}), **(last.fit or {}), 'epochs': 1}
    return replace(recipe, fit={'epochs': 1}, stages=(
        *(replace(stage, fit={**(recipe.fit or {}), **(stage.fit or {})}) for stage in others), replace(last, fit=fit)))


def _check_recipe(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Refuse a folder with another run."""
    if (folder / RECIPE).exists():
        if not resume:
            raise ValueError(f"'{folder}' holds a run already. Pass resume=True to continue it, or give another "
                             'folder.')
        if _without_end(Recipe.load(folder / RECIPE)) != _without_end(recipe):
            raise ValueError(f"'{folder / RECIPE}' is another recipe. Resume with that one, or give another folder.")


def _check_models(recipe: Recipe, teacher: Optional[nn.Module], student: Optional[nn.Module]) -> None:
    """Refuse models that do not suit the recipe."""
    if teacher is not None and recipe.model is not None:
        raise ValueError(
            f"The recipe names a model, '{recipe.model}', to train without a teacher. Leave one of them out.")
    if teacher is not None and student is None and recipe.ode is None:
        raise ValueError('ode is null, so the teacher itself would be trained. Give ode, or a student.')
    if recipe.cache and teacher is None:
        raise ValueError('cache keeps what a teacher says, and there is none. Give one, or set cache to 0.')
    if student is not None and teacher is not None and renormalisation(student, teacher)[0] is not None:
        if recipe.cache or (recipe.loss or {}).get('checkpoints') == 'distance':
            raise ValueError('Student and teacher expect differently normalised images, so neither cache nor '
                             'checkpoints by distance can be used.')


def _check_about(folder: Path, about: Dict[str, Any]) -> None:
    """Refuse to resume with other data or other models."""
    if (folder / RUN).exists():
        before = json.loads((folder / RUN).read_text())
        for name, value in about.items():
            if before.get(name) != value:
                raise ValueError(f"'{folder}' was made with {name} {before.get(name)}, this run has {value}. Resume "
                                 'with what the first run had, or give another folder.')


def _create(recipe: Recipe, device: Union[str, torch.device]) -> nn.Module:
    if recipe.model is None:
        raise ValueError('The recipe names no model, and there is no teacher. Give --teacher, or model in the recipe.')
    torch.manual_seed(recipe.seed)  # a new head is the same each time
    try:
        return timm.create_model(recipe.model, **(recipe.model_args or {})).to(device)
    except OSError as e:
        raise OSError(f"The weights of '{recipe.model}' could not be loaded: {' '.join(str(e).split())[:200]} Without "
                      'a network, give --checkpoint FILE; or train from random weights by model_args.pretrained=false.'
                      ) from e


def _task(
        recipe: Recipe,
        number: int,
        student: nn.Module,
        teacher: Optional[nn.Module],
        calibration: torch.Tensor,
) -> TrainingTask:
    stage = recipe.stages[number]
    device = next(student.parameters()).device
    mixed = any((recipe.data or {}).get(k) for k in ('mixup', 'cutmix', 'smoothing'))
    criterion = SoftTargetCrossEntropy() if mixed else nn.CrossEntropyLoss()
    try:
        if stage.task == 'labels':
            return ClassificationTask(student, criterion, device=device, verbose=False)
        if stage.task == 'stepwise':
            if teacher is None:
                raise ValueError("task 'stepwise' follows a teacher. Give one.")
            return StepwiseTask(student, teacher, device=device, verbose=False)
        loss = recipe.loss_of(stage)
        if recipe.fit_of(stage).compile and loss.segments:
            raise ValueError('segments work by hooks, which a compiled model skips. Leave fit.compile or them out.')
        return TrajectoryDistillationTask(
            student, teacher, calibration=calibration.split(64), criterion=criterion, device=device, verbose=False,
            config=loss)
    except (TypeError, ValueError) as e:
        raise ValueError(f'stages.{number}: {e}') from e


def _choose(student: nn.Module, parts: Sequence[str], trainable: Any) -> List[nn.Parameter]:
    """Let the parameters of some parts learn, and no others."""
    chosen = _named(student, parts, 'train')
    for name, p in student.named_parameters():
        p.requires_grad_(name in chosen and name in trainable)
    return [p for p in student.parameters() if p.requires_grad]


def _named(student: nn.Module, parts: Sequence[str], where: str) -> List[str]:
    """Names of the parameters of some parts, all of which must be there."""
    chosen = []
    for part in parts:
        found = [name for name, _ in student.named_parameters() if any(
            piece in f'.{name}' if piece.startswith('.') else name.startswith(piece) for piece in PARTS[part])]
        if not found:
            raise ValueError(f"{where}: the model has no parameters of the part '{part}'. Leave it out.")
        chosen += found
    return chosen
