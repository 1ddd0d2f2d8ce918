"""The processes of one run, as started by torchrun."""
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from timm.utils import reduce_tensor
from torch import Tensor

from .files import locked


def rank_and_world() -> tuple[int, int]:
    """(0, 1) if there is only one process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def over_processes(x: Tensor) -> Tensor:
    """The mean over all processes of a tensor without a gradient; all processes have equally many images."""
    world = rank_and_world()[1]
    return reduce_tensor(x, world) if world > 1 else x


def in_first_process(do: Callable[[], Any]) -> Any:
    """Call a function in the first process only; all get what it returns, and raise its OSError or ValueError."""
    rank, world = rank_and_world()
    outcome: list[Any] = [None, None]  # what it returned, what it raised
    # NCCL's own group gives up after ten minutes
    patient: Any = dist.new_group(backend='gloo', timeout=timedelta(days=7)) if world > 1 else None
    if rank == 0:
        try:
            outcome[0] = do()
        except (OSError, ValueError) as e:
            outcome[1] = e
    if patient:
        dist.broadcast_object_list(outcome, group=patient)
        dist.destroy_process_group(patient)
    if outcome[1]:
        raise outcome[1]
    return outcome[0]


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Lock a folder, if any, against other runs, which raise OSError; the first process holds the lock."""
    with ExitStack() as stack:
        if folder is not None:
            in_first_process(lambda: stack.enter_context(locked(folder)))
        yield
