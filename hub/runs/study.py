"""What minutes of one core buy: the same minutes, other settings or students; writes to study.jsonl.

    python hub/runs/study.py cifar100.npz --minutes 9 --lr 1e-3 --kd-weight 0.1 --patch-drop 0.5 --decay 0.2
    python hub/runs/study.py cifar100.npz --student odevit_tiny_native_patch16_128.deit_tiny_cifar100 \\
        --consistency 0.1 --steps '[[6, 1], [6, 2], [6, 3], [6, 4], [12, 2], [12, 3], [24, 3]]'
    python hub/tools/plain.py deit_tiny_patch16_128.cifar100 out/plain3 && python hub/runs/study.py cifar100.npz \\
        --student local-dir:out/plain3 --own 3

Minutes are those of the processor. The learning rate falls linearly to 0 over the last share `--decay` of them.
Accuracy is measured on images held out: 5,000 with --at or up to K = 6, else 2,048 up to K = 24 and 1,024 with K = 100.
"""
import argparse
import copy
import json
import time
from dataclasses import replace
from pathlib import Path

import timm
import torch
import yaml
from timm.layers import set_fused_attn

from timm_odevit import FitConfig, TrajectoryDistillationTask, convert_, evaluate
from timm_odevit.data.arrays import array_loaders
from timm_odevit.ode.blocks import count_parameters
from timm_odevit.training.optimizer import create_optimizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('data')
parser.add_argument('--teacher', default='deit_tiny_patch16_128.cifar100')
parser.add_argument('--student', help='by default, the teacher with one block')
parser.add_argument('--own', type=int, default=6, help='number of steps of the student')
parser.add_argument('--steps', type=yaml.safe_load, help='of each update, in YAML; its own by default')
parser.add_argument('--consistency', type=float, default=0.)
parser.add_argument('--minutes', type=float, default=8.)
parser.add_argument('--lr', type=float, default=6e-4)
parser.add_argument('--decay', type=float, default=1.)
parser.add_argument('--kd-weight', type=float, default=0.3)
parser.add_argument('--trajectory-weight', type=float, default=1.)
parser.add_argument('--patch-drop', type=float, default=0., help='until the decay, or throughout without --decay')
parser.add_argument('--at', type=yaml.safe_load, help='numbers of steps to evaluate with; by default, many')
parser.add_argument('--amp', action='store_true', help='in bfloat16')
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
set_fused_attn(not args.amp)  # as `fit` does in bfloat16
teacher = timm.create_model(args.teacher, pretrained=True).eval()
student = timm.create_model(args.student, pretrained=True).float() if args.student else convert_(
    copy.deepcopy(teacher), keep_original=False).model
ode = student.blocks
ode.config = replace(ode.config, steps=args.own)
tasks = [TrajectoryDistillationTask(
    student, copy.deepcopy(teacher), steps=args.steps, consistency_weight=args.consistency, kd_weight=args.kd_weight,
    trajectory_weight=args.trajectory_weight, patch_drop=drop, verbose=False)
    for drop in (args.patch_drop, args.patch_drop if args.decay == 1 else 0.)]
train, val, _ = array_loaders(args.data, student, batch_size=64, held_out=0.1)
weight_decay = 0.05 if ode.config.time == 'autonomous' else 0.
optimizer = create_optimizer(student, FitConfig(epochs=1, opt='muon', lr=args.lr, weight_decay=weight_decay))
rates = [group['lr'] for group in optimizer.param_groups]
started, images, share = time.process_time(), 0, 0.
while share < 1:
    for x, y in train:
        share = (time.process_time() - started) / 60 / args.minutes
        if share >= 1:
            break
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group['lr'] = rate * min(1., (images + 64) / 3200) * min(1., (1 - share) / args.decay)
        task = tasks[share >= 1 - args.decay]
        task.begin_update(images // 64, args.seed)
        with torch.autocast('cpu', torch.bfloat16, enabled=args.amp):
            loss = task.train()(x, y)['loss']
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.)
        optimizer.step()
        images += len(x)
batches, top1 = list(val), {}
for counts, number in [(args.at, 5000)] if args.at else (
        ((1, 2, 3, 4, 5, 6), 5000), ((9, 12, 24), 2000), ((100,), 1000)):
    few = batches[:-(-number // len(batches[0][0]))]
    top1.update({r.steps: round(r.top1, 2) for r in evaluate(student.eval(), few, steps=counts).results})
record = {**vars(args), 'images': images, 'parameters': count_parameters(student), 'top1': top1}
with Path(__file__).with_suffix('.jsonl').open('a') as file:
    file.write(json.dumps(record) + '\n')
print(record)
