"""What minutes of one core buy at 128 px: the same minutes, other settings or students; writes to study_128.jsonl.

    python hub/runs/study_128.py cifar100.npz --minutes 9 --patch-drop 0.5 --lr 1e-3 --kd-weight 0.1 --steps 6
    python hub/tools/plain.py deit_tiny_patch16_128.cifar100 out/plain3 && python hub/runs/study_128.py cifar100.npz \
        --student local-dir:out/plain3 --minutes 60 --patch-drop 0.5

The learning rate is constant, with one linear decay over the last fifth of the time, in which all patches are seen.
Minutes are those of the processor.
"""
import argparse
import copy
import json
import time
from pathlib import Path

import timm
import torch
from timm.optim import create_optimizer_v2

from timm_odevit import OdeConfig, TrajectoryDistillationTask, convert_, evaluate
from timm_odevit.data.arrays import array_loaders
from timm_odevit.ode.blocks import count_parameters
from timm_odevit.training.monitor import muon_in_float32

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('data')
parser.add_argument('--teacher', default='local-dir:hub/deit_tiny_patch16_128.cifar100')
parser.add_argument('--student', help='a student in place of one block with --steps steps')
parser.add_argument('--minutes', type=float, default=9.)
parser.add_argument('--steps', type=int, default=6)
parser.add_argument('--patch-drop', type=float, default=0.)
parser.add_argument('--lr', type=float, default=1e-3)
parser.add_argument('--kd-weight', type=float, default=0.1)
args = parser.parse_args()
torch.set_num_threads(1)
teacher = timm.create_model(args.teacher, pretrained=True).eval()
if args.student:
    student = timm.create_model(args.student, pretrained=True)
else:
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(steps=args.steps, T=12.), keep_original=False)
tasks = [TrajectoryDistillationTask(student, copy.deepcopy(teacher), kd_weight=args.kd_weight, patch_drop=drop)
         for drop in (args.patch_drop, 0.)]
train, val, _ = array_loaders(args.data, student, batch_size=64, held_out=0.1)
optimizer = create_optimizer_v2(student, opt='muon', lr=args.lr, weight_decay=0.05)
rates = [group['lr'] for group in optimizer.param_groups]
started, images, share = time.process_time(), 0, 0.
with muon_in_float32():
    while share < 1:
        for x, y in train:
            share = (time.process_time() - started) / 60 / args.minutes
            if share >= 1:
                break
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group['lr'] = rate * min(1., 5 * (1 - share), (images + 64) / 3200)
            loss = tasks[share >= 0.8].train()(x, y)['loss']
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.)
            optimizer.step()
            images += len(x)
record = {**vars(args), 'images': images, 'parameters': count_parameters(student),
          'top1': evaluate(student.eval(), val).results[0].top1}
with Path(__file__).with_suffix('.jsonl').open('a') as file:
    file.write(json.dumps(record) + '\n')
print(record)
