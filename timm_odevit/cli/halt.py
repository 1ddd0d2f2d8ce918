"""odevit halt"""
import argparse
from pathlib import Path
from typing import Any

from ..data.arrays import array_loaders
from ..data.folders import folder_loader, folder_parts
from ..data.preprocessing import warn_of_other_classes
from ..evaluation.halting import calibrate_halting
from ..ode.config import HALTING
from ..saving.save import save_pretrained
from ..training.loaders import label_names
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
    parser.add_argument('--held-out', type=float, metavar='SHARE',
                        help='share that training held out, if the data has no val/ (default: 0.1)')
    parser.add_argument('--seed', type=int, metavar='N',
                        help='the seed of the training, for the images held out of folders (default: 0)')
    parser.add_argument('--batch-size', type=whole_number(1), metavar='N', default=64,
                        help='images per batch (default: %(default)s)')
    workers(parser)
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    refuse_existing(args.out, 'remove it')
    model = load(args.model, args)
    set_steps(model, args.steps, args.model)
    held_out = _held_out(args, model)
    warn_of_other_classes(model, label_names(held_out), args.data)
    found = calibrate_halting(
        model, held_out, rule=args.rule, max_drop=args.max_drop, progress=not args.quiet)
    print(found)
    if found.nfe == found.full_nfe:
        raise ValueError(f'No image can stop earlier at --max-drop {args.max_drop:g}, so nothing was saved. Allow '
                         'more, use another --rule, or train a student with exits: odevit distill early_exit')
    found.apply_(model)
    folder = save_pretrained(model, args.out)
    print(f"saved {folder}: timm.create_model('local-dir:{folder}', pretrained=True)")


def _held_out(args: argparse.Namespace, model: Any) -> Any:
    """Images that training has not seen, but not the test images."""
    share = 0.1 if args.held_out is None else args.held_out
    if not Path(args.data).exists():
        raise ValueError(f"There is no '{args.data}'. Give a folder of images or an .npz.")
    if Path(args.data).is_file():
        for option in ('workers', 'seed'):
            if getattr(args, option) is not None:
                raise ValueError(f'--{option} is for images in folders; an .npz is read at once, and its last images '
                                 'are held out. Leave it out.')
        return array_loaders(args.data, model, batch_size=args.batch_size, held_out=share)[1]
    own = 'val' in folder_parts(args.data)
    if own and (args.held_out is not None or args.seed is not None):
        raise ValueError(f"'{args.data}' has a val/ of its own, so nothing else was held out. Leave out --held-out and "
                         '--seed.')
    return folder_loader(args.data, model, batch_size=args.batch_size, held_out=None if own else share,
                         seed=args.seed or 0, workers=2 if args.workers is None else args.workers)
