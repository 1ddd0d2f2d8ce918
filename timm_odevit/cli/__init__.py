"""odevit: the command line. A command is a function; its docstring says what it does and lists its arguments.

models              models by name, and what a command writes to
train               shrink, finetune, distill, convert, calibrate
evaluate            evaluate, halt, benchmark, predict, report, export, push

This file runs first; it imports nothing of the package until a command needs it, so that help needs no torch. The
docstring of a command lists its arguments, one a line; two spaces come before the help:

name  help                    also [name] if it may be left out, name... for one or more, name* for all that follow
--name  help                  a flag
--name TYPE [default]  help   an option; TYPE! must be given, TYPE? is 'default' without a value, TYPE* may be repeated
+module.Class  title          an option for each setting of a class
--name --other                as SHARED says
"""
import argparse
import ast
import re
import runpy
import sys
import traceback
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ['COMMANDS', 'main', 'parser']

PACKAGE = Path(next(iter(find_spec('timm_odevit').submodule_search_locations)))  # type: ignore
COMMANDS = ('shrink', 'finetune', 'convert', 'calibrate', 'distill', 'evaluate', 'halt', 'predict', 'report', 'export',
            'push', 'recipe', 'benchmark', 'script')
WORDS = {
    'MODEL': "a timm name, such as deit_tiny_patch16_224; 'local-dir:FOLDER' for a saved model; or the image tower of "
             "'open_clip:NAME/TAG' or 'transformers:NAME'",
    'IMAGES': 'folder of images, or an .npz of small images; labels are ignored'}
SHARED = """
model  MODEL
images  IMAGES
data  folder with one sub-folder of images per class, or with train/ and val/ folders of that kind; or an .npz of small
    images: x_train, y_train, x_test, y_test
[out]  folder for recipe.yaml, checkpoints, best/ and history.json
--teacher MODEL  MODEL
--checkpoint FILE  file with the weights of the model (of the teacher, if there is one), instead of a download
--img-size N  image size in pixels of the model (of the teacher, if there is one; default: its own)
--steps N  number of solver steps (default: as saved)
--set KEY=VALUE*  change the recipe, such as --set ode.rank=8 --set stages.0.fit.epochs=5
--minutes M  train for about so long, with the stages' shares of time (default: the recipe's epochs)
--resume  continue the run in the folder; with nothing else given, as it was first started
--limit N  use only this many images of each part of the data, for a rehearsal
--seed N0  the seed of the training, for --held-out (default: 0)
--batch-size N [64]  images per batch
--workers N0  processes that load images (default: min(2, usable CPU cores - 1))
--quiet  show no progress bars
--device DEVICE  torch device (default: cuda if there is one, else cpu)
--threads N  CPU threads (default: torch's own choice)
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, 2 for a mistake in the input, 130 if interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    top = parser(argv[:1])
    args, unknown = top.parse_known_args(argv)
    if unknown:
        from timm_odevit.settings import suggest
        known = suggest(unknown[0].split('=')[0], args.options)
        top.error(f"unrecognized arguments: {' '.join(unknown)}. {known}See odevit {args.command} --help")
    if args.command == 'script':  # its device is its own, and so are its errors
        return script(args)
    try:
        if args.command == 'recipe':
            recipe(args)
        else:
            _prepare(args)
            getattr(import_module(f'timm_odevit.cli.{args.file}'), args.command)(args)
    except (ValueError, TypeError, AssertionError, OSError, FloatingPointError, ImportError) as e:
        if not _is_for_the_user(e):
            raise
        from timm_odevit.settings import one_line
        print(f'odevit: error: {one_line(e)}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('odevit: interrupted', file=sys.stderr)
        return 130
    return 0


def _prepare(args: argparse.Namespace) -> None:
    import torch
    if args.threads:
        torch.set_num_threads(args.threads)
    args.device = args.device or ('cuda' if torch.cuda.is_available() else 'cpu')
    try:
        torch.empty(0, device=args.device)
    except Exception as e:  # RuntimeError, AssertionError, ... by backend
        raise ValueError(f"--device '{args.device}' cannot be used here. Give another, such as cpu. ({e})") from e


def _is_for_the_user(error: Exception) -> bool:
    """Whether a `raise` or `assert` found a mistake in the input, to be told in a line.

    What Python itself raises, and a TypeError of a library, are defects of the program, and keep their traceback.
    """
    if not isinstance(error, (TypeError, ValueError, AssertionError)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).is_relative_to(PACKAGE)
    return (ours or not isinstance(error, TypeError)) and (last.line or '').startswith(('raise ', 'assert '))


def parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Build the parser of all commands, with the arguments of `commands`."""
    top = argparse.ArgumentParser(
        prog='odevit',
        description='Turn a pretrained vision transformer into one shared block that an ODE solver evaluates.',
        epilog='A complete run on images of your own, in one folder per class:\n'
               '  odevit finetune deit_tiny_patch16_224 images tuned\n'
               '  odevit distill autonomous images run --teacher local-dir:tuned/best\n'
               '  odevit evaluate local-dir:run/best images --held-out 0.1 --teacher local-dir:tuned/best\n'
               '  odevit predict local-dir:run/best photo.jpg',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    version = (PACKAGE / '_version.py').read_text().split("'")[1]
    top.add_argument('--version', action='version', version=f'odevit {version}')
    group = top.add_subparsers(title='commands', metavar='COMMAND', required=True)
    functions = {f.name: (path.stem, ast.get_docstring(f)) for path in (PACKAGE / 'cli').glob('*.py')
                 for f in ast.parse(path.read_text()).body if isinstance(f, ast.FunctionDef)}
    for name in COMMANDS:
        file, doc = functions[name]
        about, _, arguments = (doc or '').partition('\n\n')
        command = group.add_parser(name, help=about, description=about)
        if name in commands:
            for argument in _arguments(arguments if name == 'script' else f'{arguments}\n--device --threads'):
                _add(command, *argument)
        options = [text for action in command._actions for text in action.option_strings]
        command.set_defaults(command=name, file=file, options=options)
    return top


def _arguments(text: str) -> list[tuple[Any, ...]]:
    """Name, placeholder, default and help of each argument that a docstring lists."""
    arguments: list[tuple[Any, ...]] = []
    for line in re.sub('\n +', ' ', text).strip().splitlines():
        entry = re.fullmatch(r'(\S+)(?: (\S+))?(?: \[(\S+)\])?  (.*)', line)
        arguments += [entry.groups()] if entry else [
            (name, *shared[1:]) for name in line.split() for shared in _arguments(SHARED)
            if shared[0] in (name, name.strip('[]'))]
    return arguments


def _add(command: argparse.ArgumentParser, name: str, place: str | None, default: str | None, text: str) -> None:
    if name.startswith('+'):
        return _add_settings(command.add_argument_group(text), *name[1:].rsplit('.', 1))
    text = re.sub('|'.join(WORDS), lambda m: WORDS[m[0]], text).replace('%', '%%')
    options: dict[str, Any] = {'help': text if default is None else f'{text} (default: {default})', 'default': default}
    several = {'[': '?', '.': '+', '*': argparse.REMAINDER}
    if nargs := several.get(name[0]) or several.get(name[-1]):
        options['nargs'] = nargs
    if place and place.startswith('{'):
        options['choices'] = place[1:-1].split(',')
    elif place and place.endswith('*'):
        options.update(metavar=place[:-1], action='append', default=[])
    elif place:
        options.update(metavar=place.rstrip('?!0'), type=TYPES.get(place), required=place.endswith('!'))
        options.update(nargs='?', const='default') if place.endswith('?') else None
    elif name.startswith('--'):
        options.update(action='store_true', default=False)
    command.add_argument(*name.strip('[].*').split(','), **options)


def _add_settings(group: Any, module: str, name: str) -> None:
    """Add an option for each setting of a class; its help and default come from the class."""
    settings = getattr(import_module(f'timm_odevit.{module}'), name)
    about = settings.about()
    for f in fields(settings):
        text, default = about[f.name], ','.join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        if f.default is None:  # the description says what None stands for
            default = ''.join(re.findall(r'None for ([^;.]+)', text))
            text = re.sub(r'[;.] None for [^;.]+', '', text)
        text = re.sub(r'\((\d+), (\d+)\)', r'\1,\2', text.rstrip('.')).replace('%', '%%')
        flag = isinstance(f.default, bool)
        options: Any = dict(help=text, action='store_const', const=not f.default) if flag else dict(
            help=f'{text} (default: {default})', type=_value, metavar='VALUE')
        group.add_argument(f"--{f.name.replace('_', '-')}", default=argparse.SUPPRESS, **options)


def _value(text: str) -> Any:
    """A number, a word, or several numbers separated by commas; the settings check what is allowed."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ('true', 'false', 'none') else text)
    except (ValueError, SyntaxError):
        return text


def _counts(text: str) -> list[int]:
    parts = [re.fullmatch(r'([1-9]\d*)(?:-(\d+))?', part) for part in text.split(',')]
    spans = [range(int(part[1]), int(part[2] or part[1]) + 1) if part else range(0) for part in parts]
    if not all(spans):
        raise argparse.ArgumentTypeError(f"expected whole numbers of at least 1, such as 6 or 1-6,12,24; got '{text}'")
    return [count for span in spans for count in span]


def count(text: str) -> int:
    (one,) = _counts(text)  # argparse says of a ValueError: invalid count value
    return one


TYPES: dict[str, Any] = {  # by the placeholder; others are text
    'N': count, 'N0': int, 'K-K,K,...': _counts, 'N,N,...': _counts, 'M': float, 'SHARE': float}


def recipe(args: argparse.Namespace) -> None:
    """List the recipes of the package, show one, or check a file.

    action {list,show,check}  what to do
    [name]  a .yaml file, or the name of a recipe
    """
    if args.action == 'list' or args.name is None:
        for path in sorted((PACKAGE / 'training' / 'recipes').glob('*.yaml')):
            comment = ' '.join(re.findall('(?m)^# (.*)', path.read_text()))
            print(f"{path.stem:12}{comment.split('. ')[0].split(': ')[0]}")
        return
    from timm_odevit import Recipe
    loaded = Recipe.load(args.name)
    if args.action == 'show':
        return print(loaded.to_yaml(), end='')
    fits = [loaded.fit_of(stage) for stage in loaded.stages]
    counts = {'stage': len(fits), 'epoch': sum(fit.epochs or 0 for fit in fits),
              'minute': sum(fit.minutes or 0 for fit in fits)}
    words = [f"{count:g} {word}{'s' if count > 1 else ''}" for word, count in counts.items() if count]
    print(f"'{args.name}' is a valid recipe: {', '.join(words)}.")


def script(args: argparse.Namespace) -> int:
    """Run a script that uses timm, such as timm's own, with our models registered. Also runs under torchrun.

    script  a Python script, such as timm's own train.py, validate.py or inference.py
    arguments*  its arguments
    """
    path = Path(args.script)
    if not path.is_file():  # before torch is imported
        print(f"odevit: error: There is no script '{path}'. timm's are in its repository.", file=sys.stderr)
        return 2
    import_module('timm_odevit')
    sys.argv, sys.path[0] = [args.script, *args.arguments], str(path.resolve().parent)
    runpy.run_path(str(path), run_name='__main__')
    return 0
