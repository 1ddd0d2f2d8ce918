"""The states of each image along the way: how they move, how near another model's, to which class; in a plane."""
import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks import state_at
from .flow import Flow, Images, PerImage, norms, over_images

__all__ = [
    'ClassOverTime', 'DistanceOverTime', 'Geometry', 'Plane', 'Similarity', 'check_comparable', 'class_over_time',
    'distance_over_time', 'plane', 'state_similarity', 'trajectory_geometry',
]


@dataclass(frozen=True, repr=False)
class Geometry(PerImage):
    """How the states of B images move in K steps.

    Attributes:
        speed: Euclidean distance per unit of time, over all tokens [B, K].
        norm: Euclidean norm of the state [B, K + 1].
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
    times: Tensor = dataclasses.field(metadata={'shared': True})


def trajectory_geometry(model: Any, images: Images = None, *, batch_size: int = 64) -> Geometry:
    """How the states of each image move: speed, turns, and how alike the tokens become.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.

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
        torch.tensor(flow.times, dtype=torch.float64))


def _angle(a: Tensor, b: Tensor) -> Tensor:
    """In radians, from chords: accurate for small angles, too [B]."""
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
    times: Tensor = dataclasses.field(metadata={'shared': True})


def class_over_time(model: Any, images: Images = None, *, batch_size: int = 64) -> ClassOverTime:
    """Read each state with the model's final norm and head, as if it were the last one.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`; the model has a head.

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
    times = torch.tensor(flow.times, dtype=torch.float64)
    stays = (classes == classes[:, -1:]).flip(1).cumprod(dim=1).sum(dim=1)  # how many of the last states
    final = classes[:, -1:, None].expand(-1, classes.shape[1], 1)
    settled = times[-stays.cpu()].masked_fill(~probabilities.isfinite().all(dim=(1, 2)).cpu(), torch.nan)
    return ClassOverTime(classes, probabilities.gather(2, final)[..., 0], settled, times)


@dataclass(frozen=True, repr=False)
class DistanceOverTime(PerImage):
    """How far the states of B images are from those of another model at the same times.

    Attributes:
        distance: Euclidean distance over all tokens, relative to the norm of the other model's state [B, K + 1].
        patches: Cosine of each patch token with the other model's, at the end [B, patches].
        times: The times of the states; one unit is one block of the base [K + 1].
    """
    distance: Tensor
    patches: Tensor
    times: Tensor = dataclasses.field(metadata={'shared': True})


def distance_over_time(model: Any, images: Images = None, *, teacher: Any, batch_size: int = 64) -> DistanceOverTime:
    """How closely a student follows its teacher, at the times of the student's states.

    Between two layers, the teacher's state is interpolated linearly in t.

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


def check_comparable(flow: Flow, other: Flow) -> None:
    """Raise ValueError for flows with states of different shapes, or that end at different times."""
    if flow.start.shape != other.start.shape or abs(flow.times[-1] - other.times[-1]) > 1e-3:
        raise ValueError(
            f'The states cannot be compared: {list(flow.start.shape)} until t = {flow.times[-1]:g}, and '
            f'{list(other.start.shape)} until t = {other.times[-1]:g}. Give the teacher that the student follows.')


def _distance_over_time(flow: Flow, other: Flow) -> DistanceOverTime:
    check_comparable(flow, other)
    states, theirs = flow.states(), other.states()
    found = []
    for t, x in zip(flow.times, states, strict=True):
        y = state_at(theirs, other.times, t)
        found.append(norms(x - y) / norms(y))
    ours, wanted = (x[:, flow.prefix:].flatten(1, -2) if x.ndim > 2 else x[:, None] for x in (states[-1], theirs[-1]))
    return DistanceOverTime(torch.stack(found, dim=1), F.cosine_similarity(ours, wanted, dim=-1),
                            torch.tensor(flow.times, dtype=torch.float64))


@dataclass(frozen=True, repr=False)
class Similarity(PerImage):
    """Similarity of a model's states at all its times to another model's states at all its times.

    Attributes:
        values: Mean cosine of each token with itself at the other time [B, K + 1, L + 1].
        times: The times of the rows [K + 1].
        other_times: The times of the columns [L + 1].
    """
    values: Tensor
    times: Tensor = dataclasses.field(metadata={'shared': True})
    other_times: Tensor = dataclasses.field(metadata={'shared': True})


def state_similarity(model: Any, images: Images = None, *, other: Any = None, batch_size: int = 64) -> Similarity:
    """Similarity of the states at all pairs of times, over all tokens.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.
        other: A model of the same width and tokens; None for the model itself.

    Raises:
        ValueError: The two models have states of different shapes.

    Examples:
        >>> found = state_similarity(student, images, other=teacher)
        >>> print(found.values.mean(dim=0))    # [K + 1, L + 1]

    Source: Raptor, arXiv 2512.19941.
    """
    return over_images(_similarity, model, images, batch_size, *([] if other is None else [other]))


def _similarity(flow: Flow, other: Flow | None = None) -> Similarity:
    other = other or flow
    if flow.start.shape != other.start.shape:
        raise ValueError(f'Cosines compare tokens one by one, but the states have the shapes {list(flow.start.shape)} '
                         f'and {list(other.start.shape)}. Give a model of the same width and tokens.')
    ours, theirs = (torch.stack([F.normalize(x.flatten(1, -2) if x.ndim > 2 else x[:, None], dim=-1)
                                 for x in each.states()], dim=1) for each in (flow, other))  # [B, times, N, D]
    return Similarity(torch.einsum('bknd,blnd->bkl', ours, theirs) / ours.shape[2],
                      *(torch.tensor(each.times, dtype=torch.float64) for each in (flow, other)))


@dataclass(frozen=True, repr=False)
class Plane(PerImage):
    """The trajectories of one token of B images in the plane of their two first principal components.

    Attributes:
        points: Coordinates of the model's states [B, K + 1, 2].
        others: Coordinates of the other model's states [B, L + 1, 2]; without another model, L + 1 is 0.
        times: The times of the states [K + 1].
        other_times: The times of the other model's states [L + 1].
        explained: Share of the variance that the plane shows.
    """
    points: Tensor
    others: Tensor
    times: Tensor = dataclasses.field(metadata={'shared': True})
    other_times: Tensor = dataclasses.field(metadata={'shared': True})
    explained: float = dataclasses.field(metadata={'shared': True}, default=0.)


def plane(model: Any, images: Images = None, *, other: Any = None, batch_size: int = 64) -> Plane:
    """The trajectories of the class token, of a model and of another, in one plane for all images.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.
        other: A model of the same width, such as the teacher.

    Returns:
        Plane. Without a class token, it shows the mean of the patch tokens.

    Raises:
        ValueError: The two models differ in width.
    """
    found = over_images(_tokens, model, images, batch_size, *([] if other is None else [other]))
    if other is not None and found.points.shape[-1] != found.others.shape[-1]:
        raise ValueError(f'Tokens of different width do not lie in one plane: {found.points.shape[-1]} and '
                         f'{found.others.shape[-1]}. Give a model of the same width.')
    everything = [found.points.flatten(0, 1), *([] if other is None else [found.others.flatten(0, 1)])]
    mean, axes, share = _principal(torch.cat(everything))
    points = (found.points - mean) @ axes
    others = points[:, :0] if other is None else (found.others - mean) @ axes
    return dataclasses.replace(found, points=points, others=others, explained=share)


def _tokens(flow: Flow, other: Flow | None = None) -> Plane:
    first = _token_path(flow)
    return Plane(first, first[:, :0] if other is None else _token_path(other),
                 torch.tensor(flow.times, dtype=torch.float64),
                 torch.tensor(() if other is None else other.times, dtype=torch.float64))


def _token_path(flow: Flow) -> Tensor:
    rows = [x if x.ndim == 2 else x[:, 0] if x.ndim == 3 and flow.class_token else x.flatten(1, -2).mean(dim=1)
            for x in flow.states()]
    return torch.stack(rows, dim=1)


def _principal(rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """The mean [D], the two first principal axes [D, 2] and the share of the variance along them, of rows [n, D].

    Rows that are not finite do not count. Each axis points so that its largest entry is positive.
    """
    given, rows = rows, rows[rows.isfinite().all(dim=-1)].cpu().double()  # not every device has float64
    mean = rows.sum(dim=0) / max(len(rows), 1)
    values, axes = torch.linalg.eigh((rows - mean).T @ (rows - mean))  # ascending
    values, axes = values.flip(0).clamp_min(0.), F.pad(axes, (1, 0)).flip(1)[:, :2]  # 0 for a second of one dimension
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    share = float(values[:2].sum() / values.sum().clamp_min(1e-30))
    return mean.to(given), (axes * largest.sign()).to(given), share
