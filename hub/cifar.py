"""Fine-tune a timm ViT on CIFAR, then distil it into an ODE-ViT and evaluate both: the runs listed in TRAINING.md.

    python hub/cifar.py prepare cifar100.npz --name CIFAR100
    python hub/cifar.py teacher cifar100.npz out/teacher --img-size 64
    python hub/cifar.py student cifar100.npz out/student --teacher out/teacher/best

Images stay in memory (on the GPU where there is one) and are augmented there. The last 5 000 training images are held
out to choose the epoch; the test images are used once, at the end, for results.json.
"""
import argparse
import copy
import itertools
import json
import math
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.task import ClassificationTask

import timm_odevit
from timm_odevit import OdeConfig, TrajectoryDistillationTask, convert_, evaluate, fit
from timm_odevit.evaluate import AMP_DTYPES

HELD_OUT = 5000


class ArrayLoader:
    """Batches (images [B, 3, S, S], normalised; labels [B]) from uint8 images in memory, on one device."""

    def __init__(self, images, labels, cfg, size, batch_size, device, train=False):
        self.images = torch.as_tensor(images).to(device)
        self.labels = torch.as_tensor(labels).long().to(device)
        self.mean, self.std = (torch.tensor(cfg[key], device=device).view(1, 3, 1, 1) for key in ('mean', 'std'))
        self.size, self.batch_size, self.train = size, batch_size, train

    def __len__(self):
        n = len(self.labels) / self.batch_size
        return math.floor(n) if self.train else math.ceil(n)

    def __iter__(self):
        n = len(self.labels)
        order = torch.randperm(n) if self.train else torch.arange(n)
        for i in range(len(self)):
            index = order[i * self.batch_size:(i + 1) * self.batch_size].to(self.labels.device)
            images = self.images[index].permute(0, 3, 1, 2)
            if self.train:
                images = augment(images)
            images = F.interpolate(images.float() / 255, size=self.size, mode='bicubic', antialias=True).clamp(0, 1)
            yield (images - self.mean) / self.std, self.labels[index]


def augment(images, padding=4):
    """A random crop after padding, and a random horizontal flip, of each image [B, C, H, W] on its own."""
    B, _, H, W = images.shape
    device = images.device
    padded = F.pad(images, (padding,) * 4)
    shift = torch.randint(0, 2 * padding + 1, (2, B, 1)).to(device)
    rows, cols = shift[0] + torch.arange(H, device=device), shift[1] + torch.arange(W, device=device)
    cols = torch.where((torch.rand(B, 1) < 0.5).to(device), cols.flip(1), cols)
    each = torch.arange(B, device=device)
    return padded[each[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)


def loaders(args, cfg):
    with np.load(args.data) as data:
        x, y, x_test, y_test = (data[key] for key in ('x_train', 'y_train', 'x_test', 'y_test'))
    held = min(HELD_OUT, len(y) // 10)
    split = len(y) - held
    train, val = slice(0, min(split, args.limit or split)), slice(split, split + (args.limit or held))

    def make(images, labels, train=False):
        return ArrayLoader(images, labels, cfg, args.img_size, args.batch_size, args.device, train)
    test = slice(0, args.limit or len(y_test))
    classes = int(y.max()) + 1
    return make(x[train], y[train], True), make(x[val], y[val]), make(x_test[test], y_test[test]), classes


def options(args):
    return dict(
        epochs=args.epochs, out=args.out, resume=args.resume, lr=args.lr, warmup_epochs=args.warmup_epochs,
        ema_decay=args.ema_decay, amp=args.amp, seed=args.seed, progress=not args.quiet)


def finish(args, evaluation):
    names = ('data', 'out', 'teacher', 'checkpoint', 'run')  # where things lay says nothing about the result
    threads = torch.get_num_threads()
    record = {
        'arguments': {k: v for k, v in vars(args).items() if k not in names},
        'versions': {'timm_odevit': timm_odevit.__version__, 'torch': torch.__version__, 'timm': timm.__version__},
        'device': torch.cuda.get_device_name() if args.device == 'cuda' else f'CPU, {threads} threads',
        'test': json.loads(evaluation.to_json()),
    }
    (Path(args.out) / 'results.json').write_text(json.dumps(record, indent=2) + '\n')
    print(evaluation)


def run_prepare(args):
    import torchvision
    sets = [getattr(torchvision.datasets, args.name)(args.root, train=train, download=True) for train in (True, False)]
    arrays = {}
    for name, data in zip(('train', 'test'), sets, strict=True):
        arrays[f'x_{name}'], arrays[f'y_{name}'] = np.asarray(data.data), np.asarray(data.targets)
    np.savez(args.data, **arrays)


def run_teacher(args):
    overlay = {'file': args.checkpoint} if args.checkpoint else None
    cfg = timm.get_pretrained_cfg(args.model).to_dict()
    train, val, test, classes = loaders(args, cfg)
    torch.manual_seed(args.seed)
    model = timm.create_model(
        args.model, pretrained=not args.scratch, pretrained_cfg_overlay=overlay, num_classes=classes,
        img_size=args.img_size, drop_path_rate=args.drop_path).to(args.device)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    task = ClassificationTask(model, loss, device=torch.device(args.device))
    fit(task, train, val, **options(args))
    finish(args, evaluate(load(Path(args.out) / 'best', args), test, amp_dtype=AMP_DTYPES[args.amp]))


def run_student(args):
    teacher = load(args.teacher, args)
    train, val, test, _ = loaders(args, teacher.pretrained_cfg)
    torch.manual_seed(args.seed)
    student = copy.deepcopy(teacher)
    print(convert_(student, OdeConfig(
        field=args.field, method=args.method, steps=args.steps, init=args.init), keep_original=False))
    calibration = [images for images, _ in itertools.islice(val, 4)] if args.checkpoints == 'distance' else None
    task = TrajectoryDistillationTask(
        student, teacher, checkpoints=args.checkpoints, calibration=calibration,
        trajectory_weight=args.trajectory_weight, kd_weight=args.kd_weight, task_weight=args.task_weight,
        jasmin_weight=args.jasmin_weight, patch_weight=args.patch_weight)
    history = fit(task, train, val, **options(args))
    if args.search:
        print(f"best top-1 on the images held out: {max(r['val_top1'] for r in history):.2f} %")
        return
    best = load(Path(args.out) / 'best', args)
    steps = sorted({1, 2, 4, 6, 8, 12, 16, 24, best.blocks.steps})
    finish(args, evaluate(best, test, steps=steps, teacher=teacher, amp_dtype=AMP_DTYPES[args.amp]))


def load(folder, args):
    return timm.create_model(f'local-dir:{folder}', pretrained=True).to(args.device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    prepare = commands.add_parser('prepare', help="write torchvision's CIFAR as one .npz")
    prepare.add_argument('data')
    prepare.add_argument('--name', default='CIFAR100', choices=('CIFAR10', 'CIFAR100'))
    prepare.add_argument('--root', default='.')
    prepare.set_defaults(run=run_prepare)
    for name, function, lr in (('teacher', run_teacher, 5e-4), ('student', run_student, 1e-3)):
        command = commands.add_parser(name, help=function.__name__.replace('_', ' a '))
        command.add_argument('data', help='.npz of prepare: x_train, y_train, x_test, y_test; [N, 32, 32, 3], [N]')
        command.add_argument('out')
        command.add_argument('--img-size', type=int, default=64)
        command.add_argument('--epochs', type=int, default=4)
        command.add_argument('--batch-size', type=int, default=128)
        command.add_argument('--lr', type=float, default=lr)
        command.add_argument('--warmup-epochs', type=int, default=0)
        command.add_argument('--ema-decay', type=float)
        command.add_argument('--amp', choices=('bfloat16', 'float16'))
        command.add_argument('--seed', type=int, default=0)
        command.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
        command.add_argument('--threads', type=int)
        command.add_argument('--limit', type=int, help='use that many images only, to rehearse')
        command.add_argument('--resume', action='store_true')
        command.add_argument('--quiet', action='store_true')
        command.set_defaults(run=function)
        if name == 'teacher':
            command.add_argument('--model', default='deit_tiny_patch16_224')
            command.add_argument('--checkpoint', help='weights of the model, instead of a download')
            command.add_argument('--scratch', action='store_true')
            command.add_argument('--drop-path', type=float, default=0.)
            command.add_argument('--smoothing', type=float, default=0.)
        else:
            command.add_argument('--teacher', required=True, help='folder of a saved model')
            command.add_argument('--field', default='native', choices=('native', 'lipschitz'))
            command.add_argument('--method', default='lie_trotter')
            command.add_argument('--steps', type=int)
            command.add_argument('--init', default='mean')
            command.add_argument('--checkpoints', default='uniform', choices=('uniform', 'distance'))
            command.add_argument('--search', action='store_true', help='stop before the test images are seen')
            command.add_argument('--trajectory-weight', type=float, default=1.)
            command.add_argument('--patch-weight', type=float, default=0.45)
            command.add_argument('--kd-weight', type=float, default=1.)
            command.add_argument('--task-weight', type=float, default=0.)
            command.add_argument('--jasmin-weight', type=float, default=0.)
    args = parser.parse_args()
    if getattr(args, 'threads', None):
        torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == '__main__':
    main()
