"""odevit shrink"""
import argparse
import os
from pathlib import Path

from ..shrinking.run import shrink as run
from .arguments import IMAGES, MODEL, TOWERS, add_quiet, add_weights, load, refuse_existing


def add_shrink(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('images', help=f'{IMAGES} unless they are the classes of the model')
    parser.add_argument('out', help='folder for the student, the files that were compared, and the verdict')
    size = parser.add_mutually_exclusive_group()
    size.add_argument('--size', metavar='SIZE', help='size of the student, such as 25%%, 3M parameters or 4MB '
                                                     '(default: one that suits the images and minutes)')
    size.add_argument('--keep', metavar='SHARE', help=(
        'find the smallest student that keeps this share of the accuracy, such as 95%%'))
    parser.add_argument('--minutes', type=float, metavar='M', default=60., help='minutes to spend (default: 60)')
    add_weights(parser, 'the model')
    parser.add_argument('--embedding', action='store_true',
                        help="treat the model's outputs as embeddings, not logits; always on for image towers")
    parser.add_argument('--resume', action='store_true', help='continue the run in the folder')
    add_quiet(parser)


def shrink(args: argparse.Namespace) -> None:
    """Make a small student of a model, and say whether it is worth it."""
    if not args.resume:
        refuse_existing(args.out, '--resume')
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    model = load(args.model, args)
    try:
        verdict = run(model, args.images, args.out, size=args.size, keep=args.keep, minutes=args.minutes,
                      embedding=args.embedding or args.model.startswith(TOWERS), resume=args.resume,
                      progress=not args.quiet)
    except KeyboardInterrupt:
        best = Path(args.out, 'student', 'best')
        if best.exists():
            print(f'\nThe best student so far is in {best}. To continue: the same command with --resume')
        raise
    print(f'\n{verdict}')
