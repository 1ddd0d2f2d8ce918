"""The sequences of blocks that a student's states follow: one of the whole model, or one per stage."""
from itertools import pairwise
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..convert.block_kinds import find_sites
from ..ode.blocks import OdeBlocks
from ..recording import state_at
from .config import LossConfig
from .layer_times import distance_times, match, uniform_times

__all__ = ['Run', 'runs_of']


class Run:
    """One sequence of the teacher's blocks, and when a student's OdeBlocks in its place is to reach its states.

    Attributes:
        blocks: The teacher's blocks.
        times: Relative times in (0, 1] of the states after them.
    """

    def __init__(self, blocks: List[nn.Module], times: List[float]) -> None:
        self.blocks, self.times = blocks, times

    def span(self, ode: OdeBlocks) -> Tuple[int, List[float]]:
        """The first converted layer, and the times of the converted layers, relative to their run."""
        first, last = ode.config.span(len(self.times))
        start = self.times[first - 1] if first else 0.
        return first, [(time - start) / (self.times[last] - start) for time in self.times[first:last + 1]]

    def pairs(self, ode: OdeBlocks) -> List[Tuple[float, int]]:
        """Relative times at which the student is compared, and the indices in its blocks of the steps ending there."""
        first, run = self.span(ode)
        count = ode.steps
        return [((step + 1) / count, first + step) for _, step in match(run, count)]

    def target(self, ode: OdeBlocks, states: Sequence[Tensor], t: float) -> Tensor:
        """The teacher's state at a relative time, from its states before the first and after each block."""
        first, run = self.span(ode)
        return state_at(states[first:], [0., *run], t)

    def forced(self, ode: OdeBlocks, states: Sequence[Tensor], segments: int) -> Dict[int, Tensor]:
        """The teacher's states from which segments start, by the index in the blocks of the step that starts there."""
        count = ode.steps
        segments = min(segments, count)
        places = [round(i * count / segments) for i in range(1, segments)]
        return {self.span(ode)[0] + place: self.target(ode, states, place / count) for place in places}


def runs_of(
        teacher: nn.Module, config: LossConfig, calibration: Optional[Iterable[Tensor]], device: torch.device,
) -> List[Run]:
    """The sequences of a teacher's blocks, with the times that the settings give.

    Raises:
        ValueError: The times do not suit the teacher.
    """
    sites = find_sites(teacher)
    if len(sites) > 1 and config.checkpoints != 'uniform':
        raise ValueError(
            f'checkpoints={config.checkpoints!r} applies to models with one sequence of blocks, but a '
            f"{type(teacher).__name__} has {len(sites)} stages. Set checkpoints='uniform'.")
    return [Run(site.blocks, _times(site.blocks, teacher, config, calibration, device)) for site in sites]


def _times(blocks: List[Any], teacher: Any, config: LossConfig, calibration: Any, device: torch.device) -> List[float]:
    if config.checkpoints == 'uniform':
        return uniform_times(len(blocks))
    if config.checkpoints == 'distance':
        batches = (images.to(device) for images in calibration or ())
        return distance_times(teacher, batches, config.checkpoint_temperature)
    times: List[float] = list(config.checkpoints)  # type: ignore[arg-type]
    increasing = all(a < b for a, b in pairwise([0., *times]))
    if len(times) != len(blocks) or not increasing or times[-1] > 1.:
        raise ValueError(
            f'checkpoints must be {len(blocks)} strictly increasing times in (0, 1], one for each layer of the '
            f'teacher; got {times}.')
    return times
