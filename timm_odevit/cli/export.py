"""odevit export"""
import argparse
from pathlib import Path
from typing import Any

from ..deploy.export import export_model
from ..deploy.formats import FORMATS
from .arguments import MODEL, load, set_steps, whole_number

HELP = 'Write a model to a file that runs without this package.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('--format', choices=list(FORMATS), default='onnx',
                        help='onnx, for ONNX Runtime and others; pt2, for torch.export.load; or aoti, compiled for '
                             'this kind of processor (default: %(default)s)')
    parser.add_argument('-o', '--out', metavar='FILE',
                        help="file to write: .onnx, or .pt2 for the others (default: the model's name)")
    parser.add_argument('--int8', action='store_true', help='store the weights of linear layers as int8')
    parser.add_argument('--unmerged', action='store_true',
                        help='do not merge a block that depends on time: a smaller file that may be slower')
    parser.add_argument('--steps', type=whole_number(1), metavar='K', help='number of solver steps (default: as saved)')
    parser.add_argument('--img-size', type=whole_number(1), metavar='N',
                        help="image size in pixels (default: the model's)")
    parser.add_argument('--overwrite', action='store_true', help='replace an existing file')


def run(args: argparse.Namespace) -> None:
    options = {} if args.img_size is None else {'img_size': args.img_size}
    model: Any = load(args.model, args, **options)
    set_steps(model, args.steps, args.model)
    out = args.out or Path(args.model.split(':')[-1]).resolve().name + FORMATS[args.format].suffix
    path = export_model(
        model, out, format=args.format, int8=args.int8, merged=not args.unmerged, overwrite=args.overwrite)
    print(f'wrote {path}: {path.stat().st_size / 1e6:.2f} MB')
