"""Fewer tokens along t, without training: accuracy and speed of an exactly converted ViT, each share of tokens in turn.

    python hub/tools/tokens.py photos.npz hub/speed/tokens.json --checkpoint deit_tiny.safetensors

The .npz holds uint8 images x_test [N, S, S, 3], of which the centre is used, and labels y_test. The shares take turns
on each batch, so that whatever else the machine does slows all of them; speed is images per second of CPU time, the
median over the batches.
"""
import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import timm
import torch
from tqdm import tqdm

from timm_odevit import convert_


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data')
    parser.add_argument('out')
    parser.add_argument('--model', default='deit_tiny_patch16_224')
    parser.add_argument('--checkpoint')
    parser.add_argument('--shares', type=float, nargs='+', default=[1., 0.5, 0.33, 0.2, 0.1, 0.05])
    parser.add_argument('--batch-size', type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    overlay = {'file': args.checkpoint} if args.checkpoint else None
    model = timm.create_model(args.model, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    config = timm.data.resolve_data_config({}, model=model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ('mean', 'std'))
    convert_(model, phases=len(model.blocks))  # exactly the ViT
    with np.load(args.data) as data:
        images, labels = torch.from_numpy(data['x_test']).permute(0, 3, 1, 2), torch.from_numpy(data['y_test']).long()
    size = config['input_size'][-1]
    start = (images.shape[-1] - size) // 2
    right, seconds = defaultdict(int), defaultdict(list)
    with torch.inference_mode():
        for batch, truth in tqdm(list(zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True))):
            x = (batch[..., start:start + size, start:start + size].float() / 255 - mean) / std
            for share in args.shares:
                model.blocks.config = replace(model.blocks.config, tokens=share)
                started = time.process_time()
                logits = model(x)
                seconds[share].append((time.process_time() - started) / len(x))
                right[share] += int((logits.argmax(dim=1) == truth).sum())
    per_image = {share: statistics.median(found) for share, found in seconds.items()}
    record = {'model': args.model, 'images': len(images), 'batch size': args.batch_size, 'torch': torch.__version__,
              'found': [{'tokens': share, 'top1': 100 * right[share] / len(images), 'images per second': 1 / time_each,
                         'times as fast': per_image[args.shares[0]] / time_each}
                        for share, time_each in per_image.items()]}
    with open(args.out, 'w') as file:
        file.write(json.dumps(record, indent=2) + '\n')
    print(json.dumps(record, indent=2))


if __name__ == '__main__':
    main()
