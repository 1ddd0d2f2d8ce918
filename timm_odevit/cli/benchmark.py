"""odevit benchmark"""
import argparse
import os
from functools import partial
from pathlib import Path

import torch
from timm.models import parse_model_name
from torch import Tensor, nn

from ..benchmark import MODES
from ..benchmark import benchmark as measure
from ..files import to_json, write_text
from .arguments import (
    IMAGES,
    MODEL,
    TOWERS,
    add_number,
    add_quiet,
    check_file,
    check_name,
    images_of,
    load,
    step_counts,
)

DTYPES = ('float32', 'bfloat16', 'float16')


def add_benchmark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('models', nargs='+', metavar='MODEL', help=f'{MODEL}; the others are compared with the first')
    parser.add_argument('--batch-size', type=step_counts, metavar='N,N,...', default=(1, 8),
                        help='images per call (default: 1,8)')
    parser.add_argument('--steps', type=step_counts, metavar='K-K,K,...', default=(),
                        help='also time with these step counts (default: only as saved)')
    parser.add_argument('--compile', choices=MODES, nargs='?', const=MODES[0], metavar='MODE',
                        help=f"also time each model compiled by torch.compile, in one of its modes: {', '.join(MODES)}")
    parser.add_argument('--dtype', choices=DTYPES, default=DTYPES[0], metavar='DTYPE',
                        help=f"{', '.join(DTYPES)} (default: %(default)s)")
    add_number(parser, '--img-size', "image size in pixels (default: the model's)")
    add_number(parser, '--rounds', 'rounds in which all take turns', default=10)
    parser.add_argument('--data', help=f'{IMAGES} (default: noise)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write the measurements to this file')
    add_quiet(parser)


def benchmark(args: argparse.Namespace) -> None:
    """Time models, and measure their memory and size, side by side in one run."""
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    if len({*args.models}) < len(args.models):
        raise ValueError('A model is named twice. Give each one once.')
    check_file(args.json)
    found = measure(
        {name: _model(name, args) for name in args.models}, batch_sizes=args.batch_size, steps=args.steps,
        rounds=args.rounds, compiled=args.compile, images=partial(_images, args.data) if args.data else None,
        progress=not args.quiet)
    print(found)
    if args.json is not None:
        write_text(args.json, to_json(found.to_dict()))


def _model(name: str, args: argparse.Namespace) -> nn.Module:
    """A model by name; the weights of a name without a source or tag do not matter."""
    check_name(name)
    with_weights = name.startswith(TOWERS) or parse_model_name(name)[0] is not None or '.' in name
    return load(name, args, pretrained=with_weights).to(getattr(torch, args.dtype)).eval()


def _images(path: str, model: nn.Module, count: int) -> Tensor:
    """The first images of a folder or an .npz, again from the start if there are too few."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    found: list[Tensor] = []
    for images, _ in images_of(path, model, batch_size=count)[1]:
        found.append(images)
        if sum(map(len, found)) >= count:
            break
    images = torch.cat(found)
    return images[torch.arange(count) % len(images)].to(like)
