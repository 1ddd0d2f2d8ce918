"""What the commands that run recipes share."""
import argparse
import json
from pathlib import Path
from shlex import quote
from typing import Any, Dict, Optional

import torch
from timm.utils import init_distributed_device
from torch import nn

from ..data.folders import folder_parts
from ..training.recipe import Recipe
from ..training.resume import BEST, RECIPE, RUN
from ..training.run_recipe import train
from .arguments import quiet, refuse_existing, whole_number

__all__ = ['add_run_arguments', 'command_of', 'sort_arguments', 'train_and_report']


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--set', metavar='KEY=VALUE', action='append', default=[],
                        help='change the recipe, such as --set ode.rank=8 --set stages.0.fit.epochs=5')
    parser.add_argument('--resume', nargs='?', const=True, metavar='FOLDER',
                        help='continue the run in the folder; with the folder and nothing else, as it was started')
    parser.add_argument('--limit', type=whole_number(1), metavar='N',
                        help='use only this many images of an .npz, for a rehearsal')
    quiet(parser)


def sort_arguments(args: argparse.Namespace, *names: str) -> Optional[Recipe]:
    """Fill in the arguments of a run, and join its processes; returns the recipe if only its folder was given.

    Args:
        args: The arguments; those in `names` may be None. Those of a run that is resumed are filled in.
        names: The positional arguments, in order; the last is the folder to write to.

    Raises:
        ValueError: An argument is missing, or the folder holds another run, or none.
    """
    words = [word for name in names if (word := getattr(args, name)) is not None]
    if isinstance(args.resume, str):
        last = len(words) + 1 == len(names) and Path(args.resume, RUN).is_file()  # 'RECIPE DATA --resume OUT'
        words = [*words, args.resume] if last or not words else [args.resume, *words]
    recipe = None
    if args.resume and len(words) == 1:
        folder = Path(words[0])
        if not (folder / RECIPE).is_file() or not (folder / RUN).is_file():
            raise ValueError(f"There is no run to continue in '{folder}': it has no {RECIPE}.")
        recipe = Recipe.load(folder / RECIPE, args.set)
        command: Dict[str, Any] = json.loads((folder / RUN).read_text()).get('command') or {}
        if not command:
            raise ValueError(f"'{folder / RUN}' does not say how the run was started. Give the whole command, with "
                             '--resume at its end.')
        if (made := command.pop('command', args.command)) != args.command:
            raise ValueError(f"'{folder}' is not a run of odevit {args.command}. Type: odevit {made} --resume {folder}")
        for name, value in command.items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)
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


def command_of(args: argparse.Namespace, *names: str) -> Dict[str, Any]:
    """The arguments that a resumed run needs, with paths that are valid everywhere."""
    return {'command': args.command, **{name: _absolute(name, getattr(args, name)) for name in names}}


def _absolute(name: str, value: Any) -> Any:
    if isinstance(value, str) and value.startswith('local-dir:'):
        return f"local-dir:{Path(value.removeprefix('local-dir:')).absolute()}"
    is_path = name in ('data', 'checkpoint', 'recipe') and isinstance(value, str) and Path(value).exists()
    return str(Path(value).absolute()) if is_path else value


def train_and_report(
        recipe: Recipe,
        args: argparse.Namespace,
        command: Dict[str, Any],
        teacher: Optional[nn.Module] = None,
        student: Optional[nn.Module] = None,
) -> None:
    """Train, and say where the result is and how to evaluate it."""
    try:
        train(recipe, args.data, args.out, teacher=teacher, student=student, resume=bool(args.resume), limit=args.limit,
              command=command, device=args.device, progress=not args.quiet)
        if args.distributed:
            torch.distributed.barrier()  # some versions of gloo wait forever if a process leaves first
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()
    if args.rank > 0:
        return
    best = Path(args.out) / BEST
    print(f"saved {best}: timm.create_model('local-dir:{best}', pretrained=True)")
    named, held_out = getattr(args, 'teacher', None), f' --held-out {recipe.batches.held_out:g} --seed {recipe.seed}'
    if Path(args.data).is_file():
        held_out = f' --held-out {recipe.batches.held_out:g}'
    elif 'val' in folder_parts(args.data):
        held_out = ''
    print('To evaluate it on the images that were held out:\n'
          f"  odevit evaluate {quote(f'local-dir:{best}')} {quote(args.data)}"
          f"{f' --teacher {quote(named)}' if named else ''}{held_out}")
