"""The states of each image along the way: how they move, to which class; attention."""
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .flow import Flow, Images, PerImage, PlainAttention, norms, over_images
from .stability import log_softmax_bound


@dataclass(frozen=True, repr=False)
class Geometry(PerImage):
    """How B images move.

    Attributes:
        speed: [B, K], distance per unit of time, over all tokens.
        norm: [B, K + 1], of the state.
        angle: [B, K - 1], between a step and the next, in degrees; NaN where one of them has no length.
        times: [K + 1], of the states.
    """
    speed: Tensor
    norm: Tensor
    angle: Tensor
    times: Tensor


def trajectory_geometry(model: Any, images: Images = None, *, batch_size: int = 64) -> Geometry:
    """How the states of each image move: their speed and turns; see `timm_odevit.dynamics`.

    Examples:
        >>> found = trajectory_geometry(student, images)
        >>> print(found.speed.mean(dim=0))    # [K]
    """
    def measure(flow: Flow) -> Geometry:
        states = flow.states()
        moves = [after - before for before, after in pairwise(states)]
        lengths = torch.stack([norms(move) for move in moves], dim=1)
        angles = [_angle(first, second) for first, second in pairwise(moves)]
        return Geometry(
            lengths / flow.clock().diff().to(lengths), torch.stack([norms(x) for x in states], dim=1),
            torch.stack(angles, dim=1).rad2deg() if angles else lengths[:, :0], flow.clock())
    return over_images(measure, model, images, batch_size)


def _angle(a: Tensor, b: Tensor) -> Tensor:
    """In radians [B], from chords, which is accurate for small angles, too."""
    first, second = (F.normalize(x.flatten(1), dim=1) for x in (a, b))
    angle = 2 * torch.atan2(norms(first - second), norms(first + second))
    return angle.masked_fill((norms(a) == 0) | (norms(b) == 0), torch.nan)


@dataclass(frozen=True, repr=False)
class ClassOverTime(PerImage):
    """The class of each state.

    Attributes:
        classes: [B, K + 1], of the largest logit.
        probability: [B, K + 1], of the class that the model gives in the end.
        settled: [B], the time from which on the class no longer changes; NaN where a state is not finite.
        times: [K + 1], of the states.
    """
    classes: Tensor
    probability: Tensor
    settled: Tensor
    times: Tensor


def class_over_time(model: Any, images: Images = None, *, batch_size: int = 64) -> ClassOverTime:
    """Read each state with the model's final norm and head, as if it were the last one; see `timm_odevit.dynamics`.

    Examples:
        >>> found = class_over_time(student, images)
        >>> print(found.settled)    # [B]
    """
    def measure(flow: Flow) -> ClassOverTime:
        probabilities = torch.stack([flow.logits(x).softmax(dim=-1) for x in flow.states()], dim=1)
        classes, times = probabilities.argmax(dim=-1), flow.clock()
        stays = (classes == classes[:, -1:]).flip(1).cumprod(dim=1).sum(dim=1)  # how many of the last states
        final = classes[:, -1:, None].expand(-1, classes.shape[1], 1)
        settled = times[-stays.cpu()].masked_fill(~probabilities.isfinite().all(dim=(1, 2)).cpu(), torch.nan)
        return ClassOverTime(classes, probabilities.gather(2, final)[..., 0], settled, times)
    return over_images(measure, model, images, batch_size)


def attention_maps(flow: Flow) -> Iterator[Tensor]:
    """The attention probabilities [B, heads, N, N] at the start of each step; of parallel attentions, the first."""
    x = flow.start
    for step in flow.maps:
        with PlainAttention(x) as watched:
            x = step(x)
        if watched.found is None:
            raise ValueError('These blocks never attend from all tokens to all tokens, so they have no attention maps.')
        yield watched.found


@dataclass(frozen=True, repr=False)
class AttentionOverTime(PerImage):
    """The attention of the class token, or else of the mean token, in K steps, averaged over the heads.

    Attributes:
        attention: [B, K, N], probabilities.
        rollout: [B, K, N], of all steps so far together: of x + h attention(x), x counts 1 and attention h.
        softmax_bound: [B, K, heads], JaSMin's g_1, the largest over the query rows, at most 1/2.
        times: [K], at which the steps start.
        prefix: Number of tokens before those of the patches.
    """
    attention: Tensor
    rollout: Tensor
    softmax_bound: Tensor
    times: Tensor
    prefix: int


def attention_over_time(model: Any, images: Images = None, *, batch_size: int = 64) -> AttentionOverTime:
    """What the class token attends to at each step, and through all steps together; see `timm_odevit.dynamics`.

    Examples:
        >>> found = attention_over_time(student, images)
        >>> print(found.rollout[:, -1])    # [B, N]

    Source: attention rollout, arXiv 2005.00928; the bound on the softmax: JaSMin, arXiv 2507.07814.
    """
    def measure(flow: Flow) -> AttentionOverTime:
        steps: list[list[Tensor]] = []
        through = None
        for h, heads in zip(flow.clock().diff().tolist(), attention_maps(flow), strict=True):
            mean = heads.mean(dim=1)
            mixed = (h * mean + torch.eye(mean.shape[-1]).to(mean)) / (1. + h)
            through = mixed if through is None else mixed @ through
            steps.append([
                *(rows[:, 0] if flow.class_token else rows.mean(dim=1) for rows in (mean, through)),
                log_softmax_bound(heads).amax(dim=-1).exp()])
        attention, rollout, bound = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
        return AttentionOverTime(attention, rollout, bound, flow.clock()[:-1], flow.prefix)
    return over_images(measure, model, images, batch_size)
