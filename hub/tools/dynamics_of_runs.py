r"""Measure the dynamics of the students of an ablation, from its folder.

    python hub/tools/dynamics_of_runs.py out/methods cifar10.npz hub/dynamics/methods.json \
        --teacher deit_tiny_patch16_64.cifar10

For each run: top-1 on the images held out in training, the distance of the student's last states from the teacher's,
its largest Lyapunov exponent, the error of its discretisation, and, where training watched them, the spectral norms of
its weights, by epoch.
"""
import argparse
import json
from pathlib import Path

import timm
import torch

from timm_odevit import discretisation_errors, distance_over_time, lyapunov_exponents, softmax_bounds
from timm_odevit.data.arrays import array_loaders
from timm_odevit.files import to_json, write_text


def measure(folder, teacher, images):
    """What is measured of one run."""
    model = timm.create_model(f'local-dir:{folder / "best"}', pretrained=True).eval()
    error, = discretisation_errors(model, images, steps=[model.blocks.steps], iterations=3)
    history = json.loads((folder / 'history.json').read_text())
    return {
        'run': folder.name, 'method': model.blocks.method, 'steps': model.blocks.steps, 'nfe': model.blocks.nfe,
        'top1': json.loads((folder / 'measured.json').read_text())['top1'],
        'distance': float(distance_over_time(model, images, teacher=teacher).distance[:, -1].median()),
        'exponent': float(lyapunov_exponents(model, images).values.nanmean()), 'error': float(error.error.mean()),
        'bound': float(error.bound.mean()), 'softmax': float(softmax_bounds(model, images).values.mean()),
        'epochs': [{key: value for key, value in record.items()
                    if key in ('jasmin_loss', 'val_top1') or key.startswith('norm of')} for record in history],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', type=Path)
    parser.add_argument('data')
    parser.add_argument('out', type=Path)
    parser.add_argument('--teacher', required=True)
    parser.add_argument('--images', type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher = timm.create_model(args.teacher, pretrained=True).eval()
    images = torch.cat([x for x, _ in array_loaders(args.data, teacher, batch_size=32, limit=args.images)[2]])
    rows = []
    for file in sorted(args.runs.glob('*/measured.json')):
        rows.append(measure(file.parent, teacher, images))
        print(rows[-1]['run'], {k: v for k, v in rows[-1].items() if isinstance(v, float)}, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, to_json(rows))


if __name__ == '__main__':
    main()
