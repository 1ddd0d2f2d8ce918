"""odevit ablate"""
import argparse
from pathlib import Path

from ..training.ablate import TABLE, ablate, load_recipes
from .arguments import MODEL, load, quiet, whole_number

HELP = 'Train several recipes with several seeds, and print one table.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipes', nargs='+', help='recipes, or files with variants of one (such as hub/ablation.yaml)')
    parser.add_argument('data', help='as for distill')
    parser.add_argument('out', help='folder for the runs and table.md; finished runs in it are not repeated')
    parser.add_argument('--teacher', metavar='MODEL', help=MODEL)
    parser.add_argument('--seeds', type=whole_number(1), metavar='N', default=3,
                        help='number of seeds (default: %(default)s)')
    parser.add_argument('--set', metavar='KEY=VALUE', action='append', default=[], help='change all recipes')
    parser.add_argument('--limit', type=whole_number(1), metavar='N', help='use only this many images of an .npz')
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    recipes = load_recipes(args.recipes, args.set)
    teacher = load(args.teacher, args) if args.teacher else None
    ablate(recipes, args.data, args.out, teacher=teacher, seeds=args.seeds, limit=args.limit, device=args.device,
           progress=not args.quiet)
    print((Path(args.out) / TABLE).read_text())
