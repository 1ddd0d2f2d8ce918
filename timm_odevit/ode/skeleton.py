"""Skeletons: modules with the structure, settings and hooks of another module, but with other tensors.

A running model must not be changed, because another thread may be running it too.
"""
import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ['copy_module', 'run_with', 'shallow_copy', 'skeleton', 'tied_to']

Module = TypeVar('Module', bound=nn.Module)


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], *args: Any) -> Any:
    """Call a module with other tensors; see `skeleton`."""
    if torch.compiler.is_compiling():  # the swap is simulated; before PyTorch 2.13, Dynamo creates no modules
        return functional_call(module, dict(tensors), args, tie_weights=False)
    return skeleton(module, tensors)(*args)


def skeleton(module: Module, tensors: Mapping[str, Tensor]) -> Module:
    """Create a module of the same class that runs with other tensors; takes microseconds, copies nothing.

    `tensors` are for its parameters and buffers, by name ('attn.qkv.weight'). Everything else is shared with the
    original, which does not change. Replaced tensors are not Parameters: gradients flow through them.
    """
    twin: Any = shallow_copy(module)
    for kind in ('_parameters', '_buffers'):
        twin.__dict__[kind] = module.__dict__[kind].copy()
    below: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, dot, rest = name.partition('.')
        if dot:
            below.setdefault(first, {})[rest] = tensor
        elif first in twin._buffers:
            twin._buffers[first] = tensor
        else:
            twin._parameters[first] = tensor
    for first, inner in below.items():
        twin._modules[first] = skeleton(module._modules[first], inner)  # type: ignore[type-var]
    return twin


def shallow_copy(module: Module) -> Module:
    """A module of the same class with the same settings, hooks and tensors, but submodules that can be replaced."""
    twin: Any = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    if 'forward' in module.__dict__:
        twin.__dict__.update({name: tied_to(twin, module, value) for name, value in module.__dict__.items()})
        if twin.__dict__['forward'] is module.__dict__['forward']:
            raise RuntimeError(
                f'The forward of this {type(module).__name__} was replaced by a function, which may use the weights of '
                'the module it was made for. Use a method, a functools.partial that takes the module, or a hook.')
    twin.__dict__['_compiled_call_impl'] = None  # module.compile() ties it to the original module
    twin.__dict__['_modules'] = module.__dict__['_modules'].copy()
    return twin


def tied_to(twin: Any, module: Any, value: Any) -> Any:
    """Rebind a method of a module, or a partial that takes it (Accelerate's), to its twin; return others as is."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    if isinstance(value, partial) and any(arg is module for arg in value.args):
        return partial(value.func, *(twin if arg is module else arg for arg in value.args), **value.keywords)
    return value


def copy_module(module: Module, hooks: bool) -> Module:
    """Deep-copy everything but the hooks, which may hold what cannot be copied: the copy shares them, or has none."""
    memo: dict[int, Any] = {}
    for inner in module.modules():
        memo.update({id(value): value.copy() if hooks else OrderedDict() for name, value in vars(inner).items()
                     if '_hooks' in name and isinstance(value, dict)})
    return copy.deepcopy(module, memo)
