"""Hooks and modes that last for a while, and what they show of a model that runs."""
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from torch import Tensor, nn

__all__ = ['Seen', 'evaluating', 'hooked', 'surely', 'watch_blocks']

# states before the first and after each block, and what the host handed to each, positional and by keyword
Seen = Tuple[List[Tensor], List[Tuple[Tuple[Any, ...], Dict[str, Any]]]]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode meanwhile, and every module's own mode after it. What is in eval mode already is not touched."""
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
    """Hooks on modules meanwhile.

    Args:
        hooks: Module, kind ('before', 'before with keywords' or 'after' its forward) and function, for each. What is
            taken off again is found by the function, so each needs one of its own.
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
    """Clean up, which may be done twice; an interrupt in the middle of it comes after all is done."""
    try:
        clean_up()
    except BaseException:
        clean_up()
        raise


@contextmanager
def watch_blocks(runs: Sequence[Sequence[nn.Module]]) -> Iterator[List[Seen]]:
    """While a model runs in this thread, note what passes through its blocks.

    Args:
        runs: Sequences of consecutive blocks.

    Returns:
        A context manager; it gives a list that holds for each sequence, once the model has run: the states before its
        first and after each of its blocks, and what the host handed to each of them, positional and by keyword.
    """
    seen: List[Any] = [([], []) for _ in runs]
    thread = get_ident()  # hooks see what other threads do with the model, too

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
