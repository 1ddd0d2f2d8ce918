"""odevit script"""
import argparse
import runpy
import sys
from pathlib import Path


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
