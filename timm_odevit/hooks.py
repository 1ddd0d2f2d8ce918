"""Hooks, modes and random states that change for a while and are restored."""
import random
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Tuple, Union

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ['evaluating', 'hooked', 'on_meta', 'random_states_kept', 'surely']

_INITIALISES = {'add_', 'clamp_', 'div_', 'erfinv_', 'fill_', 'mul_', 'normal_', 'sub_', 'uniform_', 'zero_',
                *(name for name in dir(nn.init) if name.endswith('_') and not name.startswith('_'))}


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on the meta device, without the arithmetic of their initialisation, which takes longest there."""
    with torch.device('meta'), _Uninitialised():
        yield


class _Uninitialised(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, '__name__', '') in _INITIALISES:
            tensor = args[0] if args else kwargs.get('tensor')
            if getattr(tensor, 'is_meta', False):
                return tensor
        return func(*args, **kwargs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Temporary eval mode; every module gets its own mode back. Modules already in eval mode are not touched."""
    training = [module for module in model.modules() if module.training]

    def put_back() -> None:
        for module in training:
            module.training = True
    try:
        if training:
            model.eval()
        yield
    finally:
        surely(put_back)


@contextmanager
def random_states_kept(device: Union[str, torch.device]) -> Iterator[None]:
    """Restore the global random states afterwards: those of Python, of NumPy, and of torch on the CPU and a device."""
    device = torch.device(device)
    others = {} if device.type in ('cpu', 'meta') else {'device_type': device.type}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if others else [], **others):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def hooked(*hooks: Tuple[nn.Module, str, Callable[..., Any]]) -> Iterator[None]:
    """Temporary hooks on modules.

    Args:
        hooks: Module, kind ('before', 'before with keywords' or 'after' its forward) and function of each hook. Hooks
            are identified by function for removal, so each needs a function of its own.
    """
    def take_off() -> None:
        for module, _, function in hooks:
            for kind in ('_forward_pre_hooks', '_forward_hooks'):
                for key, found in list(getattr(module, kind).items()):
                    if found is function:
                        getattr(module, kind).pop(key, None)
                        getattr(module, f'{kind}_with_kwargs').pop(key, None)
    try:
        for module, kind, function in hooks:
            if kind == 'after':
                module.register_forward_hook(function)
            else:
                module.register_forward_pre_hook(function, with_kwargs=kind == 'before with keywords')
        yield
    finally:
        surely(take_off)


def surely(clean_up: Callable[[], Any]) -> None:
    """Clean up completely: if interrupted, run `clean_up` again, then raise the interrupt."""
    try:
        clean_up()
    except BaseException:
        clean_up()
        raise
