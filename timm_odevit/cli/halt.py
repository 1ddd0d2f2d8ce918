"""odevit halt"""
import argparse
from pathlib import Path
from typing import Any

from ..data.arrays import array_loaders
from ..data.folders import folder_loader, folder_parts
from ..evaluation.halting import calibrate_halting
from ..ode.config import HALTING
from ..saving.save import save_pretrained
from .arguments import DATA, MODEL, load, quiet, refuse_existing, set_steps, whole_number, workers

HELP = 'Choose when an image may stop before the last step, and save the model with this setting.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('data', help=DATA)
    parser.add_argument('out', help='folder to save the model to; must be new')
    parser.add_argument('--rule', choices=HALTING, default='entropy', help='what is compared (default: %(default)s)')
    parser.add_argument('--max-drop', type=float, metavar='SHARE', default=0.005,
                        help='largest loss of accuracy, as a share of all images (default: %(default)s)')
    parser.add_argument('--steps', type=whole_number(1), metavar='N', help='number of solver steps (default: as saved)')
    parser.add_argument('--held-out', type=float, metavar='SHARE', default=0.1,
                        help='share that training held out, if the data has no val/ (default: %(default)s)')
    parser.add_argument('--seed', type=int, metavar='N', default=0,
                        help='the seed of the training, for --held-out (default: %(default)s)')
    parser.add_argument('--batch-size', type=whole_number(1), metavar='N', default=64,
                        help='images per batch (default: %(default)s)')
    workers(parser)
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    refuse_existing(args.out, 'remove it')
    model = load(args.model, args)
    set_steps(model, args.steps, args.model)
    found = calibrate_halting(
        model, _held_out(args, model), rule=args.rule, max_drop=args.max_drop, progress=not args.quiet)
    print(found)
    found.apply_(model)
    folder = save_pretrained(model, args.out)
    print(f"saved {folder}: timm.create_model('local-dir:{folder}', pretrained=True)")


def _held_out(args: argparse.Namespace, model: Any) -> Any:
    """Images that training has not seen, but not the test images."""
    if Path(args.data).is_file():
        if args.workers is not None:
            raise ValueError('--workers load images from folders, but an .npz is read at once. Leave it out.')
        return array_loaders(args.data, model, batch_size=args.batch_size, held_out=args.held_out)[1]
    share = None if 'val' in folder_parts(args.data) else args.held_out
    return folder_loader(args.data, model, batch_size=args.batch_size, held_out=share, seed=args.seed,
                         workers=2 if args.workers is None else args.workers)
