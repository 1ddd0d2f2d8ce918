"""odevit benchmark"""
import argparse
import os
from typing import Any, Dict

import timm
import torch

from ..benchmark import benchmark, benchmark_models, benchmark_training, peak_memory
from ..convert.conversion import convert_
from .arguments import MODEL, check_name, load, whole_number

HELP = "Time the solver's loop, and ODE-ViTs against their base, in one run."
_BASE, _STEPS, _SIZE = 'vit_tiny_patch16_224', 12, 224


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', nargs='?', help=f'timm name of the base (default: {_BASE})')
    parser.add_argument('--models', nargs='+', metavar='MODEL',
                        help=f'time these instead, as they are and merged, against the first: {MODEL}')
    parser.add_argument('--img-size', type=whole_number(1), metavar='N',
                        help=f'image size in pixels (default: {_SIZE}; with --models, their own)')
    for name, default, text in (('batch-size', 8, 'images per call'), ('rounds', 20, 'number of rounds')):
        parser.add_argument(f'--{name}', type=whole_number(1), metavar='N', default=default,
                            help=f'{text} (default: %(default)s)')
    parser.add_argument('--steps', type=whole_number(1), metavar='N', help=f'solver steps (default: {_STEPS})')
    parser.add_argument('--train', action='store_true', help='measure time and peak memory of training steps instead')


def run(args: argparse.Namespace) -> None:
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    if args.models and (args.model or args.train or args.steps or args.img_size):
        raise ValueError('--models times models as they are. Leave out the base, --train, --steps and --img-size.')
    if len({*(args.models or ())}) < len(args.models or ()):
        raise ValueError('--models names a model twice. Give each one once.')
    base = args.model or _BASE
    check_name(base)
    size = args.img_size or _SIZE
    options: Dict[str, Any] = dict(
        img_size=size, batch_size=args.batch_size, rounds=args.rounds, device=args.device)
    pixels = '' if args.models else f' {size} px,'
    print(f'batch {args.batch_size},{pixels} {args.device}, {torch.get_num_threads()} threads, '
          f'torch {torch.__version__}, timm {timm.__version__}, median of {args.rounds} rounds')
    if args.train:
        if args.steps is not None:
            raise ValueError('--steps applies to the inference benchmark only. Leave it out with --train.')
        rows, peaks = benchmark_training(base, **options)
        print('| training step | ms | ratio | peak memory, MB | parameters |\n| --- | --- | --- | --- | --- |')
        for row in rows:
            print(f'| {row.name} | {1000 * row.seconds:.1f} | {row.ratio:.3f} | {peaks[row.name] / 1e6:.1f} | '
                  f'{row.parameters:,} |')
        return
    if args.models:
        models = {name: load(name, args) for name in args.models}
        rows = benchmark_models(models, batch_size=args.batch_size, rounds=args.rounds, device=args.device)
    else:
        rows = benchmark(base, steps=args.steps or _STEPS, **options)
    print('| candidate | ms | ratio | parameters |\n| --- | --- | --- | --- |')
    for row in rows:
        print(f'| {row.name} | {1000 * row.seconds:.2f} | {row.ratio:.3f} | {row.parameters:,} |')
    if args.models:
        return
    model = timm.create_model(base, img_size=size, device=torch.device(args.device)).eval()
    convert_(model, keep_original=False)
    images = torch.randn(args.batch_size, 3, size, size, device=args.device)
    memory = peak_memory(model, images, (1, 6, 12, 24))
    print('peak memory of a forward pass, MB: ' + ', '.join(f'{k} steps {v / 1e6:.1f}' for k, v in memory.items()))
