"""odevit finetune, distill and recipe"""
import argparse
import json
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from timm.utils import init_distributed_device
from torch import nn

from ..data.folders import folder_parts
from ..training.loaders import count_classes
from ..training.recipe import FOLDER, Recipe, builtin_recipes
from ..training.resume import BEST, RECIPE, RUN
from ..training.run import train
from .arguments import DATA, MODEL, add_number, add_quiet, add_weights, check_name, load, load_as_saved, refuse_existing


def add_finetune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', nargs='?', help=MODEL)
    _add_run(parser)
    parser.add_argument('--recipe', help='a .yaml file, or the name of a recipe (default: finetune)')
    add_weights(parser, 'the model')


def finetune(args: argparse.Namespace) -> None:
    """Fine-tune a model on labelled images, to make a teacher. Also runs under torchrun."""
    given = args.recipe
    recipe = _start_or_resume(args, 'model', 'data', 'out')
    if recipe is not None and given:
        raise ValueError(f'The run has a recipe of its own, so --recipe {given} has no effect. Leave it out.')
    command = _to_resume(args, 'model', 'data', 'recipe', 'img_size', 'checkpoint', 'limit')
    for change in args.set:
        if change.partition('=')[0].strip() in ('model', 'model_args.num_classes'):
            raise ValueError(f"'{change}' has no effect: the model is the first argument, its classes are those of the "
                             'data. Leave it out.')
    recipe = recipe or Recipe.load(args.recipe or 'finetune', args.set)
    if recipe.ode is not None or any(stage.task != 'labels' for stage in recipe.stages):
        raise ValueError('odevit finetune trains on labels alone: the recipe must not have ode, and every stage must '
                         'have task: labels. To run any other recipe, use odevit distill')
    options = {**(recipe.model_args or {}), 'num_classes': count_classes(args.data)}
    if args.img_size is not None:
        options['img_size'] = args.img_size
    recipe = replace(recipe, model=command['model'], model_args=options)
    torch.manual_seed(recipe.seed)  # a new head is the same each time
    _train(recipe, args, command, student=load(args.model, args, **options))


def add_distill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', nargs='?', help=f"a .yaml file, or one of: {', '.join(builtin_recipes())}")
    _add_run(parser)
    parser.add_argument('--teacher', metavar='MODEL', help=MODEL)
    add_weights(parser, 'the teacher')
    parser.add_argument('--student', metavar='MODEL',
                        help="'local-dir:FOLDER' of a model to start from, instead of a new one")


def distill(args: argparse.Namespace) -> None:
    """Train by a recipe: distil a teacher or, without one, train from scratch. Also runs under torchrun."""
    recipe = _start_or_resume(args, 'recipe', 'data', 'out')
    command = _to_resume(args, 'recipe', 'data', 'teacher', 'img_size', 'checkpoint', 'student', 'limit')
    if not args.teacher and (args.img_size or args.checkpoint):
        raise ValueError('--img-size and --checkpoint are those of the teacher. Give --teacher, or leave them out.')
    for change in args.set if args.student else []:
        if change.partition('=')[0].split('.')[0].strip() in ('ode', 'model', 'model_args'):
            raise ValueError(f"'{change}' says how to make a student, but --student gives one. Leave one of them out.")
    recipe = recipe or Recipe.load(args.recipe, args.set)
    if args.student:
        recipe = replace(recipe, ode=None, model=None, model_args=None)
    student = load_as_saved(args.student, args) if args.student else None
    teacher = load(args.teacher, args) if args.teacher else None
    if teacher is None and student is None and recipe.model:
        check_name(recipe.model)
    _train(recipe, args, command, teacher, student)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('action', choices=('list', 'show', 'check'), help='what to do')
    parser.add_argument('name', nargs='?', help='a .yaml file, or the name of a recipe')


def recipe(args: argparse.Namespace) -> None:
    """List the recipes of the package, show one, or check a file."""
    if (args.name is None) != (args.action == 'list'):
        raise ValueError('Expected: odevit recipe list, odevit recipe show NAME, or odevit recipe check FILE.')
    if args.action == 'list':
        for name in builtin_recipes():
            print(f'{name:12}{_summary(name)}')
        return
    found = Recipe.load(args.name)
    if args.action == 'show':
        print(found.to_yaml(), end='')
        return
    epochs = [found.fit_of(stage).epochs for stage in found.stages]
    print(f"'{args.name}' is a valid recipe: {len(epochs)} stage{'s' if len(epochs) > 1 else ''}, "
          f"{sum(epochs)} epoch{'s' if sum(epochs) > 1 else ''}.")


def _summary(name: str) -> str:
    """The first sentence of the comment at the top of a recipe of the package."""
    lines = (FOLDER / f'{name}.yaml').read_text().splitlines()
    return ' '.join(line.removeprefix('# ') for line in lines if line.startswith('# ')).split('. ')[0].split(': ')[0]


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('data', nargs='?', help=DATA)
    parser.add_argument('out', nargs='?', help='folder for recipe.yaml, checkpoints, best/ and history.json')
    parser.add_argument('--set', metavar='KEY=VALUE', action='append', default=[],
                        help='change the recipe, such as --set ode.rank=8 --set stages.0.fit.epochs=5')
    parser.add_argument('--minutes', type=float, metavar='M',
                        help="train for about so long, with the stages' shares of time (default: the recipe's epochs)")
    parser.add_argument('--resume', action='store_true',
                        help='continue the run in the folder; with nothing else given, as it was first started')
    add_number(parser, '--limit', 'use only this many images of each part of the data, for a rehearsal')
    add_quiet(parser)


def _start_or_resume(args: argparse.Namespace, *names: str) -> Recipe | None:
    """Fill in the positional arguments `names`, and join the processes.

    Returns:
        The recipe of the run, if only its folder was given.
    """
    words = [word for name in names if (word := getattr(args, name)) is not None]
    recipe = None
    if args.resume and len(words) == 1:
        setattr(args, names[0], None)
        recipe = _read_run(args, Path(words[0]))
        words = [*(getattr(args, name) for name in names[:-1]), words[0]]
    if len(words) != len(names):
        raise ValueError(f"Expected {' '.join(name.upper() for name in names)}, or only --resume FOLDER; got "
                         f"{' '.join(words) or 'nothing'}.")
    for name, word in zip(names, words, strict=True):
        setattr(args, name, word)
    if not args.resume:
        refuse_existing(args.out, '--resume')
    init_distributed_device(args)  # under torchrun; sets args.device, distributed and rank
    return recipe


def _read_run(args: argparse.Namespace, folder: Path) -> Recipe:
    """The recipe of a run; those of its arguments that are not given are filled in."""
    if not (folder / RECIPE).is_file() or not (folder / RUN).is_file():
        raise ValueError(f"There is no run to continue in '{folder}': it has no {RECIPE}.")
    recipe = Recipe.load(folder / RECIPE, args.set)
    try:
        command: dict[str, Any] = dict(json.loads((folder / RUN).read_text())['command'] or {})
    except (KeyError, TypeError, ValueError):
        command = {}
    if not command:
        raise ValueError(f"'{folder / RUN}' does not say how the run was started. Give the whole command, with "
                         '--resume at its end.')
    if (name := command.pop('command', args.command)) != args.command:
        raise ValueError(f"'{folder}' is not a run of odevit {args.command}. Type: odevit {name} --resume {folder}")
    for name, value in command.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return recipe


def _to_resume(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The arguments that a resumed run needs, with paths that are valid everywhere."""
    return {'command': args.command, **{name: _absolute(name, getattr(args, name)) for name in names}}


def _absolute(name: str, value: Any) -> Any:
    if isinstance(value, str) and value.startswith('local-dir:'):
        return f"local-dir:{Path(value.removeprefix('local-dir:')).absolute()}"
    is_path = name in ('data', 'checkpoint', 'recipe') and isinstance(value, str) and Path(value).exists()
    return str(Path(value).absolute()) if is_path else value


def _train(
        recipe: Recipe,
        args: argparse.Namespace,
        command: dict[str, Any],
        teacher: nn.Module | None = None,
        student: nn.Module | None = None,
) -> None:
    """Train, and say where the result is and how to evaluate it."""
    try:
        train(recipe, args.data, args.out, teacher=teacher, student=student, minutes=args.minutes, resume=args.resume,
              limit=args.limit, command=command, device=args.device, progress=not args.quiet)
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
