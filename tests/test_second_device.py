"""What a user would put on a GPU, on a second device that every machine has, in a process of its own."""
import json
import subprocess
import sys
import traceback
from functools import partial

import pytest
import timm
import torch
from conftest import TINY
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from timm_odevit import convert_, evaluate, with_steps

set_up = getattr(backend_registration, '_setup_privateuseone_for_python_backend', None)
FACTORIES = ('empty.memory_format', 'empty_strided', 'arange', 'arange.start', 'arange.start_step', 'eye', 'eye.m')
CASES = {
    'autonomous': {}, 'rk4': dict(method='rk4'), 'adaptive': dict(method='dopri5', rtol=0.1, atol=0.1), 'lipschitz': dict(field='lipschitz', T=1.),
    'random': dict(init='spectral'), 'phases': dict(phases=2, method='midpoint'), 'tokens': dict(tokens=0.5, phases=2),
    'entropy': dict(halting='entropy', halting_threshold=0.9825, steps=6),
    'entropy and tokens': dict(halting='entropy', halting_threshold=0.9825, steps=6, tokens=0.5),
}


class Elsewhere(torch.Tensor):
    """A tensor on the device 'second': it holds one on the CPU, which only its own operations can reach."""

    @staticmethod
    def __new__(cls, held):
        self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device('second', 0))
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, *args, **kwargs or {})

    def __deepcopy__(self, memo):
        twin = self.detach().clone()
        memo[id(self)] = torch.nn.Parameter(twin, self.requires_grad) if isinstance(self, torch.nn.Parameter) else twin
        return memo[id(self)]

    def data_ptr(self):
        return self.held.data_ptr()

    def tolist(self):
        return self.held.tolist()


class Backend(getattr(backend_registration, '_DummyBackendModule', object)):
    """torch.second: a device with random numbers of its own; `waits` counts what makes the CPU wait for a GPU."""
    state = torch.get_rng_state()
    waits = 0

    def get_rng_state(self, device=None):
        return Backend.state

    def set_rng_state(self, state, device=None):
        Backend.state = state

    def manual_seed(self, seed):
        Backend.state = torch.Generator().manual_seed(seed).get_state()

    manual_seed_all = manual_seed


def run(func, *args, **kwargs):
    """Compute an operation on the CPU, unless it mixes devices as no GPU can."""
    parts = func.decompose(*args, **kwargs)  # in inference mode; else torch has done it
    if parts is not NotImplemented:
        return parts
    given, structure = tree_flatten((args, kwargs))
    there = {id(v.held): v for v in given if isinstance(v, Elsewhere)}
    here = [v for v in given if isinstance(v, torch.Tensor) and not isinstance(v, Elsewhere)]
    indexed = func._overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_)
    Backend.waits += bool(there) and (func._overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero) or (
        indexed and any(i.dtype == torch.bool for i in args[1] if i is not None)))
    written = args[:1] if func._schema.is_mutable else ()
    if func is not torch.ops.aten.copy_.default and any(v.ndim or any(v is w for w in written) for v in here):
        raise RuntimeError(f'{func} mixes a tensor of the CPU with one of the second device')
    target = next((v.type for v in given if isinstance(v, torch.device)), 'second')
    held_args, held_kwargs = tree_unflatten([torch.device('cpu') if isinstance(v, torch.device) else getattr(v, 'held', v)
                                             for v in given], structure)
    random = torch.Tag.nondeterministic_seeded in func.tags
    with torch.random.fork_rng([], random), torch.inference_mode(False), torch.no_grad():  # inference refuses some wrappers
        if random:
            torch.set_rng_state(Backend.state)
        found = func(*held_args, **held_kwargs)
        if random:
            Backend.state = torch.get_rng_state()
        if torch.Tag.inplace_view in func.tags:  # such as squeeze_: the wrapper gets the new shape too
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        return found if target == 'cpu' else tree_map_only(
            torch.Tensor, lambda one: there[id(one)] if id(one) in there else Elsewhere(one), found)


def journey(device, settings):
    """What a user does with a model on a device: the name and the result of each step."""
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', **TINY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    data = torch.randn(6, 3, 16, 16).double(), torch.arange(6) % 5
    model.to(device, torch.double)  # so that only rounding in float64 differs
    images = data[0].to(device)
    yield 'base', model(images)
    torch.manual_seed(0)  # of all devices
    done = convert_(model, **settings)
    waits, logits = Backend.waits, model(images)
    assert Backend.waits - waits <= 5 * ('halting' in settings) or 'rtol' in settings  # one before each later step
    yield 'converted', logits
    yield 'steps of each image', model.blocks.steps_taken
    waits, result = Backend.waits, evaluate(model, data).results[0]
    assert Backend.waits == waits or {'halting', 'rtol'} & {*settings}
    yield 'evaluate', torch.tensor([result.top1, result.loss, result.nfe], device=device)
    yield 'a view with 2 steps', with_steps(model, 2)(images)
    model.blocks.steps = 5
    yield '5 steps', model(images)
    yield 'intermediate states', model.forward_intermediates(images)
    model(images).square().mean().backward()
    yield 'gradients', {name: parameter.grad for name, parameter in model.named_parameters()}
    done.restore()
    yield 'restored', model(images)
    done = convert_(model.cpu())
    model.to(device)
    done.restore()
    yield 'restored after a move', model(images)


def compare(settings):
    """Raise where a journey gives another result on the second device, or one on another device."""
    for (step, expected), (_, found) in zip(journey('cpu', settings), journey('second', settings), strict=True):
        assert {t.device.type for t in tree_leaves(found) if t is not None} <= {'second'}, step
        found = tree_map_only(torch.Tensor, torch.Tensor.cpu, found)
        torch.testing.assert_close(found, expected, msg=lambda text, step=step: f'{step}: {text}')


@pytest.mark.skipif(set_up is None, reason='this torch has no device with a backend in Python')
def test_another_device_gives_the_cpus_answers_and_no_tensor_is_made_on_the_cpu_instead():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == dict.fromkeys(CASES, '')


def main():
    set_up('second', Backend())
    library = torch.library.Library('aten', 'IMPL', 'PrivateUse1')
    for name in FACTORIES:
        packet, _, overload = name.partition('.')
        library.impl(name, partial(run, getattr(getattr(torch.ops.aten, packet), overload or 'default')))
    library.impl('_copy_from', lambda source, into, *_: run(torch.ops.aten.copy_.default, into, source))
    torch.accelerator.synchronize = lambda device: None  # torch's own cannot be given to such a device
    for mixed in (lambda: torch.ones(2, device='second') + torch.ones(2),
                  lambda: torch.zeros(()).add_(torch.ones((), device='second'))):
        with pytest.raises(RuntimeError, match='mixes'):
            mixed()
    failures = dict.fromkeys(CASES, '')
    for name, settings in CASES.items():
        try:
            compare(settings)
        except Exception:
            failures[name] = traceback.format_exc()[-2000:]
    print(json.dumps(failures))


if __name__ == '__main__':
    main()
