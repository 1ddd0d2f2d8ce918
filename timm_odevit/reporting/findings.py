"""Findings: everything that a report shows, measured on a few images."""
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..data.preprocessing import data_config
from ..dynamics.flow import Flow, follow
from ..dynamics.precision import Region, contraction_regions
from ..dynamics.stability import Exponents, lyapunov_exponents
from ..dynamics.trajectories import (
    AttentionOverTime,
    ClassOverTime,
    DistanceOverTime,
    Geometry,
    attention_over_time,
    class_over_time,
    distance_over_time,
    trajectory_geometry,
)
from ..ode.blocks import find_ode_blocks

__all__ = ['Findings', 'measure_all']

UNLIKE = 0.2  # probability that the likeliest class of no image reaches, if the images are of no class


@dataclass(frozen=True)
class Findings:
    """What a report shows of B images. What a model does not have, such as classes or a teacher, is None."""
    model: str  # in words
    geometry: Geometry
    exponents: Exponents  # the largest one
    attention: AttentionOverTime | None = None
    probabilities: Tensor | None = None  # of all classes, read from each state [B, K + 1, classes]
    decided: ClassOverTime | None = None
    region: Region | None = None
    followed: DistanceOverTime | None = None
    teacher: Geometry | None = None
    taught: Tensor | None = None  # the teacher's probabilities of all classes [B, classes]

    def sentence(self) -> str:
        """What the model does, in a sentence; and another, if these images look unlike its classes."""
        said, count = [], len(self.exponents.values)
        if self.taught is not None and self.decided is not None:
            same = int((self.taught.argmax(dim=-1) == self.decided.classes[:, -1]).sum())
            said.append(f"gives the teacher's class for {same} of {count} images")
        elif self.decided is not None:
            said.append(f'settled on its class at t = {self.decided.settled.nanmedian():.3g}')
        if self.followed is not None:
            said.append(f"its last states differ from the teacher's by "
                        f'{100 * self.followed.distance[:, -1].median():.0f} % of their norm')
        elif self.exponents.values.isfinite().any():
            said.append(f'small changes of the state grow at most by a factor of '
                        f'{math.exp(float(self.exponents.values[:, 0].nanmedian())):.2f} per block')
        else:
            said.append(f'there are no exponents ({next(filter(None, self.exponents.reasons))})')
        unlike = self.probabilities is not None and float(self.probabilities[:, -1].max()) < UNLIKE
        return f"{self.model}: {'; '.join(said)} (median of {count} images)." + unlike * (
            f' No class gets {100 * UNLIKE:.0f} % for any image: they are unlike the classes that the model knows.')


def measure_all(model: Any, images: Tensor, teacher: Any = None, progress: bool = True) -> Findings:
    """Measure everything that a report shows; arguments and errors are those of `write_report`."""
    _check(model, teacher)
    measures: dict[str, Callable[[], Any]] = {}
    with torch.inference_mode(False), torch.autocast(images.device.type, enabled=False), ExitStack() as stack:
        flow = stack.enter_context(follow(model, images))
        if teacher is not None:
            other = stack.enter_context(follow(teacher, images))
            measures['followed'] = partial(distance_over_time, flow, teacher=other)
            measures['teacher'] = partial(trajectory_geometry, other)
        measures['geometry'] = partial(trajectory_geometry, flow)
        measures['attention'] = partial(_attention, flow)
        measures['exponents'] = partial(lyapunov_exponents, model, images)  # in batches, which take less memory
        if flow.head is not None:
            measures['probabilities'] = partial(_probabilities, flow)
            measures['decided'] = partial(class_over_time, flow)
            measures['region'] = partial(contraction_regions, flow, directions=4)
            if teacher is not None:
                measures['taught'] = lambda: _probabilities(other)[:, -1]
        bar = tqdm(measures.items(), desc='report', disable=not progress)
        found = {name: measure() for name, measure in bar}
    odes = find_ode_blocks(model)
    words = f'{odes[0].steps} steps of {odes[0].method}' if odes else f'{len(model.blocks)} blocks'
    return Findings(words, **found)


def _check(model: Any, teacher: Any) -> None:
    if any(p.dtype != torch.float32 for each in (model, teacher) if each is not None for p in each.parameters()):
        raise ValueError('A report measures in float32, but a model is in another dtype. Call float() on it first.')
    if teacher is None:
        return
    ours, theirs = ({'classes': [each.num_classes], **{
        key: list(data_config(each)[key]) for key in ('input_size', 'mean', 'std')}} for each in (model, teacher))
    other = [f'{key} {theirs[key]} and {ours[key]}' for key in ours if theirs[key] != ours[key]]
    if other:
        raise ValueError(f"The teacher does not fit the model: {', '.join(other)}. Give the model's own teacher.")


def _probabilities(flow: Flow) -> Tensor:
    return torch.stack([flow.logits(x).softmax(dim=-1) for x in flow.states()], dim=1)


def _attention(flow: Flow) -> AttentionOverTime | None:
    try:
        return attention_over_time(flow)
    except ValueError:  # these blocks have no attention maps
        return None
