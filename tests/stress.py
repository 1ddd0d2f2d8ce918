"""Run the published students from several threads at a time, and interrupt small ones at random moments.

    python tests/stress.py [--threads 8] [--images 1000] [--interrupts 500] [--folder DIR]

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

from timm_odevit import OdeConfig, calibrate_, convert_, merge_, save_pretrained
from timm_odevit.odevit import default_cfgs
from timm_odevit.training.resume import hash_of

COUNTS = (6, 8, 10, 12, 14, 16, 20, 24)


def published():
    return sorted(f'{name}.{tag}' for name, cfgs in default_cfgs.items() if name.startswith('odevit_')
                  for tag, cfg in cfgs.cfgs.items() if cfg.file)


def state_of(*models):
    modules = [module for model in models for module in model.modules()]
    return ([id(p) for model in models for p in model.parameters()],
            [(module.training, [len(value) for name, value in sorted(vars(module).items()) if name.endswith('_hooks')])
             for module in modules],
            [p.requires_grad for model in models for p in model.parameters()],
            [module.config for module in modules if hasattr(module, 'bound_steps')])


def in_threads(work, count):
    ready = threading.Barrier(count)

    def run(i):
        ready.wait()
        with torch.inference_mode():
            return work(i)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def threads(name, images, count):
    model = timm.create_model(name, pretrained=True).eval()
    before, tensors = state_of(model), hash_of(model.state_dict().values())
    batches = images.split(50)

    def answers(steps):
        with model.blocks.at(steps):
            return [model(batch) for batch in batches]
    with torch.inference_mode():
        expected = {steps: answers(steps) for steps in {12, *COUNTS[:count]}}
    for where, chosen in (('K = 12', [12] * count), ('K of its own', COUNTS[:count])):
        found = in_threads(lambda i, chosen=chosen: answers(chosen[i]), count)
        wrong = sum(not torch.equal(a, b) for steps, got in zip(chosen, found) for a, b in zip(got, expected[steps]))
        assert not wrong, f'{name}, {where}: {wrong} batches are wrong'
        assert state_of(model) == before and hash_of(model.state_dict().values()) == tensors
        print(f'{name}: {count} threads x {len(images)} images, {where}: all equal, state unchanged', flush=True)
    if model.blocks.shared.depends_on_time:
        done, one = merge_(model), None
        with torch.inference_mode():
            one = [model(batch) for batch in batches]
        found = in_threads(lambda _: [model(batch) for batch in batches], count)
        assert all(torch.equal(a, b) for got in found for a, b in zip(got, one))
        done.restore()
        assert state_of(model) == before and hash_of(model.state_dict().values()) == tensors
        print(f'{name}: {count} threads x {len(images)} images, merged: all equal, restored', flush=True)


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


def small(**config):
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=32, num_heads=2, depth=3,
                              num_classes=5).eval()
    student = copy.deepcopy(model)
    convert_(student, OdeConfig(**config))
    return student, model


def duration(call):
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interrupts(count, folder):
    images = torch.randn(16, 3, 16, 16)
    for config in (dict(), dict(time='low_rank', rank=2), dict(time='low_rank', rank=2, phases=2, method='rk4')):
        model, _ = small(**config)
        with torch.no_grad():
            expected, before, tensors = model(images), state_of(model), hash_of(model.state_dict().values())
            longest, stopped = duration(lambda model=model: model(images)), 0
            for _ in range(count):
                stopped += interrupted(lambda model=model: model(images), longest)
                assert state_of(model) == before
            assert hash_of(model.state_dict().values()) == tensors and torch.equal(model(images), expected)
        print(f'forward, {config}: {stopped} interrupts of {count} calls, nothing changed', flush=True)

    student, teacher = small(time='low_rank', rank=2)
    student.train()
    student.head.requires_grad_(False)
    before, tensors = state_of(student, teacher), hash_of(teacher.state_dict().values())

    def calibrate():
        calibrate_(student, teacher, images, epochs=(1, 1), batch_size=8, lr=1e-5, unrolled_lr=1e-5, progress=False)
    longest, stopped = duration(calibrate), 0
    for _ in range(count):
        stopped += interrupted(calibrate, longest)
        now = state_of(student, teacher)
        assert now == before, [(a, b) for x, y in zip(now, before) for a, b in zip(x, y) if a != b]
    assert hash_of(teacher.state_dict().values()) == tensors
    print(f'calibrate_: {stopped} interrupts of {count} calls; teacher, modes, hooks and flags unchanged', flush=True)

    target, stopped = Path(folder) / 'model', 0
    models = [small(time='low_rank', rank=rank)[0] for rank in (2, 3)]
    with torch.no_grad():
        answers = [model(images) for model in models]
    save_pretrained(models[0], target)
    longest, seen = duration(lambda: save_pretrained(models[0], target)), [0, 0]
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
    save_pretrained(models[0], target)
    left = sorted(path.relative_to(target).as_posix() for path in target.rglob('*'))
    assert set(left) == {'config.json', 'model.safetensors'}, left
    assert [path.name for path in Path(folder).iterdir()] == ['model']
    print(f'save_pretrained: {stopped} interrupts of {count} calls; the one or the other model each time {tuple(seen)}, '
          'no leftovers', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--threads', type=int, default=8)
    parser.add_argument('--images', type=int, default=1000)
    parser.add_argument('--interrupts', type=int, default=500)
    parser.add_argument('--folder', help='an empty folder for what is saved; by default a temporary one')
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.interrupts:
        with tempfile.TemporaryDirectory() as temporary:
            interrupts(args.interrupts, args.folder or temporary)
    if args.images:
        images = torch.randn(args.images, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        for name in published():
            threads(name, images, args.threads)


if __name__ == '__main__':
    main()
