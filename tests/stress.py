"""Run the published students from several threads at a time, and interrupt small ones at random moments.

    python tests/stress.py [--threads 8] [--images 1000] [--interrupts 500]

Prints what was tried and how often; stops with an error at the first answer, tensor, hook, mode or file that is not as it
was. Not part of the test suite, which does the same with less (tests/test_shared_state.py): it takes minutes.
"""
import argparse
import copy
import os
import random
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import timm
import torch

from timm_odevit import calibrate_, convert_, merge_, save_pretrained, with_steps
from timm_odevit.ode.blocks import find_ode_blocks
from timm_odevit.registry import default_cfgs

COUNTS = (6, 8, 10, 12, 14, 16, 20, 24)


def published():
    return sorted(f'{name}.{tag}' for name, cfgs in default_cfgs.items() if name.startswith('odevit_')
                  for tag, cfg in cfgs.cfgs.items() if cfg.file)


def state_of(*models):
    """What a call must leave as it is, except for the values of weights."""
    modules = [module for model in models for module in model.modules()]
    return ([(id(p), p.requires_grad) for model in models for p in model.parameters()],
            [(module.training, [len(value) for name, value in sorted(vars(module).items()) if name.endswith('_hooks')])
             for module in modules], [ode.config for model in models for ode in find_ode_blocks(model)])


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_weights(model, before):
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def threads(name, total, count):
    """Each thread has a view with a K of its own; all get what one thread alone gets."""
    model = timm.create_model(name, pretrained=True).eval()
    batches = torch.randn(total, 3, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(0)).split(50)
    before, weights, ready = state_of(model), weights_of(model), threading.Barrier(count)

    @torch.inference_mode()
    def answers(run):
        return [run(batch) for batch in batches]

    def together(runs):
        def work(run):
            ready.wait()
            return answers(run)
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(work, runs))
    for what, runs in (('K = 12', [with_steps(model, 12)] * count),
                       ('K of its own', [with_steps(model, K) for K in COUNTS[:count]])):
        for found, expected in zip(together(runs), [answers(run) for run in runs]):
            assert all(torch.equal(a, b) for a, b in zip(found, expected)), f'{name}, {what}'
        print(f'{name}: {count} threads x {total} images, {what}: all equal', flush=True)
    if model.blocks.shared.depends_on_time:
        done = merge_(model)
        expected = answers(model)
        for found in together([model] * count):
            assert all(torch.equal(a, b) for a, b in zip(found, expected)), f'{name}, merged'
        done.restore()
        print(f'{name}: {count} threads x {total} images, merged: all equal, restored', flush=True)
    assert state_of(model) == before
    check_weights(model, weights)


def interrupted(call, longest):
    """Whether a call was interrupted, at a random moment of its first `longest` seconds."""
    def stop(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, longest))
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        torch.set_grad_enabled(True)  # torch's own no_grad does not survive an interrupt in its __enter__ or __exit__
        return True
    return False


def duration(call):
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def small(**config):
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=3,
                              num_classes=5).eval()
    student = copy.deepcopy(model)
    convert_(student, **config)
    return student, model


def interrupt_forward(count, images):
    for config in (dict(), dict(time='low_rank', rank=2), dict(time='low_rank', rank=2, phases=2, method='rk4')):
        model, _ = small(**config)
        with torch.no_grad():
            expected, before, weights = model(images), state_of(model), weights_of(model)
            longest, stopped = duration(lambda model=model: model(images)), 0
            for _ in range(count):
                stopped += interrupted(lambda model=model: model(images), longest)
                assert state_of(model) == before
            assert torch.equal(model(images), expected)
        check_weights(model, weights)
        print(f'forward, {config}: {stopped} interrupts of {count} calls, nothing changed', flush=True)


def interrupt_calibrate(count, images):
    student, teacher = small(time='low_rank', rank=2)
    student.train()
    student.head.requires_grad_(False)
    before, weights = state_of(student, teacher), weights_of(teacher)

    def calibrate():
        calibrate_(student, teacher, images, epochs=(1, 1), batch_size=8, lr=1e-5, unrolled_lr=1e-5, progress=False)
    longest, stopped = duration(calibrate), 0
    for _ in range(count):
        stopped += interrupted(calibrate, longest)
        assert state_of(student, teacher) == before
    check_weights(teacher, weights)
    print(f'calibrate_: {stopped} interrupts of {count} calls; teacher, modes, hooks and flags unchanged', flush=True)


def interrupt_save(count, images, folder):
    models, target, stopped, seen = [small(time='low_rank', rank=rank)[0] for rank in (2, 3)], folder / 'model', 0, [0, 0]
    longest = duration(lambda: save_pretrained(models[0], target))
    with torch.no_grad():
        answers = [model(images) for model in models]
    for i in range(count):
        child = os.fork()  # torch's own modes (the meta device) do not survive every interrupt
        if not child:
            try:
                os._exit(3 if interrupted(lambda i=i: save_pretrained(models[i % 2], target), longest) else 0)
            finally:
                os._exit(3)
        stopped += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        with torch.no_grad():
            found = timm.create_model(f'local-dir:{target}', pretrained=True).eval()(images)
        which = [torch.equal(found, answer) for answer in answers]
        assert sum(which) == 1, 'the folder holds neither the old nor the new model'
        seen[which.index(True)] += 1
    print(f'save_pretrained: {stopped} interrupts of {count} calls; the one or the other model each time {tuple(seen)}', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--threads', type=int, default=8)
    parser.add_argument('--images', type=int, default=1000)
    parser.add_argument('--interrupts', type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.interrupts:
        images = torch.randn(16, 3, 16, 16)
        interrupt_forward(args.interrupts, images)
        interrupt_calibrate(args.interrupts, images)
        with tempfile.TemporaryDirectory() as folder:
            interrupt_save(args.interrupts, images, Path(folder))
    for name in published() if args.images else ():
        threads(name, args.images, args.threads)


if __name__ == '__main__':
    main()
