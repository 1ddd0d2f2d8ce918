"""Where the time of a distillation step goes: the operations that take longest, and how much of the time they take.

    python hub/tools/profile_step.py deit_tiny_patch16_224 --img-size 64 --batch-size 64 --threads 1
    python hub/tools/profile_step.py deit_base_patch16_224 --batch-size 64 --device cuda --amp bfloat16 --trace t.json

The student has one shared block and, with --rank, residuals per layer; weights are random, which does not matter here.
`--trace` writes every event, for chrome://tracing or Perfetto: gaps between kernels are the time of Python.
"""
import argparse
import copy
from contextlib import nullcontext

import timm
import torch
from timm.optim import create_optimizer_v2

from timm_odevit import StepwiseTask, TrajectoryDistillationTask, convert_

TASKS = {'stepwise': StepwiseTask, 'trajectory': TrajectoryDistillationTask}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('model')
    parser.add_argument('--task', choices=TASKS, default='trajectory')
    parser.add_argument('--rank', type=int, default=0)
    parser.add_argument('--img-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--opt', default='adamw')
    parser.add_argument('--amp', choices=['bfloat16', 'float16'])
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--threads', type=int)
    parser.add_argument('--rows', type=int, default=15)
    parser.add_argument('--trace')
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    step = made(args)
    for _ in range(3):
        step()
    with torch.profiler.profile(with_stack=False) as profile:
        step()
    if args.trace:
        profile.export_chrome_trace(args.trace)
    print(table(profile, args.device, args.rows))


def made(args):
    torch.manual_seed(0)
    teacher = timm.create_model(args.model, img_size=args.img_size).to(args.device)
    student = copy.deepcopy(teacher)
    how = {'time': 'low_rank', 'rank': args.rank} if args.rank else {}
    convert_(student, **how, init='svd' if args.rank else 'mean', keep_original=False)
    task = TASKS[args.task](student, teacher, verbose=False)
    optimizer = create_optimizer_v2(student, opt=args.opt, lr=1e-5)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, device=args.device)
    labels = torch.zeros(args.batch_size, dtype=torch.long, device=args.device)
    amp = torch.autocast(args.device, getattr(torch, args.amp)) if args.amp else nullcontext()

    def step():
        with amp:
            loss = task(images, labels)['loss']
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.device != 'cpu':
            torch.cuda.synchronize()
    return step


def table(profile, device, rows):
    key = 'self_cpu_time_total' if device == 'cpu' else 'self_device_time_total'
    found = sorted(profile.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in found)
    lines = ['| operation | ms | % | calls |', '| --- | --- | --- | --- |']
    lines += [f'| `{event.key}` | {getattr(event, key) / 1000:.1f} | {100 * getattr(event, key) / total:.1f} | '
              f'{event.count} |' for event in found[:rows]]
    return '\n'.join([*lines, f'| all | {total / 1000:.1f} | 100 | |'])


if __name__ == '__main__':
    main()
