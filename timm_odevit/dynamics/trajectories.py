"""The states of each image along the way: how they move, how far from another model's, and which class they lead to."""
import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recording import state_at
from ..settings import checks_keywords
from .flow import Flow, Images, PerImage, norms, over_images

__all__ = [
    'ClassOverTime', 'DistanceOverTime', 'Geometry', 'check_comparable', 'class_over_time', 'distance_over_time',
    'trajectory_geometry',
]


@dataclass(frozen=True, repr=False)
class Geometry(PerImage):
    """How the states of B images move in K steps.

    Attributes:
        speed: Euclidean distance per unit of time, over all tokens [B, K].
        norm: Euclidean norm of the state [B, K + 1].
        angle: Angle between a step and the next, in degrees [B, K - 1]; NaN where one of them has no length.
        curvature: That angle, in radians, over the mean length of the two steps [B, K - 1].
        cosine: Cosine of the class token and the mean patch token [B, K + 1]; NaN without a class token.
        anisotropy: Mean cosine of two different patch tokens [B, K + 1]; NaN without a sequence of tokens.
        times: The times of the states; one unit is one block of the base [K + 1].
    """
    speed: Tensor
    norm: Tensor
    angle: Tensor
    curvature: Tensor
    cosine: Tensor
    anisotropy: Tensor
    times: Tensor = dataclasses.field(metadata={'shared': True})

    def __repr__(self) -> str:
        return (f'Geometry({len(self.speed)} images, {self.speed.shape[1]} steps; relative speed '
                f'{(self.speed / self.norm[:, 1:]).mean():.3g}, angle between steps {self.angle.mean():.0f} degrees)')


@checks_keywords
def trajectory_geometry(model: Any, images: Images = None, *, batch_size: int = 64) -> Geometry:
    """How the states of each image move: speed, turns, and how alike the tokens become.

    Args:
        model: timm model with one sequence of blocks, an ODE-ViT or an ordinary ViT; or a Flow, without images.
        images: Images [B, C, H, W], normalised for the model, on its device; or a loader of such batches.
        batch_size: Images at a time.

    Returns:
        Geometry.

    Raises:
        TypeError: The model has no single sequence of blocks.
        ValueError: There are no images.
    """
    return over_images(_geometry, model, images, batch_size)


def _geometry(flow: Flow) -> Geometry:
    states = flow.states()
    moves = [after - before for before, after in pairwise(states)]
    lengths = torch.stack([norms(move) for move in moves], dim=1)
    angles = [_angle(first, second) for first, second in pairwise(moves)]
    angle = torch.stack(angles, dim=1) if angles else lengths[:, :0]
    mean = (lengths[:, :-1] + lengths[:, 1:]) / 2
    return Geometry(
        lengths / torch.tensor(flow.lengths()).to(lengths),
        torch.stack([norms(x) for x in states], dim=1),
        angle.rad2deg(),
        angle / mean,
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

    def __repr__(self) -> str:
        return (f'ClassOverTime({len(self.classes)} images, class settled at t = {self.settled.nanmedian():.3g} of '
                f'{self.times[-1]:.3g} (median))')


@checks_keywords
def class_over_time(model: Any, images: Images = None, *, batch_size: int = 64) -> ClassOverTime:
    """Read each state with the model's final norm and head, as if it were the last one.

    Args:
        model: timm model with one sequence of blocks and a head; or a Flow with a head, without images.
        images: Images [B, C, H, W], normalised for the model, on its device; or a loader of such batches.
        batch_size: Images at a time.

    Returns:
        ClassOverTime.

    Raises:
        TypeError: The model has no single sequence of blocks, or no head for a state.
        ValueError: There are no images.
    """
    return over_images(_class_over_time, model, images, batch_size)


def _class_over_time(flow: Flow) -> ClassOverTime:
    probabilities = torch.stack([flow.logits(x).softmax(dim=-1) for x in flow.states()], dim=1)
    classes = probabilities.argmax(dim=-1)
    times = torch.tensor(flow.times, dtype=torch.float64)
    stays = (classes == classes[:, -1:]).flip(1).cumprod(dim=1).sum(dim=1)  # how many of the last states
    final = classes[:, -1:, None].expand(-1, classes.shape[1], 1)
    settled = times.to(classes.device)[-stays].masked_fill(~probabilities.isfinite().all(dim=(1, 2)), torch.nan)
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

    def __repr__(self) -> str:
        return (f'DistanceOverTime({len(self.distance)} images, at the end {self.distance[:, -1].median():.3g} of the '
                f"norm (median), patch tokens' cosine {self.patches.mean():.3f})")


@checks_keywords
def distance_over_time(model: Any, images: Images = None, *, teacher: Any, batch_size: int = 64) -> DistanceOverTime:
    """How closely a student follows its teacher, at the times of the student's states.

    Between two layers, the teacher's state is interpolated linearly in t.

    Args:
        model: timm model with one sequence of blocks; or a Flow, without images.
        images: Images [B, C, H, W], normalised for both models, on their device; or a loader of such batches.
        teacher: A model of the same width, tokens and normalisation of images; for a Flow, another Flow.
        batch_size: Images at a time.

    Returns:
        DistanceOverTime.

    Raises:
        TypeError: A model has no single sequence of blocks.
        ValueError: There are no images, or the two have states of different shapes, or end at different times.
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
