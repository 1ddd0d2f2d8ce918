"""odevit: the command line. A command is a function; its docstring says what it does and lists its arguments.

This file runs first, without torch, so that help is quick.

name  help                    also [name] if it may be left out, name... for one or more, name* for all that follow
--name  help                  a flag
--name TYPE [default]  help   an option; TYPE! must be given, TYPE? is 'default' without a value, TYPE* may be repeated
+module.Class  title          an option for each setting of a class
--name --other                as SHARED says
"""
import argparse
import ast
import logging
import os
import re
import runpy
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
COMMANDS = ('shrink', 'finetune', 'convert', 'calibrate', 'distill', 'evaluate', 'halt', 'predict', 'export',
            'push', 'recipe', 'benchmark', 'script')
SHARED = """
model  a timm name; 'local-dir:FOLDER' of a saved model; or an image tower: 'open_clip:NAME/TAG' or 'transformers:NAME'
images  folder of images, or an .npz of small ones; labels are ignored
data  folder with one sub-folder of images per class, or train/ and val/ of that kind; or an .npz of small images
[out]  folder for recipe.yaml, checkpoints, best/ and history.json
--teacher MODEL  a timm name, or 'local-dir:FOLDER' of a saved model
--checkpoint FILE  file with the weights of the teacher or, without one, of the model
--img-size N  image size in pixels of the teacher or, without one, of the model (default: its own)
--steps N  number of solver steps (default: as saved)
--set KEY=VALUE*  change the recipe, such as --set data.batch_size=32 --set stages.0.fit.epochs=5
--minutes M  train for about so long (default: the recipe's epochs)
--resume  continue the run in the folder; of the rest, only --device and --threads need be given again
--limit N  use only this many images of each part of the data
--batch-size N [64]  images per batch
--workers N0  processes that load images (default: min(2, usable CPU cores - 1))
--quiet  show no progress bars
--device DEVICE  torch device (default: cuda if there is one, else cpu)
--threads N  CPU threads (default: torch's own choice)
"""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a mistake in the input, 130 if interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    getattr(sys.stdout, 'reconfigure', dict)(errors='replace')
    top = parser(argv[:1])
    args, unknown = top.parse_known_args(argv)
    for word in args.words:  # argparse leaves some empty after an option
        if getattr(args, word) is None and unknown and not unknown[0].startswith('-'):
            setattr(args, word, unknown.pop(0))
    if unknown:
        from timm_odevit.settings import suggest
        known = suggest(unknown[0].split('=')[0], args.options)
        if not known and 'set' in args and unknown[0].startswith('--'):
            known = 'A setting of the recipe? Type it as in --set data.batch_size=32. '
        top.error(f"unrecognized arguments: {' '.join(unknown)}. {known}See odevit {args.command} --help")
    if args.command == 'script':  # its device is its own, and so are its errors
        return script(args)
    try:
        if args.command == 'recipe':
            recipe(args)
        else:
            _set_device(args)
            getattr(import_module(f'timm_odevit.cli.{args.file}'), args.command)(args)
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (ValueError, TypeError, AssertionError, OSError, FloatingPointError, ImportError) as e:
        if not _is_for_the_user(e):
            raise
        from timm_odevit.settings import one_line
        print(f'odevit: error: {one_line(e)}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        more = '. To continue, repeat the command with --resume.' * hasattr(args, 'resume')
        print(f'odevit: interrupted{more}', file=sys.stderr)
        return 130
    return 0


def _set_device(args: argparse.Namespace) -> None:
    warnings.formatwarning = lambda message, *_: f'odevit: warning: {message}\n'  # type: ignore[assignment]
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # torch's profiler reads it when it first starts, and is noisy
    logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)  # it warns of CUDA that is not there
    import torch
    if args.threads:
        torch.set_num_threads(args.threads)
    args.device = args.device or ('cuda' if torch.cuda.is_available() else 'cpu')
    try:
        torch.empty(0, device=args.device)
    except Exception as e:  # which one depends on the backend
        raise ValueError(f"--device '{args.device}' cannot be used here: {e}") from e


def _is_for_the_user(error: Exception) -> bool:
    """Whether a `raise` or `assert` found a mistake in the input. All else is a defect, and keeps its traceback."""
    if not isinstance(error, (TypeError, ValueError, AssertionError)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    from_library = not Path(last.filename).is_relative_to(PACKAGE)
    return (last.line or '').startswith(('raise ', 'assert ')) and not (from_library and isinstance(error, TypeError))


def parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog='odevit',
        description='Turn a pretrained vision transformer into a few shared blocks that an ODE solver evaluates.',
        epilog='To begin: odevit shrink deit_tiny_patch16_224 images small --minutes 140')
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
            for argument in _arguments(arguments + '\n--device --threads' * (name not in ('script', 'recipe'))):
                _add(command, *argument)
        options = [text for action in command._actions for text in action.option_strings]
        words = [action.dest for action in command._actions if action.nargs == '?' and not action.option_strings]
        command.set_defaults(command=name, file=file, options=options, words=words)
    return top


def _arguments(text: str) -> Iterator[tuple[Any, ...]]:
    """Name, placeholder, default and help of each argument that a docstring lists."""
    for line in re.sub('\n +', ' ', text).strip().splitlines():
        if entry := re.fullmatch(r'(\S+)(?: (\S+))?(?: \[(\S+)\])?  (.*)', line):
            yield entry.groups()
        else:
            shared = {name.strip('[]'): rest for name, *rest in _arguments(SHARED)}
            yield from ((name, *shared[name.strip('[]')]) for name in line.split())


def _add(command: argparse.ArgumentParser, name: str, place: str | None, default: str | None, text: str) -> None:
    if name.startswith('+'):  # the settings of a class, as its docstring describes them
        module, cls = name[1:].rsplit('.', 1)
        settings, group = getattr(import_module(f'timm_odevit.{module}'), cls), command.add_argument_group(text)
        for f in fields(settings):
            about = settings.about()[f.name].replace('%', '%%')
            if f.default is not None:
                about += f' (default: {f.default})'
            group.add_argument(f"--{f.name.replace('_', '-')}", type=_value, metavar='VALUE', help=about,
                               default=argparse.SUPPRESS)
        return
    text = text.replace('%', '%%')
    options: dict[str, Any] = {'help': text if default is None else f'{text} (default: {default})', 'default': default}
    several = {'[': '?', '.': '+', '*': argparse.REMAINDER}
    if nargs := several.get(name[0]) or several.get(name[-1]):
        options['nargs'] = nargs
    if place and place.startswith('{'):
        options['choices'] = place[1:-1].split(',')
    elif place:
        options.update(metavar=place.rstrip('?!*0'), type=TYPES.get(place), required=place.endswith('!'))
        how: dict[str, Any] = {'*': dict(action='append', default=[]), '?': dict(nargs='?', const='default')}
        options.update(how.get(place[-1], {}))
    elif name.startswith('--'):
        options.update(action='store_true', default=False)
    command.add_argument(*name.strip('[].*').split(','), **options)


def _value(text: str) -> Any:
    """A number, a word, or several numbers separated by commas."""
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
    """List the recipes of the package, or show one, or what a file says if it is valid.

    action {list,show}  what to do
    [name]  a .yaml file, or the name of a recipe
    """
    if args.action == 'list' or args.name is None:
        for path in sorted((PACKAGE / 'training' / 'recipes').glob('*.yaml')):
            comment = ' '.join(re.findall('(?m)^# (.*)', path.read_text()))
            print(f"{path.stem:13}{comment.split('. ')[0].split(': ')[0]}")
        return
    from timm_odevit import Recipe
    print(Recipe.load(args.name).to_yaml(), end='')


def script(args: argparse.Namespace) -> int:
    """Run a script that uses timm, such as timm's own, with our models registered. Also runs under torchrun.

    script  such as train.py, validate.py or inference.py of timm's repository
    arguments*  its arguments
    """
    if not Path(args.script).is_file():
        print(f"odevit: error: There is no script '{args.script}'.", file=sys.stderr)
        return 2
    import_module('timm_odevit')
    sys.argv, sys.path[0] = [args.script, *args.arguments], str(Path(args.script).resolve().parent)
    runpy.run_path(args.script, run_name='__main__')
    return 0
