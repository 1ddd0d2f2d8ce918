"""What a training step needs with 12 and with 48 steps: memory, time, and how exact its gradients are.

    python hub/tools/memory.py hub/speed/memory.json --threads 1

One forward and backward pass of cross-entropy on random images. Memory is the peak of what is allocated, beyond
parameters and gradients. The error of a gradient is relative to plain back-propagation through the same steps, in
float64.
"""
import argparse
import json
import os
import statistics
import time

import timm
import torch
import torch.nn.functional as F

from timm_odevit import convert_
from timm_odevit.benchmark.timing import peak_of

WAYS = {  # settings of the ODE, and whether each step is computed again in the backward pass
    'plain back-propagation': (dict(method='euler'), False),
    'gradient checkpointing per step': (dict(method='euler'), True),
    'reversible': (dict(method='reversible'), False),
    'dopri5': (dict(method='dopri5'), False),
    'dopri5, adjoint': (dict(method='dopri5', adjoint=True), False),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('out')
    parser.add_argument('--model', default='vit_tiny_patch16_224')
    parser.add_argument('--img-size', type=int, default=64)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--threads', type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')
    found = []
    for way, (config, checkpointed) in WAYS.items():
        for steps in (12, 48):
            # an adaptive method chooses its own steps: four times as long instead of four times as many
            T = float(steps) if 'dopri5' in way else 12.
            model = made(args, checkpointed, steps=12 if 'dopri5' in way else steps, T=T, **config)
            call = step_of(model, args, torch.float32)
            call()
            seconds = []
            for _ in range(3):
                started = time.process_time()
                call()
                seconds.append(time.process_time() - started)
            found.append({'way': way, 'steps': steps, 'evaluations': model.blocks.nfe, 'bytes': peak_of(call, 'cpu'),
                          'ms': 1000 * statistics.median(seconds), 'gradient error': error(args, way, steps, T)})
            print(json.dumps(found[-1]), flush=True)
    with open(args.out, 'w') as file:
        file.write(json.dumps({'model': args.model, 'img_size': args.img_size, 'batch size': args.batch_size,
                               'torch': torch.__version__, 'found': found}, indent=2) + '\n')


def made(args, checkpointed, **config):
    torch.manual_seed(0)
    model = timm.create_model(args.model, img_size=args.img_size, num_classes=10)
    convert_(model, keep_original=False, **config)
    model.set_grad_checkpointing(checkpointed)
    return model.train()


def step_of(model, args, dtype):
    model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, generator=generator).to(dtype)
    labels = torch.arange(args.batch_size) % 10
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # not part of what is measured
    return lambda: F.cross_entropy(model(images), labels).backward()


def error(args, way, steps, T):
    """The distance of the gradient from that of plain back-propagation through the same map, relative to its norm."""
    config, checkpointed = WAYS[way]
    steps = 12 if 'dopri5' in way else steps
    gradients = []
    for plain in (False, True):
        adjoint = {'adjoint': not plain} if 'adjoint' in config else {}
        model = made(args, checkpointed and not plain, steps=steps, T=T, **{**config, **adjoint})
        if plain and way == 'reversible':
            for step in model.blocks:  # with hooks, back-propagation goes through the steps
                step.register_forward_hook(lambda *_: None)
        step_of(model, args, torch.float64)()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()


if __name__ == '__main__':
    main()
