"""What a user would put on a GPU, on a second device that every machine has; it runs in a process of its own."""
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
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from timm_odevit import convert_, evaluate, merge_, with_steps

SET_UP = '_setup_privateuseone_for_python_backend'
SETTINGS = {
    'lie_trotter': {}, 'rk4': dict(method='rk4'), 'strang': dict(method='strang'), 'dopri5': dict(method='dopri5'),
    'kept blocks': dict(blocks=(1, 1)), 'lipschitz': dict(field='lipschitz', T=1.), 'vectors': dict(time='vectors'),
    'low_rank': dict(time='low_rank', rank=2), 'low_rank rk4': dict(time='low_rank', rank=2, method='rk4'),
    'svd_data': dict(time='low_rank', rank=4, init='svd_data'), 'spectral': dict(init='spectral'),
    'similarity': dict(phases=2, boundaries='similarity'),
    'tokens': dict(tokens=0.5), 'tokens low_rank': dict(tokens=0.5, time='low_rank', rank=2),
    **{f'{rule} {tokens:g}': dict(halting=rule, halting_threshold=threshold, tokens=tokens, steps=6)
       for rule, threshold in (('residual', 0.3), ('acceleration', 0.3), ('entropy', 0.8), ('confidence', 0.6)) for tokens in (1., 0.5)},
}


class Elsewhere(torch.Tensor):
    """A tensor on the device 'second': nothing but its operations can read the one that it holds, on the CPU."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device('second', 0))

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, *args, **kwargs or {})

    def __deepcopy__(self, memo):
        copied = self.detach().clone()
        memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied
        return memo[id(self)]

    def data_ptr(self):
        return self.held.data_ptr()

    def tolist(self):
        return self.held.tolist()


class Backend:
    """torch.second: a device whose random numbers are not the CPU's."""
    generator = torch.Generator()
    current_device, device_count = lambda self: 0, lambda self: 1
    is_available = is_initialized = lambda self: True
    _is_in_bad_fork = lambda self: False

    def get_rng_state(self, device=None):
        return self.generator.get_state()

    def set_rng_state(self, state, device=None):
        self.generator.set_state(state)

    def manual_seed(self, seed):
        self.generator.manual_seed(seed)
    manual_seed_all = manual_seed


def run(func, *args, **kwargs):
    """Compute an operation on the CPU, unless it would mix devices as no GPU can."""
    parts = func.decompose(*args, **kwargs)  # as without inference mode, such as a `to` with two devices
    if parts is not NotImplemented:
        return parts
    given, structure = tree_flatten((args, kwargs))
    for i, value in enumerate(given):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and func is not torch.ops.aten.copy_.default:
            if value.ndim or (func._schema.is_mutable and i == 0):
                raise RuntimeError(f'{func} mixes the CPU with the second device')
    there = {id(value.held): value for value in given if isinstance(value, Elsewhere)}
    held = [value.held if isinstance(value, Elsewhere) else value for value in given]
    to = next((value for value in given if isinstance(value, torch.device)), torch.device('second'))
    args, kwargs = tree_unflatten([torch.device('cpu') if isinstance(v, torch.device) else v for v in held], structure)
    if any(argument.name == 'generator' for argument in func._schema.arguments):
        kwargs['generator'] = Backend.generator
    found = func(*args, **kwargs)
    return found if to.type == 'cpu' else tree_map_only(
        torch.Tensor, lambda one: there[id(one)] if id(one) in there else Elsewhere(one), found)


def journey(device, settings):
    """What a user does with a model on a device; the name and the result of each step."""
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', **TINY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    images, labels = torch.randn(6, 3, 16, 16), torch.arange(6) % 5
    here = images.to(device)
    model.to(device)
    yield 'base', model(here)
    done = convert_(model, images=here if {'init', 'boundaries'} & set(settings) else None, **settings)
    yield 'forward', model(here)
    yield 'steps of each image', model.blocks.steps_taken
    found = evaluate(model, (images, labels), steps=(2, 3))
    yield 'evaluate', torch.tensor([[each.top1, each.loss, each.nfe] for each in found], device=device)
    yield 'with_steps', with_steps(model, 2)(here)
    model.blocks.steps = 5
    yield 'steps', model(here)
    yield 'forward_intermediates', model.forward_intermediates(here)
    model(here).square().mean().backward()
    yield 'gradients', {name: parameter.grad for name, parameter in model.named_parameters()}
    if model.blocks.shared.depends_on_time:
        merged = merge_(model)
        yield 'merge_', model(here)
        merged.restore()
        yield 'restored from merge_', model(here)
    done.restore()
    yield 'restored', model(here)
