"""Training steps of this checkout and of an earlier commit, which take turns in one run, each in a process of its own.

    python hub/tools/against.py 8ced7b2 local-dir:hub/deit_tiny_patch16_64.cifar100 hub/speed/against.json --rounds 20

A rank-23 student follows its teacher's trajectory with Muon, on batches of 64 images of noise: the same images and the
same start everywhere, so that the first losses must agree. This checkout also runs with the teacher's states cached.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parents[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('commit')
    parser.add_argument('model')
    parser.add_argument('out', type=Path)
    parser.add_argument('--rounds', type=int, default=20)
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--rank', type=int, default=23)
    parser.add_argument('--worker', choices=('live', 'cached'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / 'before'
        subprocess.run(['git', '-C', HERE, 'worktree', 'add', '--detach', before, args.commit], check=True)
        try:
            compare(args, before)
        finally:
            subprocess.run(['git', '-C', HERE, 'worktree', 'remove', '--force', before], check=True)


def compare(args, before):
    workers = {
        args.commit: started('live', before),
        'this checkout': started('live', HERE),
        'this checkout, cached states': started('cached', HERE),
    }
    seconds, losses = {name: [] for name in workers}, {}
    for turn in range(args.rounds + 2):
        for name, worker in workers.items():
            worker.stdin.write('go\n')
            worker.stdin.flush()
            taken, loss = json.loads(worker.stdout.readline())
            losses.setdefault(name, []).append(loss)
            if turn >= 2:  # the first two warm up
                seconds[name].append(taken)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    found = [{
        'name': name,
        'images per second': args.batch_size / statistics.median(taken),
        'times as fast': statistics.median(a / b for a, b in zip(seconds[args.commit], taken, strict=True)),
        'losses': losses[name][:3],
    } for name, taken in seconds.items()]
    args.out.write_text(json.dumps({
        'model': args.model, 'rank': args.rank, 'batch size': args.batch_size, 'rounds': args.rounds,
        'torch': torch.__version__, 'found': found}, indent=2) + '\n')
    for record in found:
        print(record)


def started(kind, package):
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], '--worker', kind], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, 'PYTHONPATH': str(package)})


def work(args):
    """Make one update for each line of the input; print its seconds of CPU time and its loss."""
    import timm
    from timm.optim import create_optimizer_v2

    from timm_odevit import OdeConfig, TrajectoryDistillationTask, convert_
    torch.manual_seed(0)
    teacher = timm.create_model(args.model, pretrained=True).eval()
    student = timm.create_model(args.model, pretrained=True).eval()
    images = torch.randn(args.batch_size, *teacher.pretrained_cfg['input_size'])
    convert_(student, OdeConfig(time='low_rank', rank=args.rank, init='svd'))
    task = TrajectoryDistillationTask(student, teacher, kd_weight=0.1, verbose=False).train()
    optimizer = create_optimizer_v2(student, opt='muon', lr=1e-3, weight_decay=0.)
    target = torch.zeros(args.batch_size, dtype=torch.long)
    if args.worker == 'cached':
        from timm_odevit.training.cache import record
        target = record(teacher, images, target)
    for _ in sys.stdin:
        started = time.process_time()
        loss = task(images, target)['loss']
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps([time.process_time() - started, loss.item()]), flush=True)


if __name__ == '__main__':
    main()
