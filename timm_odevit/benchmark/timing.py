"""Calls that take turns, and the peak of what a call allocates."""
import os
import time
from contextlib import AbstractContextManager
from typing import Any, Callable, Dict, List, Tuple

import torch
from tqdm import tqdm

from ..evaluation.passes import wait_for

__all__ = ['free_memory', 'in_turns', 'peak_of']

Call = Callable[[], Any]
Setting = Callable[[], AbstractContextManager]


def in_turns(
        calls: Dict[str, Tuple[Call, Setting]], rounds: int, warm_up: int, device: str, progress: bool = False,
) -> Dict[str, List[float]]:
    """Time calls, which take turns in every round, so that a change in the machine's speed affects all of them.

    Args:
        calls: For each name, what is timed, and a context that is entered before it, whose time does not count.
        rounds: Rounds after those of the warm-up.
        warm_up: Rounds that do not count.
        device: Device, which is waited for.
        progress: Show a progress bar.

    Returns:
        Seconds of each call, in the order of the rounds.
    """
    times: Dict[str, List[float]] = {name: [] for name in calls}
    for _ in tqdm(range(warm_up + rounds), unit='round', leave=False, disable=not progress):
        for name, (call, setting) in calls.items():
            with setting():
                wait_for(device)
                start = time.perf_counter()
                call()
                wait_for(device)
                times[name].append(time.perf_counter() - start)
    return {name: seconds[warm_up:] for name, seconds in times.items()}


def peak_of(call: Call, device: str) -> int:
    """Peak memory in bytes that a call allocates; it must have run once before."""
    if device.startswith('cuda'):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == '[memory]':
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def free_memory(device: str) -> int:
    """Bytes that are free on a device.

    Raises:
        ValueError: The operating system does not say.
    """
    if device.startswith('cuda'):
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (AttributeError, OSError, ValueError):
        raise ValueError('This operating system does not say how much memory is free, so the largest batch is not '
                         'known. Give numbers, such as --batch-size 1,64.') from None
