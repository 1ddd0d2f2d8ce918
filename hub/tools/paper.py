"""Time and memory beside the published code of the ODE-ViT paper: the same width, tokens, steps and batch, in turns.

    git clone https://github.com/Bycarkos/ODE-ViT
    python hub/tools/paper.py ODE-ViT hub/speed/paper.json --threads 1

Inference is a forward pass without gradients; training is a forward and a backward pass of cross-entropy and an update
by AdamW. Memory is measured twice: the peak of what a call allocates, and, from outside, by how much three calls
raise the resident set of a process of their own. The paper's class is imported from its file; what that file imports
from the rest of its repository is not used by the model.
"""
import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import types
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

import timm_odevit
from timm_odevit.benchmark import peak_of, times_in_turns

PAPER = "the paper's code"
SIZE, WIDTH, HEADS, STEPS, REGISTERS, CLASSES = 224, 192, 3, 12, 4, 100
HALF, AGAIN, VIT = 'ours, K = 6', 'ours, activation checkpointing', 'vit_tiny, 12 blocks'
NAMES = {'inference': (PAPER, 'ours', HALF, VIT), 'training': (PAPER, 'ours', AGAIN, VIT)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('code', type=Path, help="a copy of the paper's repository")
    parser.add_argument('out', type=Path)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--only', nargs=2, metavar=('MODEL', 'WHAT'), help='print what it adds to the resident set')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only:
        print(resident(call_of(*args.only, args)))
        return
    found = []
    for what, names in NAMES.items():
        calls = {name: call_of(name, what, args) for name in names}
        turns = dict(zip(names, times_in_turns(calls.values(), args.rounds), strict=True))
        for name, call in calls.items():
            ratio = statistics.median(a / b for a, b in zip(turns[PAPER], turns[name], strict=True))
            outside = subprocess.run([sys.executable, __file__, args.code, args.out, '--only', name, what, '--threads',
                                      str(args.threads), '--batch-size', str(args.batch_size)],
                                     check=True, capture_output=True, text=True).stdout
            found.append({'what': what, 'model': name, 'ms': 1000 * statistics.median(turns[name]),
                          'ratio': ratio, 'bytes': peak_of(call, 'cpu'), 'resident': int(outside)})
            print(json.dumps(found[-1]), flush=True)
    record = {
        'width': WIDTH, 'steps': STEPS, 'tokens': 1 + (SIZE // 16) ** 2 + REGISTERS, 'batch size': args.batch_size,
        'threads': args.threads, 'torch': torch.__version__, 'timm_odevit': timm_odevit.__version__, 'found': found}
    args.out.write_text(json.dumps(record, indent=2) + '\n')


def call_of(name, what, args):
    torch.manual_seed(0)
    model = build(name, args.code)
    images = torch.randn(args.batch_size, 3, SIZE, SIZE)
    if what == 'inference':
        model.eval()
        return torch.inference_mode()(lambda: model(images))
    labels = torch.arange(args.batch_size) % CLASSES
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

    def step():
        logits = model(images)
        logits = logits['logits'] if isinstance(logits, dict) else logits
        F.cross_entropy(logits, labels, label_smoothing=0.05).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def build(name, code):
    if name == PAPER:
        sys.modules.setdefault('utils', types.ModuleType('utils'))
        spec = importlib.util.spec_from_file_location('paper', code / 'models' / 'ode_transformer_gpt.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.ViTNeuralODE(
            img_size=SIZE, patch_size=16, num_classes=CLASSES, embed_dim=WIDTH, num_heads=HEADS, time_interval=12.,
            num_eval_steps=STEPS + 1, solver='euler', register_tokens=REGISTERS)  # a grid of K + 1 points has K steps
    common = dict(num_classes=CLASSES, reg_tokens=REGISTERS)
    if name == VIT:
        return timm.create_model('vit_tiny_patch16_224', **common)
    model = timm.create_model('odevit_tiny', **common, **(dict(ode_steps=6, ode_T=12.) if name == HALF else {}))
    model.set_grad_checkpointing(name == AGAIN)
    return model


def resident(call):
    """Bytes by which three calls raise the highest resident set of this process."""
    Path('/proc/self/clear_refs').write_text('5')  # the highest resident set is now the present one

    def highest():
        lines = Path('/proc/self/status').read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))
    before = highest()
    for _ in range(3):
        call()
    return highest() - before


if __name__ == '__main__':
    main()
