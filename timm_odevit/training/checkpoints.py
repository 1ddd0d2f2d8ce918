"""Where on [0, T] the teacher's layers lie, and which of the student's steps is matched to which layer."""
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..convert.block_kinds import find_stages
from ..hooks import evaluating, state_at, watch_blocks
from ..ode.blocks import OdeBlocks
from .config import LossConfig

__all__ = ['TeacherStage', 'distance_times', 'hidden_states', 'match', 'softmax_times', 'teacher_stages',
           'uniform_times']


class TeacherStage:
    """One sequence of the teacher's blocks, and when a student's OdeBlocks in its place is to reach its states.

    Attributes:
        blocks: The teacher's blocks.
        times: Relative times in (0, 1] of the states after them.
    """

    def __init__(self, blocks: list[nn.Module], times: list[float]) -> None:
        self.blocks, self.times = blocks, times

    def converted(self, ode: OdeBlocks) -> tuple[int, list[float]]:
        """The first converted layer, and the times of the converted layers, relative to all of their time."""
        first, last = ode.config.span(len(self.times))
        start = self.times[first - 1] if first else 0.
        return first, [(time - start) / (self.times[last] - start) for time in self.times[first:last + 1]]

    def pairs(self, ode: OdeBlocks) -> list[tuple[float, int]]:
        """Relative times at which the student is compared, and the indices in its blocks of the steps ending there."""
        first, times = self.converted(ode)
        return [((step + 1) / ode.steps, first + step) for _, step in match(times, ode.steps)]

    def target(self, ode: OdeBlocks, states: Sequence[Tensor], t: float) -> Tensor:
        """The teacher's state at a relative time, from its states before the first and after each block."""
        first, times = self.converted(ode)
        return state_at(states[first:], [0., *times], t)


def teacher_stages(
        teacher: nn.Module, config: LossConfig, calibration: Iterable[Tensor] | None, device: torch.device,
) -> list[TeacherStage]:
    """A teacher's stages, with the times that the settings give.

    Raises:
        ValueError: The times do not suit the teacher.
    """
    sites = find_stages(teacher)
    if len(sites) > 1 and config.checkpoints != 'uniform':
        raise ValueError(
            f'checkpoints={config.checkpoints!r} applies to models with one sequence of blocks, but a '
            f"{type(teacher).__name__} has {len(sites)} stages. Set checkpoints='uniform'.")
    return [TeacherStage(site.blocks, _times(site.blocks, teacher, config, calibration, device)) for site in sites]


def _times(blocks: list[Any], teacher: Any, config: LossConfig, calibration: Any, device: torch.device) -> list[float]:
    if config.checkpoints == 'uniform':
        return uniform_times(len(blocks))
    if config.checkpoints == 'distance':
        batches = (images.to(device) for images in calibration or ())
        return distance_times(teacher, batches, config.checkpoint_temperature)
    times: list[float] = list(config.checkpoints)  # type: ignore[arg-type]
    increasing = all(a < b for a, b in pairwise([0., *times]))
    if len(times) != len(blocks) or not increasing or times[-1] > 1.:
        raise ValueError(
            f'checkpoints must be {len(blocks)} strictly increasing times in (0, 1], one for each layer of the '
            f'teacher; got {times}.')
    return times


def uniform_times(layers: int) -> list[float]:
    """Relative times 1/L, 2/L, ..., 1 of a teacher's L layers."""
    return [(i + 1) / layers for i in range(layers)]


def softmax_times(distances: Sequence[float], temperature: float = 1.) -> list[float]:
    """Relative times that give a layer more time the further it moves the hidden state.

    Args:
        distances: Mean distance by which each of the L layers moves the hidden state, in any unit.
        temperature: Temperature of the softmax over the distances, in units of their mean; large values give nearly
            uniform times.

    Returns:
        L strictly increasing times in (0, 1], the last one 1.

    Source: ODE-ViT, arXiv 2511.16501, which gives the temperature in units of its distances.
    """
    d = torch.tensor(distances, dtype=torch.float64)
    w = (d / (d.mean().clamp_min(1e-12) * temperature)).softmax(0)
    w = 0.999 * w + 0.001 / len(w)  # a low temperature underflows to 0, but times must still increase
    times = w.cumsum(0)
    return (times / times[-1]).tolist()


@torch.no_grad()
def distance_times(teacher: Any, batches: Iterable[Tensor], temperature: float = 1.) -> list[float]:
    """Relative times of a teacher's layers, from the distances between its consecutive hidden states.

    Args:
        teacher: timm model with a sequence of blocks; measured in eval mode.
        batches: Calibration images [B, C, H, W], on the teacher's device.
        temperature: See `softmax_times`.

    Returns:
        L strictly increasing times in (0, 1].

    Raises:
        ValueError: There are no batches.
    """
    total, images = None, 0
    for batch in batches:
        with evaluating(teacher), watch_blocks([list(teacher.blocks)]) as seen:
            teacher(batch)
        path = [state.flatten(1) for state in seen[0][0]]
        moved = torch.stack([(b - a).float().norm(dim=1).double().sum() for a, b in pairwise(path)]).cpu()
        total = moved if total is None else total + moved
        images += len(batch)
    if total is None:
        raise ValueError("checkpoints='distance' needs calibration images; pass calibration=[images, ...].")
    return softmax_times((total / images).tolist(), temperature)


def hidden_states(
        model: Any, images: Tensor, indices: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Final features, and the hidden states of all tokens after the given blocks, before the final norm.

    Args:
        model: timm model with `forward_intermediates`.
        images: Images [B, C, H, W].
        indices: Blocks, counted from 0; all by default.

    Returns:
        The features for `forward_head` [B, N, D], and one state [B, N, D] per block.
    """
    if indices is not None and not indices:
        return model.forward_features(images), []
    host: Any = model  # without the types of VisionTransformer
    if not isinstance(model, VisionTransformer):  # for others, timm does not always return prefix tokens
        with watch_blocks([list(model.blocks)]) as seen:
            features = model.forward_features(images)
        after = seen[0][0][1:]
        return features, after if indices is None else [after[i] for i in indices]
    features, states = host.forward_intermediates(
        images, indices=None if indices is None else list(indices), norm=False, output_fmt='NLC',
        return_prefix_tokens=True)
    return features, [torch.cat([s[1], s[0]], dim=1) if isinstance(s, tuple) else s for s in states]


def match(times: Sequence[float], steps: int) -> list[tuple[int, int]]:
    """Pair the teacher's layers with the student's steps.

    Args:
        times: Relative times in (0, 1] of the teacher's L layers, strictly increasing.
        steps: Number K of the student's steps, which end at 1/K, 2/K, ..., 1.

    Returns:
        min(L, K) pairs (layer, step), both counted from 0 and both strictly increasing, the last pair (L - 1, K - 1).
        Every member of the smaller side is matched, each with a nearby member of the other side.
    """
    own = uniform_times(steps)
    if len(times) <= steps:
        return list(enumerate(_nearest(times, own)))
    return [(layer, step) for step, layer in enumerate(_nearest(own, times))]


def _nearest(few: Sequence[float], many: Sequence[float]) -> list[int]:
    """Strictly increasing indices into `many`, near the values of `few`, ending at the last one."""
    n, m = len(few), len(many)
    chosen: list[int] = []
    for i, value in enumerate(few):
        low = chosen[-1] + 1 if chosen else 0
        high = m - n + i  # leaves room for the remaining ones
        index = min(range(m), key=lambda j: abs(many[j] - value))
        chosen.append(high if i == n - 1 else min(max(index, low), high))
    return chosen
