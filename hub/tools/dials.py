"""Accuracy against speed for the three dials of one model, alone and together: steps, tokens along t, halting.

    python hub/tools/dials.py deit_tiny_patch16_224 photos.npz hub/speed/tokens.json --checkpoint deit_tiny.safetensors
    python hub/tools/dials.py local-dir:hub/NAME cifar100.npz hub/speed/dials.json --steps 6 5 4 --thresholds 0 0.1 0.3

A model that is no ODE-ViT is converted exactly (one phase per block), with nothing trained. The .npz holds uint8 images
x_test [N, S, S, 3], of which the centre is used if they are too large, and labels y_test. The settings take turns on
each batch, so that whatever else the machine does slows all of them; speed is images per second of CPU time, the median
over the batches. Operations are multiplications with addition per image, counted on the first batch.
"""
import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from timm_odevit import convert_


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('model')
    parser.add_argument('data')
    parser.add_argument('out')
    parser.add_argument('--checkpoint')
    parser.add_argument('--steps', type=int, nargs='+', help='step counts (default: its own)')
    parser.add_argument('--tokens', type=float, nargs='+', default=[1., 0.5, 0.33, 0.2, 0.1, 0.05])
    parser.add_argument('--halting', default='entropy')
    parser.add_argument('--thresholds', type=float, nargs='+', default=[0.], help='0 for no halting')
    parser.add_argument('--images', type=int, help='only the first so many')
    parser.add_argument('--batch-size', type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    overlay = {'file': args.checkpoint} if args.checkpoint else None
    model = timm.create_model(args.model, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    if not hasattr(model.blocks, 'config'):
        convert_(model, phases=len(model.blocks))
    settings = {
        (K, tokens, threshold): replace(
            model.blocks.config, steps=K, tokens=tokens, halting=args.halting if threshold else None,
            halting_threshold=threshold)
        for K, tokens, threshold in product(args.steps or [model.blocks.steps], args.tokens, args.thresholds)}
    right, seconds, evaluations = defaultdict(int), defaultdict(list), defaultdict(list)
    images, labels = read(args.data, args.images)
    with torch.inference_mode():
        for batch, truth in tqdm(list(zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True))):
            x = prepared(batch, model)
            for setting, config in settings.items():
                model.blocks.config = config
                started = time.process_time()
                logits = model(x)
                seconds[setting].append((time.process_time() - started) / len(x))
                right[setting] += int((logits.argmax(dim=1) == truth).sum())
                taken = model.blocks.steps_taken if config.halting else None
                evaluations[setting].append(
                    model.blocks.nfe * (1. if taken is None else taken.float().mean().item() / config.steps))
        batch, operations = prepared(images[:args.batch_size], model), {}
        for setting, config in settings.items():
            model.blocks.config = config
            with FlopCounterMode(display=False) as counted:
                model(batch)
            operations[setting] = counted.get_total_flops() / 2 / len(batch)
    each = {setting: statistics.median(found) for setting, found in seconds.items()}
    first = each[next(iter(settings))]
    record = {'model': args.model, 'images': len(images), 'batch size': args.batch_size, 'torch': torch.__version__,
              'halting': args.halting, 'found': [
                  {'steps': K, 'tokens': tokens, 'threshold': threshold, 'top1': 100 * right[key] / len(images),
                   'evaluations': statistics.mean(evaluations[key]), 'operations': operations[key],
                   'images per second': 1 / each[key], 'times as fast': first / each[key]}
                  for key in settings for K, tokens, threshold in [key]]}
    with open(args.out, 'w') as file:
        file.write(json.dumps(record, indent=2) + '\n')
    for r in record['found']:
        print(json.dumps(r))


def read(path, count):
    with np.load(path) as data:
        images, labels = data['x_test'][:count], data['y_test'][:count]
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels).long()


def prepared(batch, model):
    """Images [B, 3, H, W] for a model: the centre of larger ones, or smaller ones enlarged, as array_loaders does."""
    config = timm.data.resolve_data_config({}, model=model)
    size = config['input_size'][-1]
    start = max(0, (batch.shape[-1] - size) // 2)
    x = batch[..., start:start + size, start:start + size].float() / 255
    if x.shape[-1] < size:
        x = F.interpolate(x, size=(size, size), mode=config['interpolation'], antialias=True).clamp(0, 1)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ('mean', 'std'))
    return (x - mean) / std


if __name__ == '__main__':
    main()
