"""odevit finetune"""
import argparse
from dataclasses import replace

import torch

from ..training.loaders import count_classes
from ..training.recipe import Recipe
from .arguments import DATA, MODEL, load, whole_number
from .running import add_run_arguments, command_of, sort_arguments, train_and_report

HELP = 'Fine-tune a model on labelled images: how a teacher is made. Also runs under torchrun.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', nargs='?', help=MODEL)
    parser.add_argument('data', nargs='?', help=DATA)
    parser.add_argument('out', nargs='?', help='folder for recipe.yaml, checkpoints, best/ and history.json')
    parser.add_argument('--recipe', help='a .yaml file, or the name of a recipe (default: finetune)')
    parser.add_argument('--img-size', type=whole_number(1), metavar='N',
                        help="image size in pixels (default: the model's own)")
    parser.add_argument('--checkpoint', metavar='FILE',
                        help='file with the weights of the model, instead of a download')
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    given = args.recipe
    recipe = sort_arguments(args, 'model', 'data', 'out')
    if recipe is not None and given:
        raise ValueError(f'The run has a recipe of its own, so --recipe {given} has no effect. Leave it out.')
    command = command_of(args, 'model', 'data', 'recipe', 'img_size', 'checkpoint', 'limit')
    recipe = recipe or Recipe.load(args.recipe or 'finetune', args.set)
    if recipe.ode is not None or any(stage.task != 'labels' for stage in recipe.stages):
        raise ValueError('odevit finetune trains on labels, so the recipe must leave out ode, and task must be labels '
                         'in all stages. For another recipe: odevit distill')
    options = {**(recipe.model_args or {}), 'num_classes': count_classes(args.data), 'img_size': args.img_size}
    options = {key: value for key, value in options.items() if value is not None}
    recipe = replace(recipe, model=command['model'], model_args=options)
    torch.manual_seed(recipe.seed)  # a new head is the same each time
    train_and_report(recipe, args, command, student=load(args.model, args, checkpoint=args.checkpoint, **options))
