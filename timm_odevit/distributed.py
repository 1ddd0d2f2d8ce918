"""Several processes of one run, as torchrun starts them."""
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch.distributed as dist
from timm.utils import reduce_tensor
from torch import Tensor

from .files import locked

__all__ = ['alone_in', 'in_first_process', 'over_processes', 'rank_and_world']


def rank_and_world() -> Tuple[int, int]:
    """This process's number, and the number of processes: (0, 1) where there is one."""
    running = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if running else (0, 1)


def over_processes(x: Tensor) -> Tensor:
    """The mean of a tensor without a gradient over all processes, each of which has as many images."""
    world = rank_and_world()[1]
    return reduce_tensor(x, world) if world > 1 else x


def in_first_process(do: Callable[[], Any]) -> None:
    """Do something in the first process only. What it refuses with OSError or ValueError, all processes refuse."""
    rank, world = rank_and_world()
    refused: List[Any] = [None]
    if rank == 0:
        try:
            do()
        except (OSError, ValueError) as e:
            refused = [e]
    if world > 1:
        dist.broadcast_object_list(refused)
    if refused[0] is not None:
        raise refused[0]


@contextmanager
def alone_in(folder: Optional[Path]) -> Iterator[None]:
    """Let no other run use a folder; of several processes of one run, the first has the lock. None is no folder.

    Raises:
        OSError: Another run uses it, or it cannot be written to.
    """
    with ExitStack() as stack:
        if folder is not None:
            in_first_process(lambda: stack.enter_context(locked(folder)))
        yield
