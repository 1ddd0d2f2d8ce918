"""Skeletons: modules with the structure, settings and hooks of another module, but with other tensors or submodules.

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

__all__ = ['copy_module', 'run_with', 'shallow_copy', 'skeleton', 'view']

Module = TypeVar('Module', bound=nn.Module)


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], *args: Any) -> Any:
    """Call a module with other tensors; see `skeleton`."""
    if torch.compiler.is_compiling():  # the swap is simulated; before PyTorch 2.13, Dynamo creates no modules
        return functional_call(module, dict(tensors), args, tie_weights=False)
    return skeleton(module, tensors)(*args)


def skeleton(module: Module, tensors: Mapping[str, Tensor]) -> Module:
    """A module of the same class with other parameters and buffers, by name; takes microseconds, copies nothing.

    Everything else is shared with the original. Replaced tensors are not Parameters: gradients flow through them.
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
        twin.__dict__.update(_rebound(module, module, twin))
        if twin.__dict__['forward'] is module.__dict__['forward']:
            raise RuntimeError(
                f'The forward of this {type(module).__name__} was replaced by a function, which may use the weights of '
                'the module it was made for. Use a method, a functools.partial that takes the module, or a hook.')
    twin.__dict__['_compiled_call_impl'] = None  # module.compile() ties it to the original module
    twin.__dict__['_modules'] = module.__dict__['_modules'].copy()
    return twin


def view(module: Any, twins: Mapping[Any, Any]) -> Any:
    """A shallow copy of a module in which some modules are replaced by twins; the module itself if it has none."""
    if module in twins:
        return twins[module]
    children = {name: view(child, twins) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copied = shallow_copy(module)
    copied._modules.update(children)
    for original, twin in twins.items():
        twin.__dict__.update(_rebound(twin, module, copied))
        if module.__dict__.get('feature_info') is original.feature_info:
            copied.feature_info = twin.feature_info
    for name, child in children.items():  # some are bound to their host, such as RoPE, which makes a table per step
        if child is module._modules[name] and (bound := _rebound(child, module, copied)):
            copied._modules[name] = shallow_copy(child)
            copied._modules[name].__dict__.update(bound)
    return copied


def _rebound(owner: Any, module: Any, twin: Any) -> dict[str, Any]:
    """The attributes of an owner that are methods of a module or partials that take it (Accelerate's), for its twin."""
    bound: dict[str, Any] = {}
    for name, value in owner.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            bound[name] = MethodType(value.__func__, twin)
        elif isinstance(value, partial) and any(arg is module for arg in value.args):
            args = [twin if arg is module else arg for arg in value.args]
            bound[name] = partial(value.func, *args, **value.keywords)
    return bound


def copy_module(module: Module, hooks: bool) -> Module:
    """Deep-copy everything but the hooks, which may hold what cannot be copied: the copy shares them, or has none."""
    memo: dict[int, Any] = {}
    for inner in module.modules():
        memo.update({id(value): value.copy() if hooks else OrderedDict() for name, value in vars(inner).items()
                     if '_hooks' in name and isinstance(value, dict)})
    return copy.deepcopy(module, memo)
