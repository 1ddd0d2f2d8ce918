"""odevit report"""
import argparse
from pathlib import Path
from typing import Any

from ..data.pictures import some_images
from ..reporting.page import write_report
from ..training.resume import BEST
from .arguments import MODEL, load, quiet, refuse_existing, set_steps, whole_number

HELP = 'Show what a model does to a few images, in one page.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('--images', metavar='DATA', required=True,
                        help='folder of images, or an .npz of small images, of which x_test is used')
    parser.add_argument('-o', '--out', metavar='FOLDER', default='report',
                        help='folder for index.html, report.json and plots (default: %(default)s)')
    parser.add_argument('--teacher', metavar='MODEL', help='model to compare with: ' + MODEL)
    parser.add_argument('--count', type=whole_number(1), metavar='N', default=8,
                        help='images to show, spread evenly over the folder (default: %(default)s)')
    parser.add_argument('--steps', type=whole_number(1), metavar='N', help='number of solver steps (default: as saved)')
    parser.add_argument('--overwrite', action='store_true', help='replace an earlier report in the folder')
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    if not args.overwrite:
        refuse_existing(args.out, '--overwrite')
    model: Any = load(args.model, args)
    set_steps(model, args.steps, args.model)
    teacher = load(args.teacher, args) if args.teacher else None
    found = some_images(args.images, model, args.count)
    title = ', beside '.join(_short(name) for name in (args.model, args.teacher) if name)
    page = write_report(model, found.images, args.out, teacher=teacher, names=found.names, classes=found.classes,
                        title=title, progress=not args.quiet)
    print(f'wrote {page}')


def _short(name: str) -> str:
    path = Path(name.split(':')[-1])
    return str(Path(path.parent.name, path.name)) if path.name == BEST else path.name  # a folder best/ is one of many
