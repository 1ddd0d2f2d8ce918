"""Recording: the hidden states of a model while it runs, what its blocks are passed, and states between them."""
from bisect import bisect_right
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from .hooks import hooked

__all__ = ['Seen', 'state_at', 'watch_blocks']

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


def state_at(states: Sequence[Tensor], times: Sequence[float], t: float) -> Tensor:
    """The state at a time, interpolated linearly between those recorded.

    Args:
        states: Two or more states.
        times: Their times, strictly increasing.
        t: Time from the first to the last of them.
    """
    right = min(max(bisect_right(times, t + 1e-6), 1), len(times) - 1)
    share = min((t - times[right - 1]) / (times[right] - times[right - 1]), 1.)
    if share < 1e-5:
        return states[right - 1]
    return states[right] if share > 1 - 1e-5 else torch.lerp(states[right - 1], states[right], share)
