"""odevit convert"""
import argparse
from typing import Any

import torch
from torch import nn

from ..convert.conversion import convert_
from ..convert.sizing import choose_size, parse_size
from ..ode.blocks import find_ode_blocks
from ..ode.config import OdeConfig
from ..saving.save import save_pretrained
from ..training.find_size import find_size
from .arguments import IMAGES, MODEL, add_settings, few, given, images_of, load, quiet, refuse_existing, whole_number

BATCH = 16  # images per update of the calibrations
HELP = 'Convert a pretrained model and save it.'
_SIZE = ('time', 'rank', 'phases', 'boundaries', 'init')  # what a size determines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', help=MODEL)
    parser.add_argument('out', help='folder to save to')
    parser.add_argument('--checkpoint', metavar='FILE',
                        help='file with the weights of the model, instead of a download')
    parser.add_argument('--random', action='store_true', help='do not load weights')
    parser.add_argument('--num-classes', type=whole_number(0), metavar='N',
                        help='number of classes; if it differs, the head is new')
    parser.add_argument('--img-size', type=whole_number(1), metavar='N', help='image size in pixels')
    parser.add_argument('--target-params', type=_amount, metavar='SIZE',
                        help=f"size of the result, such as 3M parameters, 25%% or 10MB; chooses {', '.join(_SIZE)}")
    parser.add_argument('--keep', metavar='SHARE',
                        help='the smallest size that keeps this share, such as 95%%, after a short calibration: '
                             'agreement with the model on images held out, or cosine of the embeddings')
    parser.add_argument('--minutes', type=float, metavar='M',
                        help='time for each of the 4 sizes that --keep tries (default: 1)')
    parser.add_argument('--images', metavar='IMAGES',
                        help=f'{IMAGES}; for --keep, boundaries similarity and init svd_data, which --target-params '
                             'then uses')
    parser.add_argument('--seed', type=int, metavar='N', default=0,
                        help='seed of the choice of images (default: %(default)s)')
    parser.add_argument('--force', action='store_true', help='write into a folder that is not empty')
    quiet(parser)
    add_settings(parser.add_argument_group('the ODE'), OdeConfig)


def run(args: argparse.Namespace) -> None:
    if not args.force:
        refuse_existing(args.out, '--force')
    settings = given(args, OdeConfig)
    chooses = '--target-params' if args.target_params is not None else '--keep' if args.keep is not None else ''
    both = [name for name in _SIZE if name in settings and chooses]
    if both:
        raise ValueError(f"{chooses} chooses {', '.join(_SIZE)}. Leave out --{both[0]} or {chooses}.")
    if args.keep is not None and (
            not args.images or args.random or args.target_params is not None or args.num_classes is not None):
        raise ValueError('--keep calibrates each size on images and compares it with the pretrained model. Give '
                         '--images, and leave out --target-params, --random and --num-classes.')
    if args.minutes is not None and args.keep is None:
        raise ValueError('--minutes is the time for each size that --keep tries. Give --keep too, or leave it out; '
                         'odevit calibrate calibrates a converted model.')
    if args.random and args.checkpoint is not None:
        raise ValueError('--random loads no weights, and --checkpoint does. Leave one of them out.')
    config = OdeConfig(**settings)
    options = {k: v for k, v in (('num_classes', args.num_classes), ('img_size', args.img_size)) if v is not None}
    model: Any = load(args.model, args, checkpoint=args.checkpoint, pretrained=not args.random, **options)
    if find_ode_blocks(model):
        raise ValueError(f"'{args.model}' has already been converted. Convert the model that it was made from.")
    if min(getattr(getattr(model, 'patch_embed', None), 'grid_size', None) or (1,)) < 1:
        raise ValueError(f'--img-size {args.img_size} is less than one patch of this model.')
    if args.keep is not None:
        loader, held = images_of(args.images, model, BATCH, seed=args.seed)
        minutes = 1. if args.minutes is None else args.minutes
        search = find_size(model, loader, few(held, BATCH), keep=args.keep, ode=config, minutes=minutes, seed=args.seed,
                           progress=not args.quiet)
        print(search)
        _save(search.student, args.out)
        return
    if args.target_params is not None:
        config = choose_size(model, args.target_params, config, init='svd_data' if args.images else 'svd')
    images = None
    if args.images:
        torch.manual_seed(args.seed)
        images = next(iter(images_of(args.images, model, seed=args.seed)[0]))[0].to(args.device)
    print(convert_(model, config, images=images, keep_original=False))
    classes = model.pretrained_cfg['num_classes']
    if not args.random and classes != model.num_classes:
        print(f'  head        new and random, for {model.num_classes} classes: the weights have {classes}')
    _save(model, args.out)


def _save(model: nn.Module, out: str) -> None:
    save_pretrained(model, out)
    print(f"  saved       {out}: timm.create_model('local-dir:{out}', pretrained=True)")


def _amount(text: str) -> str:
    try:
        parse_size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text
