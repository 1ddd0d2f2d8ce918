"""Findings: everything that a report shows, measured on a few images."""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..data.preprocessing import data_config, renormalisation
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
    """What a report shows of B images. What a model does not have, such as classes or a teacher, is None.

    Attributes:
        words: What the model is, such as 'One shared block, applied 12 times'.
        times: The times of the model's states [K + 1].
        probabilities: Of all classes, read from each state [B, K + 1, classes].
        taught: Of all classes, by the teacher [B, classes].
        decided: Which class each state leads to.
        geometry: How the states move; of the model, and of the teacher.
        attention: Where the class token looks.
        followed: The distance from the teacher.
        region: The region around the last state in which the class stays.
        exponents: The largest Lyapunov exponent.
        grid: Rows and columns of the patches, if the tokens are one for each of them.
    """
    words: str
    times: list[float]
    probabilities: Tensor | None
    taught: Tensor | None
    decided: ClassOverTime | None
    geometry: tuple[Geometry, Geometry | None]
    attention: AttentionOverTime | None
    followed: DistanceOverTime | None
    region: Region | None
    exponents: Exponents
    grid: tuple[int, int] | None

    def sentence(self) -> str:
        """What the model does, in a sentence; and another, if these images look unlike its classes."""
        count = len(self.geometry[0].speed)
        images = 'one image' if count == 1 else f'{count} images'
        of = '' if count == 1 else f' (median of {images})'
        verb = ': '
        if self.followed is not None:
            said = (f"its last states differ from the teacher's by {100 * self.followed.distance[:, -1].median():.0f} "
                    '% of their norm')
            if self.taught is not None and self.decided is not None:
                same = int((self.taught.argmax(dim=-1) == self.decided.classes[:, -1]).sum())
                verb = f", gives the teacher's class for {same} of {images}; "
        else:
            largest = self.exponents.values[:, 0]
            said = (f'small changes of the state grow at most by a factor of '
                    f'{math.exp(float(largest.nanmedian())):.2f} per block' if largest.isfinite().any() else
                    f'there are no exponents ({next(reason for reason in self.exponents.reasons if reason)})')
            if self.decided is not None:
                verb = (f', has settled on its class at t = {self.decided.settled.nanmedian():.3g} of '
                        f'{self.times[-1]:.3g}; ')
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
    for each in (model, teacher):
        if each is not None and any(p.dtype != torch.float32 for p in each.parameters()):
            raise ValueError(f'A report measures in float32, but this {type(each).__name__} is in '
                             f'{next(each.parameters()).dtype}. Call float() on it first.')
    if teacher is None:
        return
    if renormalisation(model, teacher) is not None:
        raise ValueError('The teacher and the model normalise images differently (mean, std). Give a teacher with the '
                         'same normalisation.')
    for what, of in (('classes', lambda m: m.num_classes), ('input', lambda m: list(data_config(m)['input_size']))):
        if of(model) != of(teacher):
            raise ValueError(f'The teacher does not fit the model: {what} {of(teacher)} and {of(model)}. Give the '
                             'teacher that the model was made from.')


def _probabilities(model: Any, images: Tensor) -> Tensor:
    with follow(model, images) as flow:
        return torch.stack([flow.logits(x).softmax(dim=-1) for x in flow.states()], dim=1)


def _words(model: Any) -> str:
    odes = find_ode_blocks(model)
    if not odes:
        count = len(model.blocks)
        return f'{count} blocks, applied once each' if count > 1 else 'One block, applied once'
    ode = odes[0]
    kept, phases = len(ode.before) + len(ode.after), len(ode.shared.phases)
    shared = 'One shared block' if phases == 1 else f'{phases} shared blocks'
    extra = f" (and {kept} block{'s' if kept > 1 else ''} of the base)" if kept else ''
    times = 'once' if ode.nfe == 1 else f'{ode.nfe:g} times'
    by = '' if ode.nfe == ode.steps else f" by {ode.steps} step{'s' if ode.steps > 1 else ''} of {ode.method}"
    return f'{shared}{extra}, applied {times}{by}' + (
        '' if ode.config.time == 'autonomous' else ', with weights that change with t')
