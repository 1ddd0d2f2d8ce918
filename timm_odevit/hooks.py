"""What running a model takes: hooks, modes, random states and precision; its hidden states."""
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

AMP_DTYPES = {None: None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}  # by the names that settings use
_USERS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by module, how many need it in eval mode
_LOCK = Lock()
_INITIALISES = {'add_', 'clamp_', 'div_', 'erfinv_', 'fill_', 'mul_', 'sub_', 'zero_',
                *(name for name in dir(nn.init) if name.endswith('_') and not name.startswith('_'))}


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on the meta device, without the arithmetic of their initialisation, which takes longest."""
    with torch.device('meta'), _Uninitialised():
        yield


class _Uninitialised(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else (kwargs or {}).get('tensor')
        if getattr(func, '__name__', '') in _INITIALISES and getattr(tensor, 'is_meta', False):
            return tensor
        return func(*args, **kwargs or {})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Temporary eval mode; of several threads inside at once, the last to leave a module puts its own mode back."""
    with _LOCK:
        modules = [module for module in model.modules() if module.training or module in _USERS]
        for module in modules:
            _USERS[module] = _USERS.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                _USERS[module] -= 1
                if not _USERS[module]:
                    del _USERS[module]
                    module.training = True


@contextmanager
def lent(model: nn.Module | None) -> Iterator[None]:
    """Temporary eval mode of a model, if any; afterwards also restore which of its parameters are trainable."""
    model = model or nn.Identity()
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with evaluating(model):
            yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


def autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def random_states_kept(device: str | torch.device) -> Iterator[None]:
    """Those of Python, of NumPy, and of torch on the CPU and a device."""
    device = torch.device(device)
    other = device.type not in ('cpu', 'meta')
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] * other, device_type=device.type if other else 'cuda'):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def described(value: Any) -> str:
    return f'{value.dtype} {list(value.shape)}' if isinstance(value, Tensor) else type(value).__name__


def check_images(images: Any) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point() or not images.numel():
        raise ValueError('images must be a floating-point tensor [N, C, H, W], normalised for the model; got '
                         f'{described(images)}.')
    if not images.is_meta and not torch.stack(images.aminmax()).isfinite().all():
        raise ValueError('images must be finite.')


# states before the first and after each block, and what the host passed to each, positional and by keyword
BlockRecord = tuple[list[Tensor], list[tuple[tuple[Any, ...], dict[str, Any]]]]


@contextmanager
def watch_blocks(stages: Sequence[Sequence[nn.Module]]) -> Iterator[list[BlockRecord]]:
    """Yield a list that a run of the model in this thread fills with a BlockRecord for each sequence of blocks."""
    thread = get_ident()  # hooks also fire when other threads run the model

    def note(record: BlockRecord, _: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        states, passed = record
        if get_ident() == thread:
            states += [out] if states else [args[0], out]
            passed.append((args[1:], kwargs))
    records: list[BlockRecord] = [([], []) for _ in stages]
    with ExitStack() as hooks:
        for blocks, record in zip(stages, records, strict=True):
            for block in blocks:
                hooks.enter_context(block.register_forward_hook(partial(note, record), with_kwargs=True))
        yield records
