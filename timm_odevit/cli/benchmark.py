"""odevit benchmark"""
import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any, List, Optional

import torch
from timm.models import parse_model_name
from torch import Tensor, nn

from ..benchmark.measure import MODES, benchmark, benchmark_training
from ..files import to_json, write_text
from ..ode.blocks import find_ode_blocks
from .arguments import IMAGES, MODEL, check_name, images_of, load, quiet, step_counts, whole_number

HELP = 'Time models, and measure their memory and size, side by side in one run.'
_BASE, _SIZES, _DTYPES = 'vit_tiny_patch16_224', (1, 8), ('float32', 'bfloat16', 'float16')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('models', nargs='*', metavar='MODEL', default=[_BASE], help=(
        f'{MODEL}; the others are compared with the first, and one that is alone and no ODE-ViT with ODE-ViTs '
        f'converted from it (default: {_BASE})'))
    parser.add_argument('--train', action='store_true', help='training steps instead: of the model, and distillation')
    parser.add_argument('--img-size', type=whole_number(1), metavar='N',
                        help="image size in pixels (default: the model's)")
    parser.add_argument('--batch-size', type=_batch_sizes, metavar='N[,N]', default=None, help=(
        'images per call, max for what fits into memory (default: 1,8; 8 with --train)'))
    parser.add_argument('--steps', type=step_counts, metavar='N[,N]', help=(
        'step counts of the ODE-ViTs (default: a quarter, half and twice their own, where the block does not depend '
        'on time)'))
    parser.add_argument('--rounds', type=whole_number(1), metavar='N', default=20,
                        help='rounds in which all take turns (default: %(default)s)')
    parser.add_argument('--compile', choices=MODES, nargs='?', const=MODES[0], metavar='MODE',
                        help=f"also compiled by torch.compile: {', '.join(MODES)}")
    parser.add_argument('--dtype', choices=_DTYPES, default=_DTYPES[0], metavar='DTYPE',
                        help=f"{', '.join(_DTYPES)} (default: %(default)s)")
    parser.add_argument('--data', help=f'{IMAGES} (default: noise)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='file to write the figures to, too')
    quiet(parser)


def run(args: argparse.Namespace) -> None:
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    if len({*args.models}) < len(args.models):
        raise ValueError('A model is named twice. Give each one once.')
    if args.json is not None and args.json.is_dir():
        raise ValueError(f"'{args.json}' is a folder. Give a file to write the figures to.")
    if args.json is not None and not args.json.parent.is_dir():
        raise ValueError(f"There is no folder '{args.json.parent}' to write {args.json.name} to.")
    models = {name: _model(name, args) for name in args.models}
    options: Any = dict(rounds=args.rounds, device=args.device, progress=not args.quiet)
    if args.train:
        _check_training(args, models)
        name, model = next(iter(models.items()))
        found = benchmark_training(model, name, batch_sizes=args.batch_size or _SIZES[1:], **options)
    else:
        found = benchmark(
            models, batch_sizes=args.batch_size or _SIZES, steps=args.steps, compiled=args.compile,
            images=partial(_images, args.data) if args.data else None, **options)
    print(found)
    if args.json is not None:
        write_text(args.json, to_json(found.to_dict()))


def _model(name: str, args: argparse.Namespace) -> nn.Module:
    """A model by name; the weights of a name without a source or tag do not matter."""
    check_name(name)
    with_weights = parse_model_name(name)[0] is not None or '.' in name
    size = {} if args.img_size is None else {'img_size': args.img_size}
    model = load(name, args, pretrained=with_weights, **size)
    return model.to(getattr(torch, args.dtype)).eval()


def _images(path: str, model: nn.Module, batch_size: int) -> Tensor:
    """The first images of a folder or an .npz, again from the start if there are too few."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    found: List[Tensor] = []
    for images, _ in images_of(path, model, batch_size=batch_size)[1]:
        found.append(images)
        if sum(map(len, found)) >= batch_size:
            break
    images = torch.cat(found)
    return images[torch.arange(batch_size) % len(images)].to(like)


def _check_training(args: argparse.Namespace, models: Any) -> None:
    if len(models) > 1 or any(find_ode_blocks(model) for model in models.values()):
        raise ValueError('--train compares one model with ODE-ViTs that are distilled from it. Give a model that is '
                         'not an ODE-ViT, alone.')
    for option in ('steps', 'compile', 'data'):
        if getattr(args, option) is not None:
            raise ValueError(f'--{option} applies to forward passes only. Leave it out with --train.')


def _batch_sizes(text: str) -> List[Optional[int]]:
    """Parse batch sizes, such as 1,8 or 1,max."""
    try:
        return [None if part == 'max' else whole_number(1)(part) for part in text.split(',')]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected batch sizes, such as 1,8 or 1,max; got '{text}'") from None
