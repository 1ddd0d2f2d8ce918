"""odevit shrink, finetune and distill"""
import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import torch
from timm.utils import init_distributed_device

from timm_odevit import Recipe, train
from timm_odevit import shrink as run_shrink

from ..data.folders import folder_parts
from ..data.read import classes_of
from ..training.config import BEST, RECIPE, RUN
from ..training.stages import read_run
from .models import TOWERS, load, refuse_existing


def shrink(args: Any) -> None:
    """Make a small student of a model, and say whether it is worth it.

    model
    images  IMAGES unless they are the classes of the model
    out  folder for the student, the files that were compared, and the verdict
    --size SIZE  size of the student, such as 25%, 3M parameters or 4MB (default: one that suits the images and minutes)
    --keep PART  instead of --size: find the smallest student that keeps this share of the accuracy, such as 95%
    --minutes M [60]  minutes to spend
    --checkpoint --img-size
    --embedding  treat the model's outputs as embeddings, not logits; always on for image towers
    --resume  continue the run in the folder
    --quiet
    """
    if not args.resume:
        refuse_existing(args.out, '--resume')
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    model = load(args.model, args)
    try:
        verdict = run_shrink(
            model, args.images, args.out, size=args.size, keep=args.keep, minutes=args.minutes, resume=args.resume,
            embedding=args.embedding or args.model.startswith(TOWERS), progress=not args.quiet)
    except KeyboardInterrupt:
        if (best := Path(args.out, 'student', BEST)).exists():
            print(f'\nThe best student so far is in {best}. To continue: the same command with --resume')
        raise
    print(f'\n{verdict}')


def finetune(args: Any) -> None:
    """Fine-tune a model on labelled images, to make a teacher. Also runs under torchrun.

    [model] [data] [out]
    --recipe RECIPE  a .yaml file, or the name of a recipe (default: finetune)
    --set --minutes --resume --limit --checkpoint --img-size --quiet
    """
    asked = args.recipe
    recipe = _start(args, 'model', 'data', 'out')
    if recipe is not None and asked:
        raise ValueError(f'The run has a recipe of its own, so --recipe {asked} has no effect. Leave it out.')
    for change in args.set:
        if change.partition('=')[0].strip() in ('model', 'model_args.num_classes'):
            raise ValueError(f"'{change}' has no effect: the model is the first argument, its classes are those of the "
                             'data. Leave it out.')
    recipe = recipe or Recipe.load(args.recipe or 'finetune', args.set)
    if recipe.ode is not None or any(stage.task != 'labels' for stage in recipe.stages):
        raise ValueError('odevit finetune trains on labels alone: the recipe must not have ode, and every stage must '
                         'have task: labels. To run any other recipe, use odevit distill')
    options = {**(recipe.model_args or {}), 'num_classes': classes_of(args.data)[1]}
    if args.img_size is not None:
        options['img_size'] = args.img_size
    recipe = replace(recipe, model=args.started['model'], model_args=options)
    torch.manual_seed(recipe.seed)  # a new head is the same each time
    _train(recipe, args, student=load(args.model, args, **options))


def distill(args: Any) -> None:
    """Train by a recipe: distil a teacher or, without one, train from scratch. Also runs under torchrun.

    [recipe]  a .yaml file, or a name from odevit recipe list
    [data] [out] --teacher
    --student MODEL  'local-dir:FOLDER' of a model to start from, instead of a new one
    --set --minutes --resume --limit --checkpoint --img-size --quiet
    """
    recipe = _start(args, 'recipe', 'data', 'out')
    if not args.teacher and (args.img_size or args.checkpoint):
        raise ValueError('--img-size and --checkpoint are those of the teacher. Give --teacher, or leave them out.')
    for change in args.set if args.student else []:
        if change.partition('=')[0].split('.')[0].strip() in ('ode', 'model', 'model_args'):
            raise ValueError(f"'{change}' says how to make a student, but --student gives one. Leave one of them out.")
    recipe = recipe or Recipe.load(args.recipe, args.set)
    if args.student:
        recipe = replace(recipe, ode=None, model=None, model_args=None)
    student = load(args.student, SimpleNamespace(device=args.device)) if args.student else None
    teacher = load(args.teacher, args) if args.teacher else None
    _train(recipe, args, teacher, student)


def _start(args: Any, *names: str) -> Recipe | None:
    """Fill in the arguments of a run if only its folder was given, note in `args.started` what resuming needs, and join
    the processes.

    Returns:
        The recipe of the run if only its folder was given.
    """
    words = [word for name in names if (word := getattr(args, name)) is not None]
    recipe = None
    if args.resume and len(words) == 1:
        setattr(args, names[0], None)
        args.out = words[0]
        recipe = _read_run(args, Path(args.out))
    if any(getattr(args, name) is None for name in names):
        raise ValueError(f"Expected {' '.join(names).upper()}, or only --resume FOLDER; got "
                         f"{' '.join(words) or 'nothing'}.")
    if not args.resume:
        refuse_existing(args.out, '--resume')
    needed = ('model', 'recipe', 'data', 'teacher', 'student', 'img_size', 'checkpoint', 'limit')
    args.started = {'command': args.command, **{n: _absolute(n, getattr(args, n)) for n in needed if n in args}}
    init_distributed_device(args)  # under torchrun; sets args.device, distributed and rank
    return recipe


def _read_run(args: Any, folder: Path) -> Recipe:
    """The recipe of a run; those of its arguments that are not given are filled in."""
    if not (folder / RECIPE).is_file() or not (folder / RUN).is_file():
        raise ValueError(f"There is no run to continue in '{folder}': it has no {RECIPE}.")
    recipe = Recipe.load(folder / RECIPE, args.set)
    started = read_run(folder).get('command')
    if not isinstance(started, dict) or not started:
        raise ValueError(f"'{folder / RUN}' does not say how the run was started. Give the whole command, with "
                         '--resume at its end.')
    command = started.pop('command', args.command)
    if command != args.command:
        raise ValueError(f"'{folder}' is not a run of odevit {args.command}. Type: odevit {command} --resume {folder}")
    for name, value in started.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return recipe


def _absolute(name: str, value: Any) -> Any:
    """An argument in which a path is valid everywhere."""
    if isinstance(value, str) and value.startswith('local-dir:'):
        return f"local-dir:{Path(value.removeprefix('local-dir:')).absolute()}"
    is_path = name in ('data', 'checkpoint', 'recipe') and value and Path(value).exists()
    return str(Path(value).absolute()) if is_path else value


def _train(recipe: Recipe, args: Any, teacher: Any = None, student: Any = None) -> None:
    """Train, and say where the result is and how to evaluate it."""
    try:
        train(recipe, args.data, args.out, teacher=teacher, student=student, minutes=args.minutes, resume=args.resume,
              limit=args.limit, command=args.started, device=args.device, progress=not args.quiet)
        if args.distributed:
            torch.distributed.barrier()  # some versions of gloo wait forever if a process leaves first
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()
    if args.rank > 0:
        return
    best = Path(args.out) / BEST
    print(f"saved {best}: timm.create_model('local-dir:{best}', pretrained=True)")
    named = None if args.img_size or args.checkpoint else getattr(args, 'teacher', None)  # evaluate builds it by name
    held_out = f' --held-out {recipe.batches.held_out:g}'
    if not Path(args.data).is_file():
        held_out = '' if 'val' in folder_parts(args.data) else f'{held_out} --seed {recipe.seed}'
    print('To evaluate it on the images that were held out:\n'
          f"  odevit evaluate {quote(f'local-dir:{best}')} {quote(args.data)}"
          f"{f' --teacher {quote(named)}' if named else ''}{held_out}{' --embedding' if recipe.embeds else ''}")
