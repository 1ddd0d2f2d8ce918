"""odevit: the command line. Each command is a module here, which holds its arguments and what it does.

Options that are settings (of OdeConfig, of CalibrationConfig) are made from those, by `arguments.add_settings`.
"""
import argparse
import sys
from typing import List, Optional

import torch

from .._version import __version__
from ..errors import one_line, suggest
from . import (
    benchmark,
    calibrate,
    convert,
    distill,
    evaluate,
    export,
    finetune,
    halt,
    predict,
    push,
    recipe,
    report,
)
from .arguments import whole_number

__all__ = ['COMMANDS', 'main', 'parser']

COMMANDS = {'finetune': finetune, 'convert': convert, 'calibrate': calibrate, 'distill': distill, 'evaluate': evaluate,
            'halt': halt, 'predict': predict, 'report': report, 'export': export, 'push': push, 'recipe': recipe,
            'benchmark': benchmark}


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line; return the exit code: 0, 2 for a mistake in the input, 130 if interrupted."""
    whole = parser()
    args, unknown = whole.parse_known_args(argv)
    if unknown:
        known = suggest(unknown[0].split('=')[0], args.options)
        whole.error(f"unrecognized arguments: {' '.join(unknown)}. {known}See odevit {args.command} --help")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        _check_device(args.device)
        args.run(args)
    except (ValueError, TypeError, OSError, FloatingPointError, ImportError) as e:
        print(f'odevit: error: {one_line(e)}', file=sys.stderr)
        return 2
    except RuntimeError as e:
        if 'consecutive samples' not in str(e):  # timm's error for images that it cannot read
            raise
        print(f'odevit: error: The images cannot be read: {one_line(e)}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('odevit: interrupted', file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    whole = argparse.ArgumentParser(
        prog='odevit',
        description='Turn a pretrained vision transformer into one shared block that an ODE solver evaluates.',
        epilog='A complete run on images of your own, in one folder per class:\n'
               '  odevit finetune deit_tiny_patch16_224 images tuned\n'
               '  odevit distill autonomous images run --teacher local-dir:tuned/best\n'
               '  odevit evaluate local-dir:run/best images --held-out 0.1 --teacher local-dir:tuned/best\n'
               '  odevit predict local-dir:run/best photo.jpg',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    whole.add_argument('--version', action='version', version=f'odevit {__version__}')
    commands = whole.add_subparsers(title='commands', metavar='COMMAND', required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.set_defaults(run=module.run, command=name)
        module.add_arguments(command)
        command.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu',
                             help='torch device (default: %(default)s)')
        command.add_argument('--threads', type=whole_number(1), metavar='N',
                             help="CPU threads (default: torch's own choice)")
        command.set_defaults(options=[text for action in command._actions for text in action.option_strings])
    return whole


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as e:  # RuntimeError, AssertionError, ... by backend
        raise ValueError(f"--device '{device}' cannot be used here: {one_line(e)} Give another, such as cpu.") from e
