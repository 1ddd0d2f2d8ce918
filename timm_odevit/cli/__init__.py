"""odevit: the command line. Each command is a pair of functions: one adds its arguments, the other runs it.

arguments           what several commands share: argument types, models by name, images, folders to write to
shrink              shrink
train               finetune, distill, recipe
convert             convert, calibrate
evaluate            evaluate, halt, benchmark
predict             predict, report
export              export, push
"""
import argparse
import runpy
import sys
from pathlib import Path

import torch

from .._version import __version__
from ..settings import one_line, suggest
from . import convert, evaluate, export, predict, shrink, train
from .arguments import add_number

__all__ = ['COMMANDS', 'main', 'parser']


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('script', help="a Python script, such as timm's own train.py, validate.py or inference.py")
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help='its arguments')


def script(args: argparse.Namespace) -> int:
    """Run a script that uses timm, such as timm's own, with our models registered. Also runs under torchrun."""
    path = Path(args.script)
    if not path.is_file():
        print(f"odevit: error: There is no script '{path}'. timm's scripts are in its repository: train.py, "
              'validate.py, inference.py, benchmark.py, onnx_export.py.', file=sys.stderr)
        return 2
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = str(path.resolve().parent)
    runpy.run_path(str(path), run_name='__main__')
    return 0


# name: the function that runs it, whose docstring is its help, and the one that adds its arguments
COMMANDS = {
    'shrink': (shrink.shrink, shrink.add_shrink),
    'finetune': (train.finetune, train.add_finetune), 'convert': (convert.convert, convert.add_convert),
    'calibrate': (convert.calibrate, convert.add_calibrate), 'distill': (train.distill, train.add_distill),
    'evaluate': (evaluate.evaluate, evaluate.add_evaluate), 'halt': (evaluate.halt, evaluate.add_halt),
    'predict': (predict.predict, predict.add_predict), 'report': (predict.report, predict.add_report),
    'export': (export.export, export.add_export), 'push': (export.push, export.add_push),
    'recipe': (train.recipe, train.add_recipe), 'benchmark': (evaluate.benchmark, evaluate.add_benchmark),
    'script': (script, add_script),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, 2 for a mistake in the input, 130 if interrupted."""
    top = parser()
    args, unknown = top.parse_known_args(argv)
    if unknown:
        known = suggest(unknown[0].split('=')[0], args.options)
        top.error(f"unrecognized arguments: {' '.join(unknown)}. {known}See odevit {args.command} --help")
    if args.command == 'script':  # its device is its own, and so are its errors
        return script(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        _check_device(args.device)
        args.run(args)
    except (ValueError, TypeError, OSError, FloatingPointError, ImportError) as e:
        print(f'odevit: error: {one_line(e)}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('odevit: interrupted', file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    top = argparse.ArgumentParser(
        prog='odevit',
        description='Turn a pretrained vision transformer into one shared block that an ODE solver evaluates.',
        epilog='A complete run on images of your own, in one folder per class:\n'
               '  odevit finetune deit_tiny_patch16_224 images tuned\n'
               '  odevit distill autonomous images run --teacher local-dir:tuned/best\n'
               '  odevit evaluate local-dir:run/best images --held-out 0.1 --teacher local-dir:tuned/best\n'
               '  odevit predict local-dir:run/best photo.jpg',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument('--version', action='version', version=f'odevit {__version__}')
    commands = top.add_subparsers(title='commands', metavar='COMMAND', required=True)
    for name, (run, add_arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        add_arguments(command)
        if name != 'script':
            command.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu',
                                 help='torch device (default: %(default)s)')
            add_number(command, '--threads', "CPU threads (default: torch's own choice)")
        options = [text for action in command._actions for text in action.option_strings]
        command.set_defaults(run=run, command=name, options=options)
    return top


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as e:  # RuntimeError, AssertionError, ... by backend
        raise ValueError(f"--device '{device}' cannot be used here: {one_line(e)} Give another, such as cpu.") from e
