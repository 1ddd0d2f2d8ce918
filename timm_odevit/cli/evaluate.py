"""odevit evaluate"""
import argparse
from pathlib import Path
from typing import Any

from ..data.folders import folder_loader
from ..data.preprocessing import data_config
from ..evaluation.accuracy import AMP_DTYPES, evaluate
from ..ode.blocks import find_ode_blocks
from .arguments import DATA, MODEL, load, quiet, step_counts, whole_number, workers

HELP = 'Measure accuracy and speed at several step counts.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('data', help=DATA)
    parser.add_argument('--steps', type=step_counts, help='step counts, such as 1,2,4,12 (default: as saved)')
    parser.add_argument('--teacher', help='model to compare with: ' + MODEL)
    parser.add_argument('--batch-size', type=whole_number(1), default=64,
                        help='images per batch (default: %(default)s)')
    parser.add_argument('--amp', choices=[name for name in AMP_DTYPES if name], help='mixed precision')
    parser.add_argument('--held-out', type=float, metavar='SHARE',
                        help='evaluate only on the share that distill held out (default: val/ or test/, or all images)')
    parser.add_argument('--seed', type=int, default=0,
                        help='the seed that distill used, for --held-out (default: %(default)s)')
    parser.add_argument('--json', metavar='FILE', help='file to write the results to')
    workers(parser)
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise ValueError(f"There is no folder '{Path(args.json).parent}' to write {Path(args.json).name} to.")
    if args.json and Path(args.json).is_dir():
        raise ValueError(f"'{args.json}' is a folder. Give a file to write to.")
    model = load(args.model, args)
    teacher = load(args.teacher, args) if args.teacher else None
    if teacher is not None and teacher.num_classes != model.num_classes:
        raise ValueError(
            f'The teacher has {teacher.num_classes} classes, the model {model.num_classes}. Give a teacher with the '
            'same classes.')
    if args.steps and not find_ode_blocks(model):
        raise ValueError(
            f"--steps needs an ODE-ViT, but '{args.model}' is not one. Run: odevit convert {args.model} OUT")
    if teacher is not None and _size(teacher) != _size(model):
        raise ValueError(
            f'The teacher takes images of {_size(teacher)}, the model of {_size(model)}. Give a teacher with the same '
            'input size.')
    loader = folder_loader(
        args.data, model, batch_size=args.batch_size, workers=args.workers, held_out=args.held_out, seed=args.seed)
    found = evaluate(
        model, loader, steps=args.steps, teacher=teacher, amp_dtype=AMP_DTYPES[args.amp], progress=not args.quiet)
    print(found)
    if args.json:
        found.to_json(args.json)


def _size(model: Any) -> str:
    return ' x '.join(str(size) for size in data_config(model)['input_size'])
