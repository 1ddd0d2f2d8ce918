"""The states of each image along the way: how they move, how near another model's, to which class; attention."""
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks import state_at
from .flow import Flow, Images, PerImage, norms, over_images
from .lipschitz import PlainAttention, log_softmax_bound

__all__ = ['AttentionOverTime', 'ClassOverTime', 'DistanceOverTime', 'Geometry', 'attention_maps',
           'attention_over_time', 'class_over_time', 'distance_over_time', 'has_attention_maps', 'trajectory_geometry']


@dataclass(frozen=True, repr=False)
class Geometry(PerImage):
    """How the states of B images move in K steps.

    Attributes:
        speed: Distance per unit of time, over all tokens [B, K].
        norm: Norm of the state [B, K + 1].
        angle: Angle between a step and the next, in degrees [B, K - 1]; NaN where one of them has no length.
        cosine: Cosine of the class token and the mean patch token [B, K + 1]; NaN without a class token.
        anisotropy: Mean cosine of two different patch tokens [B, K + 1]; NaN without a sequence of tokens.
        times: The times of the states; one unit is one block of the base [K + 1].
    """
    speed: Tensor
    norm: Tensor
    angle: Tensor
    cosine: Tensor
    anisotropy: Tensor
    times: Tensor


def trajectory_geometry(model: Any, images: Images = None, *, batch_size: int = 64) -> Geometry:
    """How the states of each image move: speed, turns, and how alike the tokens become; see `timm_odevit.dynamics`.

    Examples:
        >>> found = trajectory_geometry(student, images)
        >>> print(found.speed.mean(dim=0))    # [K]

    Source: anisotropy, arXiv 1909.00512.
    """
    return over_images(_geometry, model, images, batch_size)


def _geometry(flow: Flow) -> Geometry:
    states = flow.states()
    moves = [after - before for before, after in pairwise(states)]
    lengths = torch.stack([norms(move) for move in moves], dim=1)
    angles = [_angle(first, second) for first, second in pairwise(moves)]
    angle = torch.stack(angles, dim=1) if angles else lengths[:, :0]
    return Geometry(
        lengths / torch.tensor(flow.lengths()).to(lengths),
        torch.stack([norms(x) for x in states], dim=1),
        angle.rad2deg(),
        torch.stack([_class_and_patches(x, flow) for x in states], dim=1),
        torch.stack([_anisotropy(x, flow.prefix) for x in states], dim=1),
        flow.clock())


def _angle(a: Tensor, b: Tensor) -> Tensor:
    """In radians [B], from chords, which is accurate for small angles, too."""
    first, second = (F.normalize(x.flatten(1), dim=1) for x in (a, b))
    angle = 2 * torch.atan2((first - second).norm(dim=1), (first + second).norm(dim=1))
    return angle.masked_fill((norms(a) == 0) | (norms(b) == 0), torch.nan)


def _class_and_patches(x: Tensor, flow: Flow) -> Tensor:
    if x.ndim != 3 or not flow.class_token:
        return x.new_full((len(x),), torch.nan)
    return F.cosine_similarity(x[:, 0], x[:, flow.prefix:].mean(dim=1), dim=-1)


def _anisotropy(x: Tensor, prefix: int) -> Tensor:
    if x.ndim < 3 or x[:, prefix:].flatten(1, -2).shape[1] < 2:
        return x.new_full((len(x),), torch.nan)
    patches = F.normalize(x[:, prefix:].flatten(1, -2), dim=-1)
    count = patches.shape[1]
    return (patches.sum(dim=1).square().sum(dim=-1) - count) / (count * (count - 1))


@dataclass(frozen=True, repr=False)
class ClassOverTime(PerImage):
    """Which class the norm and the head read from the states of B images along the way.

    Attributes:
        classes: Class of the largest logit [B, K + 1].
        probability: Probability of the class that the model gives in the end [B, K + 1].
        settled: The time from which on the class no longer changes [B]; NaN where a state is not finite.
        times: The times of the states [K + 1].
    """
    classes: Tensor
    probability: Tensor
    settled: Tensor
    times: Tensor


def class_over_time(model: Any, images: Images = None, *, batch_size: int = 64) -> ClassOverTime:
    """Read each state with the model's final norm and head, as if it were the last one.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.

    Raises:
        TypeError: The model has no head for a state.

    Examples:
        >>> found = class_over_time(student, images)
        >>> print(found.settled)    # [B]
    """
    return over_images(_class_over_time, model, images, batch_size)


def _class_over_time(flow: Flow) -> ClassOverTime:
    probabilities = torch.stack([flow.logits(x).softmax(dim=-1) for x in flow.states()], dim=1)
    classes = probabilities.argmax(dim=-1)
    times = flow.clock()
    stays = (classes == classes[:, -1:]).flip(1).cumprod(dim=1).sum(dim=1)  # how many of the last states
    final = classes[:, -1:, None].expand(-1, classes.shape[1], 1)
    settled = times[-stays.cpu()].masked_fill(~probabilities.isfinite().all(dim=(1, 2)).cpu(), torch.nan)
    return ClassOverTime(classes, probabilities.gather(2, final)[..., 0], settled, times)


@dataclass(frozen=True, repr=False)
class DistanceOverTime(PerImage):
    """How far the states of B images are from those of another model at the same times.

    Attributes:
        distance: Distance over all tokens, relative to the norm of the other model's state [B, K + 1].
        patches: Cosine of each patch token with the other model's, at the end [B, patches].
        times: The times of the states; one unit is one block of the base [K + 1].
    """
    distance: Tensor
    patches: Tensor
    times: Tensor


def distance_over_time(model: Any, images: Images = None, *, teacher: Any, batch_size: int = 64) -> DistanceOverTime:
    """How closely a student follows its teacher, whose state is linear in t between two layers.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.
        teacher: A model of the same width and tokens.

    Raises:
        ValueError: The two have states of different shapes, or end at different times.

    Examples:
        >>> found = distance_over_time(student, images, teacher=teacher)
        >>> print(found.distance.mean(dim=0))    # [K + 1]
    """
    return over_images(_distance_over_time, model, images, batch_size, teacher)


def _distance_over_time(flow: Flow, other: Flow) -> DistanceOverTime:
    if flow.start.shape != other.start.shape or abs(flow.times[-1] - other.times[-1]) > 1e-3:
        raise ValueError(
            f'The states cannot be compared: {list(flow.start.shape)} until t = {flow.times[-1]:g}, and '
            f'{list(other.start.shape)} until t = {other.times[-1]:g}. Give the teacher that the student follows.')
    states, theirs = flow.states(), other.states()
    at_times = [state_at(theirs, other.times, t) for t in flow.times]
    distances = [norms(x - y) / norms(y) for x, y in zip(states, at_times, strict=True)]
    ours, wanted = (x[:, flow.prefix:].flatten(1, -2) if x.ndim > 2 else x[:, None] for x in (states[-1], theirs[-1]))
    return DistanceOverTime(torch.stack(distances, dim=1), F.cosine_similarity(ours, wanted, dim=-1), flow.clock())


def attention_maps(flow: Flow) -> Iterator[Tensor]:
    """The attention probabilities [B, heads, N, N] at the start of each step; of parallel attentions, the first.

    Raises ValueError for a step that computes no attention of all tokens over all tokens, like those with windows.
    """
    x = flow.start
    for step in flow.maps:
        with PlainAttention(x) as watched:
            y = step(x)
        if watched.found is None:
            raise ValueError('These blocks never attend from all tokens to all tokens, so they have no attention maps. '
                             'Use trajectory_geometry, which needs none.')
        yield watched.found
        x = y


def has_attention_maps(flow: Flow) -> bool:
    """Whether `attention_maps` works."""
    try:
        return all(True for _ in attention_maps(flow))
    except ValueError:
        return False


@dataclass(frozen=True, repr=False)
class AttentionOverTime(PerImage):
    """Where B images are attended to in K steps, averaged over the heads.

    Attributes:
        attention: What the class token, or else the mean token, attends to at the start of each step: probabilities
            over the tokens [B, K, N].
        rollout: The same for all steps so far together: of x + h attention(x), x counts 1 and attention h [B, K, N].
        entropy: Mean entropy of the rows of the maps, in nats, at most log N [B, K].
        softmax_bound: JaSMin's g_1 of each head, the largest over the query rows, between 0 and 1/2 [B, K, heads].
        times: The times at which the steps start [K].
        prefix: How many of the tokens come before those of the patches.
        class_token: Whether it is the attention of a class token.
    """
    attention: Tensor
    rollout: Tensor
    entropy: Tensor
    softmax_bound: Tensor
    times: Tensor
    prefix: int
    class_token: bool


def attention_over_time(model: Any, images: Images = None, *, batch_size: int = 64) -> AttentionOverTime:
    """What the class token attends to at each step, and through all steps together (attention rollout).

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.

    Raises:
        ValueError: The blocks have no attention of all tokens over all tokens.

    Examples:
        >>> found = attention_over_time(student, images)
        >>> print(found.rollout[:, -1])    # [B, N]

    Source: attention rollout, arXiv 2005.00928; the bound on the softmax: JaSMin, arXiv 2507.07814.
    """
    return over_images(_attention_over_time, model, images, batch_size)


def _attention_over_time(flow: Flow) -> AttentionOverTime:
    steps: list[list[Tensor]] = []
    through: Any = None
    for h, heads in zip(flow.lengths(), attention_maps(flow), strict=True):
        mean = heads.mean(dim=1)
        mixed = (h * mean + torch.eye(mean.shape[-1]).to(mean)) / (1. + h)
        through = mixed if through is None else mixed @ through
        steps.append([
            *(rows[:, 0] if flow.class_token else rows.mean(dim=1) for rows in (mean, through)),
            torch.special.entr(heads).sum(dim=-1).mean(dim=(1, 2)),
            log_softmax_bound(heads, 1)[..., 0].amax(dim=-1).exp()])
    attention, rollout, entropy, bound = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
    return AttentionOverTime(attention, rollout, entropy, bound, flow.clock(last=-1), flow.prefix, flow.class_token)
