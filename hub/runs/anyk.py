"""The price of any K: four ways to train three shared blocks for K = 12, 6 and 3, from those for K = 6, at equal minutes.

    python anyk.py held.npz out/three6/best hub/deit_tiny_patch16_128.cifar100 OUT.json MINUTES SEED MODE...

MODE: thirds (the mean of the three passes), weights (1, 0.3, 0.3), second (the pass with K = 12 also teaches the
others), residual (rank 8 for each of the three numbers of steps), lone (K = 6 alone goes on, what the others cost).
"""
import copy
import json
import sys
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import nn

import timm_odevit
from timm_odevit import TrajectoryDistillationTask, evaluate, fit
from timm_odevit.data.batches import DataConfig
from timm_odevit.data.read import read_data
from timm_odevit.ode.blocks import OdeBlocks
from timm_odevit.training import losses

RANK, STEPS = 8, (12, 6, 3)
now = [6]


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.a = nn.ParameterDict({str(k): nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features ** 0.5) for k in STEPS})
        self.b = nn.ParameterDict({str(k): nn.Parameter(torch.zeros(layer.out_features, RANK)) for k in STEPS})

    def forward(self, x):
        k = str(now[0])
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.a[k]), self.b[k])






def run(mode, data, start, teacher, minutes, seed):
    student = timm.create_model(f'local-dir:{start}', pretrained=True)
    if mode == 'residual':
        for phase in student.blocks.shared.phases:
            for part, name in ((phase.block.attn, 'qkv'), (phase.block.attn, 'proj'), (phase.block.mlp, 'fc1'), (phase.block.mlp, 'fc2')):
                setattr(part, name, Adapted(getattr(part, name)))
        own = OdeBlocks.forward

        def forward(self, *args, **kwargs):
            now[0] = self.steps
            return own(self, *args, **kwargs)
        OdeBlocks.forward = forward
        follow = losses._follow

        def _follow(model, *args):
            now[0] = model.blocks.steps
            return follow(model, *args)
        losses._follow = _follow
    several = {} if mode == 'lone' else {'steps': [list(STEPS)]}
    if mode == 'second':
        several['consistency_weight'] = 0.3
    parts = losses.TrajectoryPass._parts
    if mode == 'weights':
        def _parts(self, model, *args):
            output, found = parts(self, model, *args)
            share = {12: 1., 6: 0.3, 3: 0.3}[model.blocks.steps] * 3 / 1.6 if self.training else 1.
            return output, {name: share * part for name, part in found.items()}
        losses.TrajectoryPass._parts = _parts
    read = read_data(data, student, DataConfig(batch_size=64), held_out=0)
    torch.manual_seed(seed)
    try:
        for loss, given in (({'kd_weight': 0.1, 'patch_drop': 0.5}, {'minutes': 0.6 * minutes, 'sched': 'step'}),
                            ({'kd_weight': 0.3}, {'minutes': 0.4 * minutes})):
            task = TrajectoryDistillationTask(student, teacher, **several, **loss)
            history = fit(task, read.train, progress=False, opt='muon', lr=1e-3, weight_decay=0.05, amp='bfloat16', seed=seed, **given)
        found = evaluate(student.eval(), read.test, steps=(3, 6, 12), amp_dtype=torch.bfloat16, progress=False)
    finally:
        losses.TrajectoryPass._parts = parts
    rows = {r['steps']: r['top1'] for r in json.loads(found.to_json())}
    return {'top1': rows, 'loss': history[-1]['loss'], 'parameters': sum(p.numel() for p in student.parameters())}


def main():
    data, start, teacher, out, minutes, seed, *modes = sys.argv[1:]
    torch.set_num_threads(1)
    teacher, out = timm.create_model(f'local-dir:{teacher}', pretrained=True).eval(), Path(out)
    done = json.loads(out.read_text()) if out.exists() else {}
    for mode in modes:
        if (key := f'{mode}, {minutes} minutes, seed {seed}') not in done:
            done[key] = run(mode, data, start, copy.deepcopy(teacher), float(minutes), int(seed))
            out.write_text(json.dumps(done, indent=1) + '\n')
            print(key, done[key], flush=True)


if __name__ == '__main__':
    main()
