"""Findings: everything that a report shows, measured on a few images."""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..data.preprocessing import data_config
from ..dynamics.flow import follow
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
    has_attention_maps,
    trajectory_geometry,
)
from ..ode.blocks import find_ode_blocks

__all__ = ['Findings', 'measure_all']

UNLIKE = 0.2  # probability that the likeliest class of no image reaches, if the images are of no class


@dataclass(frozen=True)
class Findings:
    """What a report shows of B images. What a model does not have, such as classes or a teacher, is None."""
    words: str  # what the model is, such as 'One shared block, applied 12 times'
    times: list[float]  # of the model's states [K + 1]
    probabilities: Tensor | None  # of all classes, read from each state [B, K + 1, classes]
    taught: Tensor | None  # of all classes, by the teacher [B, classes]
    decided: ClassOverTime | None  # which class each state leads to
    geometry: tuple[Geometry, Geometry | None]  # how the states of the model move, and those of the teacher
    attention: AttentionOverTime | None  # where the class token looks
    followed: DistanceOverTime | None  # the distance from the teacher
    region: Region | None  # around the last state, in which the class stays
    exponents: Exponents  # the largest one
    grid: tuple[int, int] | None  # rows and columns of the patches, if the tokens are one for each of them

    def sentence(self) -> str:
        """What the model does, in a sentence; and another, if these images look unlike its classes."""
        count = len(self.geometry[0].speed)
        images, of = ('one image', '') if count == 1 else (f'{count} images', f' (median of {count} images)')
        decided, verb = self.decided, ': '
        if self.followed is not None:
            said = (f"its last states differ from the teacher's by {100 * self.followed.distance[:, -1].median():.0f} "
                    '% of their norm')
            if self.taught is not None and decided is not None:
                same = int((self.taught.argmax(dim=-1) == decided.classes[:, -1]).sum())
                verb = f", gives the teacher's class for {same} of {images}; "
        else:
            largest = self.exponents.values[:, 0]
            said = (f'small changes of the state grow at most by a factor of '
                    f'{math.exp(float(largest.nanmedian())):.2f} per block' if largest.isfinite().any() else
                    f'there are no exponents ({next(filter(None, self.exponents.reasons))})')
            if decided is not None:
                verb = f', has settled on its class at t = {decided.settled.nanmedian():.3g} of {self.times[-1]:.3g}; '
        unlike = self.probabilities is not None and float(self.probabilities[:, -1].amax(dim=-1).max()) < UNLIKE
        return f'{self.words}{verb}{said}{of}.' + unlike * (
            f' No class gets {100 * UNLIKE:.0f} % for any image: they do not look like the classes that the model '
            'knows.')


def measure_all(model: Any, images: Tensor, teacher: Any = None, progress: bool = True) -> Findings:
    """Measure everything that a report shows; arguments and errors are those of `write_report`."""
    _check(model, teacher)
    with follow(model, images[:1]) as flow:
        has_head, has_maps = flow.head is not None, has_attention_maps(flow)
        grid = getattr(getattr(model, 'patch_embed', None), 'grid_size', None)
        if grid is None or flow.start.ndim != 3 or grid[0] * grid[1] != flow.start.shape[1] - flow.prefix:
            grid = None
    taught = teacher is not None
    measures: dict[str, Callable[[], Any]] = {  # the first compares the shapes of the states
        'followed': lambda: distance_over_time(model, images, teacher=teacher) if taught else None,
        'probabilities': lambda: _probabilities(model, images) if has_head else None,
        'taught': lambda: _probabilities(teacher, images)[:, -1] if taught and has_head else None,
        'decided': lambda: class_over_time(model, images) if has_head else None,
        'geometry': lambda: (trajectory_geometry(model, images),
                             trajectory_geometry(teacher, images) if taught else None),
        'attention': lambda: attention_over_time(model, images) if has_maps else None,
        'region': lambda: contraction_regions(model, images, directions=4) if has_head else None,
        'exponents': lambda: lyapunov_exponents(model, images),
    }
    found: dict[str, Any] = {}
    with tqdm(measures, desc='report', disable=not progress) as bar, torch.autocast(images.device.type, enabled=False):
        for name in bar:
            bar.set_postfix_str(name)
            found[name] = measures[name]()
    return Findings(words=_words(model), times=found['geometry'][0].times.tolist(), grid=grid, **found)


def _check(model: Any, teacher: Any) -> None:
    if any(p.dtype != torch.float32 for each in (model, teacher) if each is not None for p in each.parameters()):
        raise ValueError('A report measures in float32, but a model is in another dtype. Call float() on it first.')
    if teacher is None:
        return
    ours, theirs = ({'classes': m.num_classes, **{
        what: list(data_config(m)[key]) for what, key in (('input', 'input_size'), ('mean', 'mean'), ('std', 'std'))}}
        for m in (model, teacher))
    other = [f'{what} {theirs[what]} and {ours[what]}' for what in ours if theirs[what] != ours[what]]
    if other:
        raise ValueError(f"The teacher does not fit the model: {', '.join(other)}. Give the teacher that the model was "
                         'made from.')


def _probabilities(model: Any, images: Tensor) -> Tensor:
    with follow(model, images) as flow:
        return torch.stack([flow.logits(x).softmax(dim=-1) for x in flow.states()], dim=1)


def _words(model: Any) -> str:
    odes = find_ode_blocks(model)
    if not odes:
        return f'{_count(len(model.blocks), "block")}, applied once{" each" if len(model.blocks) > 1 else ""}'
    ode = odes[0]
    kept = len(ode.before) + len(ode.after)
    extra = f' (and {_count(kept, "block").lower()} of the base)' if kept else ''
    times = 'once' if ode.nfe == 1 else f'{ode.nfe:g} times'
    by = '' if ode.nfe == ode.steps else f' by {_count(ode.steps, "step").lower()} of {ode.method}'
    return f'{_count(len(ode.shared.phases), "shared block")}{extra}, applied {times}{by}' + (
        '' if ode.config.time == 'autonomous' else ', with weights that change with t')


def _count(number: int, what: str) -> str:
    return f'One {what}' if number == 1 else f'{number} {what}s'
