"""odevit recipe"""
import argparse

from ..training.recipe import FOLDER, Recipe, builtin_recipes

HELP = 'List the recipes of the package, show one, or check a file.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('action', choices=('list', 'show', 'check'), help='what to do')
    parser.add_argument('name', nargs='?', help='a .yaml file, or the name of a recipe')


def run(args: argparse.Namespace) -> None:
    if (args.name is None) != (args.action == 'list'):
        raise ValueError('Expected: odevit recipe list, odevit recipe show NAME, or odevit recipe check FILE.')
    if args.action == 'list':
        for name in builtin_recipes():
            print(f'{name:12}{_summary(name)}')
        return
    recipe = Recipe.load(args.name)
    if args.action == 'show':
        print(recipe.to_yaml(), end='')
        return
    epochs = [recipe.fit_of(stage).epochs for stage in recipe.stages]
    print(f"'{args.name}' is a valid recipe: {len(epochs)} stage{'s' if len(epochs) > 1 else ''}, "
          f"{sum(epochs)} epoch{'s' if sum(epochs) > 1 else ''}.")


def _summary(name: str) -> str:
    """The first sentence of the comment at the top of a recipe of the package."""
    lines = (FOLDER / f'{name}.yaml').read_text().splitlines()
    return ' '.join(line.removeprefix('# ') for line in lines if line.startswith('# ')).split('. ')[0].split(': ')[0]
