"""Modules that own nothing: a module's structure, settings and hooks, with other tensors in it.

A model that runs must not be changed, for another thread may run it too. Where a module has to run with other weights,
a skeleton is made for that call, filled, used and dropped.
"""
import copy
from collections import OrderedDict
from typing import Any, Dict, Mapping, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ['copy_without_hooks', 'run_with', 'skeleton']

Module = TypeVar('Module', bound=nn.Module)


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], *args: Any) -> Any:
    """Call a module with other tensors in it; see `skeleton`."""
    if torch.compiler.is_dynamo_compiling():  # simulates the exchange of tensors; before 2.13, it makes no modules
        return functional_call(module, dict(tensors), args, tie_weights=False)
    return skeleton(module, tensors)(*args)


def skeleton(module: Module, tensors: Mapping[str, Tensor]) -> Module:
    """A module of the same structure that runs with other tensors; takes microseconds, copies nothing.

    Settings, hooks and all that is not replaced are shared with the module, which stays as it is.

    Args:
        module: Any module.
        tensors: Tensors for its parameters and buffers, by their name in the module ('attn.qkv.weight').

    Returns:
        A module of the same class. What is replaced in it is an attribute, not a parameter: gradients flow through it.

    Raises:
        RuntimeError: A module in question has a `forward` of its own, tied to itself, such as some wrappers put there.
    """
    if 'forward' in module.__dict__:
        raise RuntimeError(
            f'This {type(module).__name__} has had its forward replaced, so it cannot run with other weights. Take the '
            'wrapper off, or call merge_(model) before it is put on.')
    twin: Any = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__['_compiled_call_impl'] = None  # module.compile() ties it to the module
    for kind in ('_parameters', '_buffers', '_modules'):
        twin.__dict__[kind] = module.__dict__[kind].copy()
    below: Dict[str, Dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, dot, rest = name.partition('.')
        if dot:
            below.setdefault(first, {})[rest] = tensor
        elif first in twin._buffers:
            twin._buffers[first] = tensor
        else:
            twin._parameters[first] = tensor
            twin.__dict__.pop(first, None)  # where a replica of DataParallel has it
    for first, inner in below.items():
        twin._modules[first] = skeleton(module._modules[first], inner)  # type: ignore[type-var]
    return twin


def copy_without_hooks(module: Module) -> Module:
    """A deep copy. Hooks stay behind: they belong to what they were put on, and may hold what cannot be copied."""
    memo: Dict[int, Any] = {}
    for inner in module.modules():
        memo.update({id(value): OrderedDict() for name, value in vars(inner).items()
                     if '_hooks' in name and isinstance(value, dict)})
    return copy.deepcopy(module, memo)
