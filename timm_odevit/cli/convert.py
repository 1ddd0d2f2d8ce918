"""odevit convert and calibrate"""
import argparse
import math
from itertools import islice
from typing import Any

import torch

from ..convert.conversion import convert_
from ..convert.sizing import choose_size
from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings
from ..ode.blocks import find_ode_blocks
from ..ode.config import OdeConfig
from ..training.calibrate import calibrate_
from ..training.config import CalibrationConfig
from ..training.loaders import Unlabelled
from .arguments import (
    IMAGES,
    MODEL,
    add_number,
    add_quiet,
    add_settings,
    add_weights,
    add_workers,
    given,
    images_of,
    load,
    load_as_saved,
    refuse_existing,
    save,
)

HELD_OUT = 512  # images to measure agreement on
_SIZE = ('time', 'rank', 'phases', 'boundaries', 'init')  # what a size determines


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('out', help='folder to save to')
    add_weights(parser, 'the model')
    parser.add_argument('--random', action='store_true', help='do not load weights')
    add_number(parser, '--num-classes', 'number of classes; if the weights have another number, the head is random', 0)
    parser.add_argument('--size', metavar='SIZE',
                        help=f"size of the result, such as 3M parameters, 25%% or 10MB; chooses {', '.join(_SIZE)}")
    parser.add_argument('--images', metavar='IMAGES',
                        help=f'{IMAGES}; for --init svd_data, which --size uses if they are given')
    parser.add_argument('--seed', type=int, metavar='N', default=0,
                        help='seed of the choice of images (default: %(default)s)')
    parser.add_argument('--force', action='store_true', help='write into a folder that is not empty')
    add_quiet(parser)
    add_settings(parser.add_argument_group('the ODE'), OdeConfig)


def convert(args: argparse.Namespace) -> None:
    """Convert a pretrained model and save it."""
    if not args.force:
        refuse_existing(args.out, '--force')
    settings = given(args, OdeConfig)
    both = [name for name in _SIZE if name in settings and args.size is not None]
    if both:
        raise ValueError(f"--size chooses {', '.join(_SIZE)}. Leave out --{both[0]} or --size.")
    if args.random and args.checkpoint is not None:
        raise ValueError('--random loads no weights, and --checkpoint does. Leave one of them out.')
    config = OdeConfig(**settings)
    classes = {} if args.num_classes is None else {'num_classes': args.num_classes}
    model: Any = load(args.model, args, pretrained=not args.random, **classes)
    if find_ode_blocks(model):
        raise ValueError(f"'{args.model}' has already been converted. Convert the model that it was made from.")
    if min(getattr(getattr(model, 'patch_embed', None), 'grid_size', None) or (1,)) < 1:
        raise ValueError(f'--img-size {args.img_size} is less than one patch of this model.')
    if args.size is not None:
        config = choose_size(model, args.size, config, init='svd_data' if args.images else 'svd')
    images = None
    if args.images:
        torch.manual_seed(args.seed)
        images = next(iter(images_of(args.images, model, seed=args.seed)[0]))[0].to(args.device)
    print(convert_(model, config, images=images, keep_original=False))
    known = model.pretrained_cfg['num_classes']
    if not args.random and model.num_classes and known != model.num_classes:
        print(f'  head        new and random, for {model.num_classes} classes: the weights have {known}')
    save(model, args.out)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('student', help="'local-dir:FOLDER' of a converted model")
    parser.add_argument('images', help=IMAGES)
    parser.add_argument('out', help='folder to save to; must be new')
    parser.add_argument('--teacher', metavar='MODEL', required=True, help=MODEL)
    add_weights(parser, 'the teacher')
    add_settings(parser, CalibrationConfig)
    add_workers(parser)
    add_quiet(parser)


def calibrate(args: argparse.Namespace) -> None:
    """Fit a converted model to its teacher, on images without labels."""
    config = CalibrationConfig(**given(args, CalibrationConfig))
    refuse_existing(args.out, 'remove it')
    student, teacher = load_as_saved(args.student, args), load(args.teacher, args)
    loader, held_out = images_of(args.images, student, config.batch_size, args.workers, config.seed)
    held_out = list(islice(Unlabelled(held_out, 1), math.ceil(HELD_OUT / config.batch_size)))
    measure, of = (evaluate, 'agreement') if student.num_classes else (evaluate_embeddings, 'neighbours')
    before: Any = measure(student, held_out, teacher=teacher).results[-1]
    calibrate_(student, teacher, loader, progress=not args.quiet, config=config)
    after: Any = measure(student, held_out, teacher=teacher).results[-1]
    what = 'agreement with' if student.num_classes else 'same nearest image as'
    print(f'{what} the teacher on {after.images} images held out: {getattr(before, of):.1f} % before, '
          f'{getattr(after, of):.1f} % after')
    save(student, args.out)
