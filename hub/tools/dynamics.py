r"""Measure what the states of published models do along the way.

    python hub/tools/dynamics.py cifar100.npz out/dynamics --teacher deit_tiny_patch16_128.cifar100 \
        --students odevit_tiny_native_patch16_128.deit_tiny_cifar100 --images 1000

Test images; one JSON file per model and measure, so that an interrupted run goes on where it was.
"""
import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import timm
import torch
from relations import relations
from signals import signals

import timm_odevit as odevit
from timm_odevit.data.arrays import array_loaders
from timm_odevit.files import to_json, write_text
from timm_odevit.ode.blocks import find_ode_blocks

FEW = 100  # images for the errors of the discretisation, which take seconds each


def spread(values):
    values = values.double()
    return {'mean': float(values.mean()), 'sd': float(values.std()) if len(values) > 1 else math.nan}


def exponents(model, images, tokens='all'):
    found = odevit.lyapunov_exponents(model, images, tokens=tokens)
    return {**spread(found.values[:, 0]), 'drift': float(found.drift.mean()),
            'residual': float(found.residual.max()), 'running': found.running[..., 0].mean(0).tolist(),
            'without': sum(reason is not None for reason in found.reasons)}


def lipschitz(model, images):
    found = odevit.lipschitz_constants(model, images, iterations=8)
    return {'along': found.values.mean(0).tolist(), 'largest': float(found.values.max()),
            **spread(found.values.mean(1))}


def softmax(model, images):
    found = odevit.attention_over_time(model, images).softmax_bound
    return {'along': found.mean((0, 2)).tolist(), **spread(found.mean((1, 2)))}


def region(model, teacher, images):
    found = odevit.contraction_regions(teacher, images, student=None if model is teacher else model)
    radii = {'worst': found.worst, 'distance': found.distance, 'towards': found.towards,
             'random': found.random.median(dim=1).values}
    return {**{name: float((radius / found.norm).median()) for name, radius in radii.items()},
            'inside': 100 * float(found.inside.double().mean()), 'same': 100 * float(found.same.double().mean())}


def observed_order(errors):
    """The order of convergence that the errors of one method show: the slope of log error against log h."""
    return -float(np.polyfit(*np.log([(e.steps, float(e.error.mean())) for e in errors]).T, 1)[0])


def discretisation(model, images):
    methods = dict.fromkeys([find_ode_blocks(model)[0].method, 'strang', 'rk4'])
    found = [odevit.discretisation_errors(model, images, methods=[method], fine=4) for method in methods]
    return [{'method': e.method, 'steps': e.steps, 'error': float(e.error.mean()),
             'reference': float(e.reference.mean()), 'local': e.local.mean(0).tolist(), 'order': observed_order(each)}
            for each in found for e in each]


def measures(model, teacher, images, loader):
    """The measures of one model, by name; each a function without arguments that returns what goes into JSON."""
    chosen = {
        'spectral_norms': lambda: odevit.spectral_norms(model), 'exponents': lambda: exponents(model, images),
        'class_token': lambda: exponents(model, images, 'class'), 'softmax': lambda: softmax(model, images),
        'region': lambda: region(model, teacher, images),
        'relations': lambda: relations(*signals(model, loader, teacher=None if model is teacher else teacher)),
        'lipschitz': lambda: lipschitz(model, images), 'discretisation': lambda: discretisation(model, images[:FEW])}
    return {name: run for name, run in chosen.items() if name != 'discretisation' or find_ode_blocks(model)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data')
    parser.add_argument('out', type=Path)
    parser.add_argument('--teacher', required=True, help='name of the teacher')
    parser.add_argument('--students', nargs='+', default=[], help='names of its students')
    parser.add_argument('--images', type=int, default=1000, help='number of test images')
    parser.add_argument('--threads', type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    teacher = timm.create_model(args.teacher, pretrained=True).eval()
    for name in (args.teacher, *args.students):
        model = teacher if name == args.teacher else timm.create_model(name, pretrained=True).eval()
        loader = list(array_loaders(args.data, model, batch_size=50, limit=args.images)[2])
        images = torch.cat([batch for batch, _ in loader])
        for measure, run in measures(model, teacher, images, loader).items():
            path = args.out / name / f'{measure}.json'
            count = min(FEW, len(images)) if measure == 'discretisation' else len(images)
            if path.exists() and json.loads(path.read_text())['images'] == count:
                continue
            start = time.process_time()
            found = run()
            each = 1000 * (time.process_time() - start) / count
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, to_json({'images': count, 'ms per image': each, 'found': found}))
            print(f'{name}, {measure}: {each:.1f} ms per image', flush=True)


if __name__ == '__main__':
    main()
