"""train: run a recipe in a folder, and save what is needed to resume it and to tell how the model was made."""
import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from ..convert.conversion import convert_
from ..data.preprocessing import warn_of_other_classes
from ..data.read import Data, classes_of, read_data
from ..distributed import alone_in, rank_and_world
from ..files import staged, to_json, write_text
from ..hooks import lent, random_states_kept
from ..ode.blocks import find_ode_blocks
from ..saving.loading import CONFIG, WEIGHTS
from ..saving.save import describe
from ..settings import one_line, shown
from .config import MINUTES
from .recipe import Recipe
from .resume import BEST, HISTORY, RECIPE, Plan, check_about, check_unused, hash_of, read_run
from .stages import adapted, run_stages

__all__ = ['train']

SAMPLE = 256  # images for measurements: init svd_data, checkpoints


def train(
        recipe: Recipe,
        data: Any,
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

    Writes to `out`: recipe.yaml; run.json, with what else must be the same to resume, and what was planned; start/, the
    student before training; stage0/, stage1/, ..., as `fit` writes them; and at the end best/, with the recipe, and
    history.json, the records of all stages. best/ holds the best model of the start and of the stages that train the
    same numbers of steps as the last one; if that is the start, a warning says so. A stage that does not train the
    student's own number of steps is validated and saved with the nearest one that it trains; the recipe in best/ has
    numbers of steps in place of shares of the student's own number.

    Args:
        recipe: Recipe to run.
        data: Images and labels, in any form that `read_data` takes: a folder, an .npz, tensors or a loader.
        out: Folder for the results.
        teacher: timm model; None to train without one.
        student: Model to train as it is, ignoring the recipe's `ode`; None to make it from the teacher or, without one,
            from the recipe's `model`.
        minutes: Train for about so long instead of the recipe's epochs or minutes. Each stage gets a part of the time
            that is left when it begins: in proportion to its minutes, or else to its epochs times the steps of an
            update.
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
        device = device if model is None else next(model.parameters()).device
    folder, (rank, world) = Path(out), rank_and_world()
    with alone_in(folder), random_states_kept(device), lent(teacher):
        _check_recipe(folder, recipe, resume)
        before = read_run(folder)
        minutes = before.get('minutes') if minutes is None else minutes
        if minutes is not None:
            minutes = MINUTES('minutes', minutes)
        host = _host(recipe, data, teacher, student, device)
        images = read_data(data, host, recipe.batches, labels=not recipe.embeds, limit=limit, seed=recipe.seed)
        names = list(images.classes) if images.classes and not recipe.embeds else None
        if teacher is not None and not recipe.embeds and rank == 0:
            for model in (host, teacher):
                warn_of_other_classes(model, names, data)
        about = {'limit': limit, 'minutes': minutes, 'data sha256': images.sha256(), **{
            f'{name} sha256': None if model is None else hash_of(model.state_dict().values())
            for name, model in (('teacher', teacher), ('student', student))}}
        check_about(folder, about)
        plan = Plan(folder, {**about, 'command': command or before.get('command')})
        sample = _sample(images, recipe.seed).to(device)
        student = _student(recipe, host, sample)
        used = adapted(recipe, student, teacher) if recipe.adapt else recipe
        steps = [ode.steps for ode in find_ode_blocks(student)]
        _name_classes(student, names, keep=teacher is not None)
        if world > 1:
            dist.barrier()  # all check the folder before the first process writes to it

        def begin() -> None:
            if rank == 0 and not (folder / RECIPE).exists():
                plan.write()
                write_text(folder / RECIPE, recipe.to_yaml())
        history, best = run_stages(
            used, student, teacher, images, sample, plan, begin=begin, minutes=minutes, resume=resume,
            progress=progress and rank == 0)
        if rank == 0:
            with staged(folder / BEST, WEIGHTS, CONFIG) as aside:
                for name in (WEIGHTS, CONFIG):
                    shutil.copyfile(best / name, aside / name)
            write_text(folder / BEST / RECIPE, (used.without_shares(steps[0]) if len(steps) == 1 else used).to_yaml())
            write_text(folder / RECIPE, recipe.to_yaml())  # epochs may have increased on resuming
            write_text(folder / HISTORY, to_json(history))
    return history


def _check_recipe(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Refuse a folder with another run."""
    check_unused(folder, resume, folder / RECIPE)
    if not (folder / RECIPE).exists():
        return
    then, now = ({'stages': len(of.stages), **_flat(yaml.safe_load(of.to_yaml()))}
                 for of in (Recipe.load(folder / RECIPE), recipe))
    may_grow = (f'stages.{len(recipe.stages) - 1}.fit.epochs', 'fit.epochs' if len(recipe.stages) == 1 else '')
    other = [f'{key} was {then.get(key, "unset")} and is {now.get(key, "unset")}'
             for key in dict.fromkeys((*then, *now)) if then.get(key) != now.get(key) and key not in may_grow]
    if other:
        raise ValueError(f"'{folder / RECIPE}' is a different recipe: {'; '.join(other)}. Resume with that, or give "
                         'another folder.')


def _flat(tree: Any, at: str = '') -> dict[str, Any]:
    """A tree of dicts and lists as one dict, with keys such as stages.0.fit.lr."""
    if not isinstance(tree, (dict, list)):
        return {at: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, entry in pairs for k, v in _flat(entry, f'{at}.{key}'.lstrip('.')).items()}


def _host(
        recipe: Recipe, data: Any, teacher: nn.Module | None, student: nn.Module | None, device: str | torch.device,
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
    if not args.get('pretrained') and 'num_classes' not in args:
        args['num_classes'] = classes_of(data)[1]
    torch.manual_seed(recipe.seed)  # so that a new head is the same each time
    try:
        return timm.create_model(recipe.model, **args).to(device)
    except OSError as e:
        raise OSError(f"The weights of '{recipe.model}' could not be loaded: {one_line(e)} Without a network, give "
                      '--checkpoint FILE, or model_args.pretrained=false for random weights.') from e
    except Exception as e:  # of any kind, for keywords that do not fit
        raise ValueError(f"Cannot build '{recipe.model}' with {args}: {one_line(e)}") from e


def _sample(images: Data, seed: int) -> Tensor:
    return images.sample('train' if images.val is None else 'val', SAMPLE, seed)[0]


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


def _name_classes(model: Any, names: list[str] | None, keep: bool) -> None:
    """Put the names of the classes into a model's pretrained_cfg, unless it is to keep its own.

    What it says about other classes goes: a model that is trained on labels without names has none.
    """
    cfg: Any = getattr(model, 'pretrained_cfg', None)
    own = (cfg or {}).get('label_names')
    if not isinstance(cfg, dict) or (keep and (not names or (own and len(own) == model.num_classes))):
        return
    stale = ('tag', 'label_names', 'label_descriptions') if own != names or not names else ()
    rest = {key: value for key, value in cfg.items() if key not in stale}
    known = {'label_names': names} if names and len(names) == model.num_classes else {}
    model.pretrained_cfg = model.default_cfg = {**rest, 'num_classes': model.num_classes, **known}
