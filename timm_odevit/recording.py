"""Recording: the hidden states of a model while it runs, and what its blocks are passed."""
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from torch import Tensor, nn

from .hooks import hooked

__all__ = ['Seen', 'watch_blocks']

# states before the first and after each block, and what the host passed to each, positional and by keyword
Seen = Tuple[List[Tensor], List[Tuple[Tuple[Any, ...], Dict[str, Any]]]]


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
