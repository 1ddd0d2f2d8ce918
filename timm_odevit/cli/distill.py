"""odevit distill"""
import argparse
from dataclasses import replace
from pathlib import Path

import torch
from timm.utils import init_distributed_device

from ..training.recipe import Recipe, builtin_recipes
from ..training.resume import BEST
from ..training.run_recipe import train
from .arguments import DATA, MODEL, check_name, load, quiet, refuse_existing, whole_number

HELP = ('Train by a recipe: distil a teacher or, without one, train from scratch or fine-tune. Also runs under '
        'torchrun.')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help=f"a .yaml file, or one of: {', '.join(builtin_recipes())}")
    parser.add_argument('data', help=DATA + '; or an .npz of small images: x_train, y_train, x_test, y_test')
    parser.add_argument('out', help='folder for recipe.yaml, checkpoints, best/ and history.json')
    parser.add_argument('--teacher', help=MODEL)
    parser.add_argument('--student', help="'local-dir:FOLDER' of a model to start from, instead of a new one")
    parser.add_argument('--checkpoint', help="weights of the recipe's model, to fine-tune it")
    parser.add_argument('--set', metavar='KEY=VALUE', action='append', default=[],
                        help='change the recipe, such as --set ode.rank=8 --set stages.0.fit.epochs=5')
    parser.add_argument('--resume', action='store_true', help='continue the run in the folder')
    parser.add_argument('--limit', type=whole_number(1), help='use only this many images of an .npz, for a rehearsal')
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    for change in args.set if args.student else []:
        if change.partition('=')[0].split('.')[0].strip() in ('ode', 'model', 'model_args'):
            raise ValueError(f"'{change}' says how to make a student, but --student gives one. Leave one of them out.")
    recipe = Recipe.load(args.recipe, args.set)
    if args.student:
        recipe = replace(recipe, ode=None, model=None, model_args=None)
    if not args.resume:
        refuse_existing(args.out, '--resume')
    init_distributed_device(args)  # under torchrun; sets args.device, distributed and rank
    student = load(args.student, args) if args.student else None
    teacher = load(args.teacher, args) if args.teacher else None
    if teacher is None and student is None and recipe.model:
        check_name(recipe.model)
    if args.checkpoint is not None:
        if recipe.model is None:
            raise ValueError('--checkpoint is for a recipe that names a model, without --student. Leave it out.')
        if recipe.ode is not None:
            raise ValueError('--checkpoint is for a model that is not converted. To convert one: odevit convert '
                             f'MODEL OUT --checkpoint {args.checkpoint}, then distill with --student local-dir:OUT.')
        torch.manual_seed(recipe.seed)  # a new head is the same each time
        student = load(recipe.model, args, checkpoint=args.checkpoint, **(recipe.model_args or {}))
    try:
        train(recipe, args.data, args.out, teacher=teacher, student=student, resume=args.resume, limit=args.limit,
              device=args.device, progress=not args.quiet)
        if args.distributed:
            torch.distributed.barrier()  # some versions of gloo wait forever if a process leaves first
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()
    if args.rank > 0:
        return
    best = Path(args.out) / BEST
    print(f"saved {best}: timm.create_model('local-dir:{best}', pretrained=True)")
    if not Path(args.data).is_file():
        held_out = recipe.batches.held_out
        with_teacher = f' --teacher {args.teacher}' if args.teacher else ''
        print('To evaluate it on the images that were held out:\n'
              f'  odevit evaluate local-dir:{best} {args.data}{with_teacher} --held-out {held_out} '
              f'--seed {recipe.seed}')
