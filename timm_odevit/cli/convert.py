"""odevit convert"""
import argparse
from typing import Any

import torch

from ..convert.conversion import convert_
from ..convert.sizing import choose_size, parse_size
from ..ode.blocks import find_ode_blocks
from ..ode.config import OdeConfig
from ..saving.save import save_pretrained
from .arguments import IMAGES, MODEL, add_settings, given, images_of, load, refuse_existing, whole_number

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
    parser.add_argument('--images', metavar='IMAGES',
                        help=f'{IMAGES}; for boundaries similarity and init svd_data, which --target-params then uses')
    parser.add_argument('--seed', type=int, metavar='N', default=0,
                        help='seed of the choice of images (default: %(default)s)')
    parser.add_argument('--force', action='store_true', help='write into a folder that is not empty')
    add_settings(parser.add_argument_group('the ODE'), OdeConfig)


def run(args: argparse.Namespace) -> None:
    if not args.force:
        refuse_existing(args.out, '--force')
    settings = given(args, OdeConfig)
    both = [name for name in _SIZE if name in settings and args.target_params is not None]
    if both:
        raise ValueError(f"--target-params chooses {', '.join(_SIZE)}. Leave out --{both[0]} or --target-params.")
    config = OdeConfig(**settings)
    options = {k: v for k, v in (('num_classes', args.num_classes), ('img_size', args.img_size)) if v is not None}
    model: Any = load(args.model, args, checkpoint=args.checkpoint, pretrained=not args.random, **options)
    if find_ode_blocks(model):
        raise ValueError(f"'{args.model}' has already been converted. Convert the model that it was made from.")
    if min(getattr(getattr(model, 'patch_embed', None), 'grid_size', None) or (1,)) < 1:
        raise ValueError(f'--img-size {args.img_size} is less than one patch of this model.')
    if args.target_params is not None:
        config = choose_size(model, args.target_params, config, init='svd_data' if args.images else 'svd')
    images = None
    if args.images:
        torch.manual_seed(args.seed)
        images = next(iter(images_of(args.images, model)[0]))[0].to(args.device)
    print(convert_(model, config, images=images, keep_original=False))
    classes = model.pretrained_cfg['num_classes']
    if not args.random and classes != model.num_classes:
        print(f'  head        new and random, for {model.num_classes} classes: the weights have {classes}')
    save_pretrained(model, args.out)
    print(f"  saved       {args.out}: timm.create_model('local-dir:{args.out}', pretrained=True)")


def _amount(text: str) -> str:
    try:
        parse_size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text
