"""train: run a recipe in a folder; calibrate_: that of its name in memory, on images without labels."""
import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import yaml
from timm.utils import random_seed
from torch import nn

from .._version import __version__
from ..convert.conversion import convert_
from ..data.batches import DataConfig, Mapped, hash_of, unlabelled
from ..data.preprocessing import warn_of_other_classes
from ..data.read import NOTE, classes_of, held_out_of, read_data
from ..distributed import alone_in, rank_and_world
from ..files import to_json, write_text
from ..hooks import lent, random_states_kept
from ..saving.save import copy_model, describe
from ..settings import shown
from .config import BEST, HISTORY, MINUTES, RECIPE, FitConfig
from .fit import check_same, check_unused
from .matching import check_models
from .recipe import Recipe, prefixed
from .stages import Run, read_run

JUDGED = 3  # batches by which a calibration compares start and end


def train(
        recipe: Recipe, data: Any, out: str | Path, *, teacher: nn.Module | None = None,
        student: nn.Module | None = None, minutes: float | None = None, resume: bool = False, limit: int | None = None,
        command: dict[str, Any] | None = None, device: str | torch.device = 'cpu', progress: bool = True,
        on_epoch: Callable[..., Any] | None = None,
) -> list[dict[str, Any]]:
    """Run a recipe.

    Writes to `out`: recipe.yaml; run.json, the plan; start/, the student before training; stage0/, ..., as `fit` does;
    at the end history.json and best/, the best model of the start (then with a warning) and of the stages with
    the task and the numbers of steps of the last, of which it is saved with the one nearest to the student's own.

    Args:
        data: Images and labels: a folder, an .npz, tensors or a loader, as `read_data` takes them. Labels that no stage
            learns from may be missing, or those of other classes.
        teacher: timm model; None to train without one.
        student: Model to train as it is; None to make it from the teacher or the recipe's `model`.
        minutes: Train for about so long; each stage gets a part, by its minutes, or its epochs times steps.
        resume: Continue the run in `out`.
        limit: Images of each part of the data to use, for a rehearsal.
        command: What `odevit distill --resume` is to find in run.json.
        device: For a student that is built without a teacher.
        on_epoch: As of `fit`.

    Returns:
        The records of all epochs, as returned by `fit`, each with its stage.

    Raises ValueError if recipe, models, data and folder do not fit together, and what `fit` raises.

    Examples:
        >>> recipe = Recipe.load('autonomous', ['data.batch_size=8', 'stages.0.fit.epochs=1', 'stages.1.fit.epochs=1'])
        >>> history = train(recipe, 'photos', 'run', teacher=teacher)
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"train runs a Recipe; got {recipe!r}. Give one, such as Recipe.load('three_blocks').")
    if student is not None:
        recipe = replace(recipe, ode=None)
    for model in (teacher, student):
        device = device if model is None else next(model.parameters()).device
    folder, (rank, world) = Path(out), rank_and_world()
    with alone_in(folder), random_states_kept(device), lent(teacher):
        _check_recipe(recipe, teacher, student, folder, resume)
        before = read_run(folder)
        minutes = before.get('minutes') if minutes is None else MINUTES('minutes', minutes)
        host: Any = teacher if student is None else student
        if host is None:  # one without weights has the classes of the data
            args = dict(recipe.model_args or {})
            if not args.get('pretrained') and 'num_classes' not in args:
                args['num_classes'] = classes_of(data)[1]
            torch.manual_seed(recipe.seed)  # so that a new head is the same each time
            with prefixed(f"Cannot build '{recipe.model}' with {args}: "):
                host = timm.create_model(str(recipe.model), **args).to(device)
        labels = not recipe.embeds and (recipe.learns_labels or None)  # None: they only judge, if they fit
        images = read_data(data, host, recipe.batches, labels=labels, limit=limit, seed=recipe.seed)
        names = list(images.classes) if images.classes else None
        if images.why and rank == 0:
            warnings.warn(f'Labels are not used, because {images.why}', RuntimeWarning, stacklevel=2)
        if teacher is not None and rank == 0:
            for model in (host, teacher):
                warn_of_other_classes(model, names, images.words['train'])
        about = {'limit': limit, 'minutes': minutes, 'data sha256': images.sha256(), **{
            f'{name} sha256': None if model is None else hash_of(model.state_dict().values())
            for name, model in (('teacher', teacher), ('student', student))}}
        check_same(folder, before or about, about)
        if recipe.ode is not None:
            host = copy.deepcopy(host).requires_grad_(True)
            torch.manual_seed(recipe.seed)
            convert_(host, recipe.config, keep_original=False)
        describe(host)  # fails now
        run = Run(recipe, host, teacher, images, folder, {
            **about, 'command': command or before.get('command'),
            'versions': {'timm_odevit': __version__, 'torch': torch.__version__}})
        if recipe.grad_checkpointing:
            host.set_grad_checkpointing()
        known = held_out_of(host)  # by the training that it had
        host.pretrained_cfg = host.default_cfg = {
            **_named(host, names, keep=teacher is not None),
            'notes': [f'{NOTE}{images.held_out if known is None else min(known, images.held_out):g}']}
        if world > 1:
            dist.barrier()  # all check the folder before the first process writes to it
        if rank == 0 and not (folder / RECIPE).exists():
            run.write()
            write_text(folder / RECIPE, recipe.to_yaml())

        def done(record: Any) -> None:
            write_text(folder / RECIPE, recipe.to_yaml())  # epochs may have increased on resuming
            if on_epoch is not None:
                on_epoch(record)
        if names and progress and rank == 0:
            print(f'{images.count():,} images to learn from; {len(names)} classes: {shown(names)}')
        history, best = run.train(minutes, progress and rank == 0, resume, done)
        if rank == 0:
            copy_model(best, folder / BEST)
            used = recipe.without_shares(run.own[0]) if len(run.own) == 1 else recipe
            write_text(folder / BEST / RECIPE, used.to_yaml())
            write_text(folder / HISTORY, to_json(history))
    return history


def _check_recipe(recipe: Recipe, teacher: Any, student: Any, folder: Path, resume: bool) -> None:
    if teacher is not None and student is None and (recipe.model or recipe.model_args or recipe.ode is None):
        raise ValueError('The recipe names a model, or has no ode, so the student would not be made from the teacher. '
                         'Give --student.')
    if recipe.model is None and teacher is None and student is None:
        raise ValueError('The recipe names no model, and there is no teacher. Give --teacher, or model in the recipe.')
    check_unused(folder / RECIPE, resume)
    then, now = ({'stages': len(of.stages), **_flat(yaml.safe_load(of.to_yaml()))} for of in (
        Recipe.load(folder / RECIPE) if (folder / RECIPE).exists() else recipe, recipe))
    may_change = (f'stages.{len(recipe.stages) - 1}.fit.epochs', 'fit.epochs' if len(recipe.stages) == 1 else '',
                  'fit.compile', 'data.workers')
    other = [f'{key} was {then.get(key, "unset")} and is {now.get(key, "unset")}'
             for key in dict.fromkeys((*then, *now)) if then.get(key) != now.get(key) and key not in may_change]
    if other:
        raise ValueError(f"'{folder / RECIPE}' is a different recipe: {'; '.join(other)}. Resume with that, or give "
                         'another folder.')


def _flat(tree: Any, at: str = '') -> dict[str, Any]:
    """As one dict, with keys such as stages.0.fit.lr."""
    if not isinstance(tree, (dict, list)):
        return {at: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, entry in pairs for k, v in _flat(entry, f'{at}.{key}'.lstrip('.')).items()}


def _named(model: Any, names: list[str] | None, keep: bool) -> dict[str, Any]:
    """A model's pretrained_cfg with the names of the classes, if any, unless it is to keep its own."""
    cfg: dict[str, Any] = model.pretrained_cfg
    own = cfg.get('label_names')
    if keep and (not names or (own and len(own) == model.num_classes)):
        return cfg
    stale = ('tag', 'label_names', 'label_descriptions') if own != names or not names else ()
    cfg = {**{key: value for key, value in cfg.items() if key not in stale}, 'num_classes': model.num_classes}
    if names and len(names) == model.num_classes:
        cfg['label_names'] = names
    return cfg


def calibrate_(
        model: nn.Module, teacher: nn.Module, images: Any, *, minutes: float | None = None, epochs: int | None = None,
        batch_size: int = 16, lr: float | None = None, amp: str | None = None, seed: int = 0, progress: bool = True,
) -> list[dict[str, Any]]:
    """Fit a converted model in place to the model that it was converted from, in minutes, on images without labels.

    Only the shared blocks learn, to follow the teacher's hidden states. Of the weights before and after, those are kept
    that come nearest to the teacher's outputs on a few batches, with a warning if they are the first. If it is
    interrupted or fails, the model stays as it was.

    Args:
        teacher: The model that it was converted from: a `copy.deepcopy` made before `convert_`.
        images: Images [N, C, H, W], normalised for the model; or a loader, a folder or an .npz. Labels are ignored.
        minutes: None for 5.
        epochs: Instead of minutes.
        lr: Peak learning rate (Muon). None for 1e-3 * min(1, 3 * loss), with the loss before training.
        amp: As in FitConfig.

    Returns what `train` does. Raises TypeError or ValueError if model, teacher, images and settings do not fit,
    FloatingPointError as `fit` does.

    Examples:
        >>> history = calibrate_(student, teacher, images, minutes=10)
    """
    checked = FitConfig(epochs=epochs, minutes=5. if epochs is None and minutes is None else minutes,
                        lr=1e-3 if lr is None else lr, amp=amp, seed=seed)
    check_models(model, teacher)
    data = read_data(images, model, DataConfig(batch_size=batch_size), labels=False,
                     held_out=held_out_of(model) or 0.)
    changes = [f'seed={checked.seed % 2 ** 31}', f"fit.amp={amp or 'null'}", f'stages.0.fit.lr={checked.lr!r}',
               f'stages.0.scale_lr={lr is None}']
    if epochs is not None:
        changes += ['stages.0.fit.minutes=null', f'stages.0.fit.epochs={epochs}']
    recipe = Recipe.load('calibrate', changes)
    student, device = copy.deepcopy(model), next(model.parameters()).device
    with lent(teacher), random_states_kept(device):
        random_seed(recipe.seed)
        batches = Mapped(data.train, unlabelled)
        run = Run(recipe, student, teacher, replace(data, train=batches, val=list(islice(batches, JUDGED))))
        history, state = run.train(minutes, progress)
    model.load_state_dict(state)
    return history
