"""The dial from one shared block to the exact teacher: top-1 accuracy against parameters, before and after calibration.

    python examples/dial.py photos.npz out --teacher deit_tiny_patch16_224 --img-size 224 --minutes 10

The .npz holds uint8 images [N, S, S, 3]: x_train to calibrate on (labels are not used), and x_test with labels y_test
to measure accuracy on. Shares are of the teacher's blocks: 0.25 of twelve are three shared blocks. Writes out/dial.json
after every point, computes only the missing points when run again, and draws out/dial.png.
"""
import argparse
import copy
import json
import math
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F

import timm_odevit
from timm_odevit import calibrate_, choose_size, convert_, evaluate

SHARES = (0.09, 0.17, 0.25, 0.50, 1.00)  # of twelve blocks: 1, 2, 3, 6 and all


class Images:
    """Batches of normalised images [B, 3, S, S]: random crops, shuffled, some mirrored; or each image's centre."""

    def __init__(self, images, labels, model, size, batch_size, augment=False):
        cfg = timm.data.resolve_data_config({}, model=model)
        device = next(model.parameters()).device
        self.images = torch.as_tensor(images).permute(0, 3, 1, 2).to(device)
        self.labels = torch.as_tensor(labels).long().to(device)
        self.mean, self.std = (torch.tensor(cfg[key], device=device).view(1, 3, 1, 1) for key in ('mean', 'std'))
        self.size, self.batch_size, self.augment = size, min(batch_size, len(images)), augment

    def __len__(self):
        return math.ceil(len(self.images) / self.batch_size)

    def __iter__(self):
        order = torch.randperm(len(self.images)) if self.augment else torch.arange(len(self.images))
        for i in range(len(self)):
            index = order[i * self.batch_size:(i + 1) * self.batch_size].to(self.labels.device)
            yield self.prepare(self.images[index], self.augment), self.labels[index]

    def prepare(self, images, augment):
        small = images.shape[-1] < self.size  # then crop first, with a border, and enlarge second
        border = 4 if small and augment else 0
        images = F.pad(images, (border,) * 4)
        crop = images.shape[-1] - 2 * border if small else self.size
        room = images.shape[-1] - crop
        top, left = torch.randint(0, room + 1, (2,)).tolist() if augment else (room // 2, room // 2)
        images = images[..., top:top + crop, left:left + crop]
        if augment and torch.rand(()) < 0.5:
            images = images.flip(-1)
        images = images.float() / 255
        if small:
            images = F.interpolate(images, size=self.size, mode='bicubic', antialias=True).clamp(0, 1)
        return (images - self.mean) / self.std


def measure(share, teacher, x, test, args):
    student = copy.deepcopy(teacher).requires_grad_(True)
    done = convert_(student, choose_size(teacher, share), keep_original=False)
    row = {
        'share': share, 'phases': done.config.phases, 'parameters': done.parameters_after,
        'init_top1': evaluate(student, test).results[-1].top1, 'minutes': 0.,
    }
    row['top1'] = row['init_top1']
    if done.config.phases < done.layers:
        loader = Images(x, np.zeros(len(x)), teacher, args.img_size, args.batch_size, augment=True)
        started = time.perf_counter()
        calibrate_(student, teacher, loader, minutes=args.minutes, progress=not args.quiet)
        row.update(minutes=(time.perf_counter() - started) / 60, top1=evaluate(student, test).results[-1].top1)
    return row


def table(record):
    columns = ('share of the blocks', 'parameters', 'phases', 'kept initialised', 'kept calibrated')
    lines = [f"| {' | '.join(columns)} |", '| ' + ' | '.join('---' for _ in columns) + ' |']
    teacher = record['teacher']
    for row in record['rows']:
        kept = [100 * row[key] / teacher['top1'] for key in ('init_top1', 'top1')]
        after = f'{kept[1]:.1f} %' if row['minutes'] else 'exact'
        lines.append(f"| {100 * row['share']:.0f} % | {row['parameters']:,} | {row['phases']} "
                     f'| {kept[0]:.1f} % | {after} |')
    return '\n'.join(lines)


def plot(records, path):
    """Draw the kept share of the teacher's top-1 against the share of parameters, one pair of lines per record."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout='constrained')
    for name, record in records.items():
        x = [100 * row['share'] for row in record['rows']]
        kept = [[100 * row[key] / record['teacher']['top1'] for row in record['rows']] for key in ('top1', 'init_top1')]
        line, = axes.plot(x, kept[0], 'o-', label=f'{name}, calibrated')
        axes.plot(x, kept[1], 'o:', color=line.get_color(), label=f'{name}, initialised')
    axes.set(xlabel="shared blocks, % of the teacher's", ylabel="top-1, % of the teacher's", ylim=(0, 104))
    axes.grid(alpha=0.3)
    figure.legend(loc='outside lower center', ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data')
    parser.add_argument('out')
    parser.add_argument('--teacher', required=True, help="timm name, or 'local-dir:FOLDER'")
    parser.add_argument('--checkpoint', help='weights of the teacher, instead of a download')
    parser.add_argument('--img-size', type=int, default=224)
    parser.add_argument('--minutes', type=float, default=10., help='calibration time per point')
    parser.add_argument('--shares', type=float, nargs='+', default=SHARES)
    parser.add_argument('--batch-size', type=int, default=32)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--threads', type=int)
    parser.add_argument('--quiet', action='store_true')
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    overlay = {'file': args.checkpoint} if args.checkpoint else None
    teacher = timm.create_model(args.teacher, pretrained=True, pretrained_cfg_overlay=overlay).eval().to(args.device)
    with np.load(args.data) as data:
        x, x_test, y_test = (data[key] for key in ('x_train', 'x_test', 'y_test'))
    test = Images(x_test, y_test, teacher, args.img_size, 100)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / 'dial.json'
    if path.exists():
        record = json.loads(path.read_text())
    else:
        record = {
            'teacher': {'name': Path(args.teacher).name, 'parameters': sum(p.numel() for p in teacher.parameters()),
                        'top1': evaluate(teacher, test).results[-1].top1},
            'images': {'calibration': len(x), 'test': len(x_test), 'size': args.img_size},
            'device': 'one CPU thread' if torch.get_num_threads() == 1 else f'{torch.get_num_threads()} CPU threads',
            'rows': [],
            'versions': {'timm_odevit': timm_odevit.__version__, 'torch': torch.__version__, 'timm': timm.__version__},
        }
        if args.device != 'cpu':
            record['device'] = torch.cuda.get_device_name()
    for share in args.shares:
        if any(math.isclose(row['share'], share) for row in record['rows']):
            continue
        torch.manual_seed(args.seed)
        row = measure(share, teacher, x, test, args)
        record['rows'] = sorted([*record['rows'], row], key=lambda row: row['share'])
        temporary = path.with_suffix('.tmp')
        temporary.write_text(json.dumps(record, indent=2) + '\n')
        temporary.replace(path)
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    print(table(record))
    plot({'model': record}, out / 'dial.png')


if __name__ == '__main__':
    main()
