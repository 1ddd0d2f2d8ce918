"""Temporary hooks and modes, and what hooks record while a model runs."""
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from torch import Tensor, nn

__all__ = ['Seen', 'evaluating', 'hooked', 'surely', 'watch_blocks']

# states before the first and after each block, and what the host passed to each, positional and by keyword
Seen = Tuple[List[Tensor], List[Tuple[Tuple[Any, ...], Dict[str, Any]]]]


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


@contextmanager
def watch_blocks(runs: Sequence[Sequence[nn.Module]]) -> Iterator[List[Seen]]:
    """Record what passes through a model's blocks while it runs in this thread.

    Args:
        runs: Sequences of consecutive blocks.

    Returns:
        A context manager that yields a list. Once the model has run, it holds for each sequence the states before its
        first and after each of its blocks, and what the host passed to each block, positional and by keyword.
    """
    seen: List[Any] = [([], []) for _ in runs]
    thread = get_ident()  # hooks also fire when other threads run the model

    def before(i: int):
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if get_ident() == thread:
                if not seen[i][0]:
                    seen[i][0].append(args[0])
                seen[i][1].append((args[1:], kwargs))
        return hook

    def after(i: int):
        def hook(_: nn.Module, args: Any, out: Tensor) -> None:
            if get_ident() == thread:
                seen[i][0].append(out)
        return hook
    hooks: List[Any] = []
    for i, blocks in enumerate(runs):
        for block in blocks:
            hooks += [(block, 'before with keywords', before(i)), (block, 'after', after(i))]
    with hooked(*hooks):
        yield seen
