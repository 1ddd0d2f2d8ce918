"""odevit distill"""
import argparse
from dataclasses import replace

import torch

from ..training.recipe import Recipe, builtin_recipes
from .arguments import DATA, MODEL, check_name, load
from .running import add_run_arguments, command_of, sort_arguments, train_and_report

HELP = 'Train by a recipe: distil a teacher or, without one, train from scratch. Also runs under torchrun.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', nargs='?', help=f"a .yaml file, or one of: {', '.join(builtin_recipes())}")
    parser.add_argument('data', nargs='?', help=DATA)
    parser.add_argument('out', nargs='?', help='folder for recipe.yaml, checkpoints, best/ and history.json')
    parser.add_argument('--teacher', metavar='MODEL', help=MODEL)
    parser.add_argument('--student', metavar='MODEL',
                        help="'local-dir:FOLDER' of a model to start from, instead of a new one")
    parser.add_argument('--checkpoint', metavar='FILE', help="weights of the recipe's model")
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    recipe = sort_arguments(args, 'recipe', 'data', 'out')
    command = command_of(args, 'recipe', 'data', 'teacher', 'student', 'checkpoint', 'limit')
    for change in args.set if args.student else []:
        if change.partition('=')[0].split('.')[0].strip() in ('ode', 'model', 'model_args'):
            raise ValueError(f"'{change}' says how to make a student, but --student gives one. Leave one of them out.")
    recipe = recipe or Recipe.load(args.recipe, args.set)
    if args.student:
        recipe = replace(recipe, ode=None, model=None, model_args=None)
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
    train_and_report(recipe, args, command, teacher, student)
