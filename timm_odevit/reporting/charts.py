"""The charts of a report, as numbers for page.html, which moves them with the image and with t."""
from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from .findings import Findings

__all__ = ['charts']

SHOWN = 5  # classes


def charts(found: Findings, names: Sequence[str] | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The charts that come first, and the others; `names` are those of the classes."""
    first = []
    if found.probabilities is not None:
        first.append(dict(kind='bars', title='What it would answer at t',
                          about='Probabilities, as the norm and head read them from the state at t.',
                          **_classes(found.probabilities, found.taught, names)))
    own, other = found.geometry
    rows: list[Any] = [  # title, what it shows, what was measured of model and teacher, their times and values
        ('Distance from the teacher',
         "Relative to the norm of the teacher's state, over all tokens. Where it jumps, try another phase or a "
         'higher rank.', found.followed, None, lambda m: (m.times, m.distance)),
        ('Probability of the final class',
         'As the norm and head read it from the state at t. If it is high early, images can stop early: odevit halt.',
         found.decided, None, lambda m: (m.times, m.probability)),
        ('Speed',
         'Length of a step over the norm of the state, per unit of time. Where it is low, fewer steps are enough.',
         own, other, lambda m: (m.times[1:], m.speed / m.norm[:, 1:])),
        ('Angle between steps', 'In degrees: 0 is straight on, 90 a right angle. Straight trajectories need few steps.',
         own, other, lambda m: (m.times[1:-1], m.angle)),
        ('Class token and patches',
         'Cosine of the class token and the mean patch token: near 1, pooling the patches would do as well.',
         own, other, lambda m: (m.times, m.cosine)),
        ('Similarity of the patches',
         'Mean cosine of two patch tokens (anisotropy). Near 1, try fewer tokens: tokens=0.5.',
         own, other, lambda m: (m.times, m.anisotropy)),
        ('Entropy of attention',
         'In nats: low where a token attends to few others; where it is high, try fewer tokens.',
         found.attention, None, lambda m: (m.times, m.entropy)),
        ('Largest Lyapunov exponent',
         'Up to t, per unit of time: above 0, some small changes of the state grow, and larger steps are a risk.',
         found.exponents, None, lambda m: (m.times, m.running[..., 0]))]
    lines = []
    for title, about, ours, theirs, of in rows:
        if ours is not None and not bool(of(ours)[1].isnan().all()):
            times, values = of(ours)
            lines.append(dict(kind='line', title=title, about=about, times=_rounded(times), values=_rounded(values),
                              mean=_rounded(values.nanmean(dim=0))))
            if theirs is not None:
                times, values = of(theirs)
                lines[-1]['teacher'] = [_rounded(times), _rounded(values.nanmean(dim=0))]
    return first, lines


def _classes(probabilities: Tensor, taught: Tensor | None, names: Sequence[str] | None) -> dict[str, Any]:
    """The likeliest classes of each image: their names, the model's probabilities over t, and the teacher's."""
    shown: dict[str, Any] = {'labels': [], 'values': [], 'teacher': []}
    for i, path in enumerate(probabilities):
        best = path.amax(dim=0) + 2 * path[-1] + (0 if taught is None else 2 * taught[i])
        best = best.topk(min(SHOWN, path.shape[1])).indices
        best = best[path[-1, best].argsort()]
        shown['labels'].append([escape(names[k] if names else f'class {k}') for k in best.tolist()])
        shown['values'].append(_rounded(path[:, best]))
        shown['teacher'].append(None if taught is None else _rounded(taught[i, best]))
    return {**shown, 'teacher': None if taught is None else shown['teacher']}


def _rounded(values: Tensor) -> Any:
    """As nested lists for JSON; what is not finite becomes None."""
    if values.ndim:
        return [_rounded(value) for value in values.cpu()]
    return float(f'{float(values):.4g}') if torch.isfinite(values) else None
