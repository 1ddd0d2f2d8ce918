"""odevit benchmark"""
import argparse
from typing import Any, Dict

import timm
import torch

from ..benchmark import benchmark, benchmark_training, peak_memory
from ..convert.conversion import convert_
from .arguments import check_name, whole_number

HELP = "Time the solver's loop, and ODE-ViTs against their base, in one run."
_STEPS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', nargs='?', default='vit_tiny_patch16_224',
                        help='timm name of the base (default: %(default)s)')
    for name, default, text in (('img-size', 224, 'image size in pixels'), ('batch-size', 8, 'images per call'),
                                ('rounds', 20, 'number of rounds')):
        parser.add_argument(f'--{name}', type=whole_number(1), metavar='N', default=default,
                            help=f'{text} (default: %(default)s)')
    parser.add_argument('--steps', type=whole_number(1), metavar='N', help=f'solver steps (default: {_STEPS})')
    parser.add_argument('--train', action='store_true', help='measure time and peak memory of training steps instead')


def run(args: argparse.Namespace) -> None:
    check_name(args.model)
    options: Dict[str, Any] = dict(
        img_size=args.img_size, batch_size=args.batch_size, rounds=args.rounds, device=args.device)
    print(f'batch {args.batch_size}, {args.img_size} px, {args.device}, {torch.get_num_threads()} threads, '
          f'torch {torch.__version__}, timm {timm.__version__}, median of {args.rounds} rounds')
    if args.train:
        if args.steps is not None:
            raise ValueError('--steps applies to the inference benchmark only. Leave it out with --train.')
        rows, peaks = benchmark_training(args.model, **options)
        print('| training step | ms | ratio | peak memory, MB | parameters |\n| --- | --- | --- | --- | --- |')
        for row in rows:
            print(f'| {row.name} | {1000 * row.seconds:.1f} | {row.ratio:.3f} | {peaks[row.name] / 1e6:.1f} | '
                  f'{row.parameters:,} |')
        return
    print('| candidate | ms | ratio | parameters |\n| --- | --- | --- | --- |')
    for row in benchmark(args.model, steps=args.steps or _STEPS, **options):
        print(f'| {row.name} | {1000 * row.seconds:.2f} | {row.ratio:.3f} | {row.parameters:,} |')
    model = timm.create_model(args.model, img_size=args.img_size, device=torch.device(args.device)).eval()
    convert_(model, keep_original=False)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, device=args.device)
    memory = peak_memory(model, images, (1, 6, 12, 24))
    print('peak memory of a forward pass, MB: ' + ', '.join(f'{k} steps {v / 1e6:.1f}' for k, v in memory.items()))
