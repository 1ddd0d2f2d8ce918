"""write_report: index.html, with its charts, and report.json."""
import base64
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from .._version import __version__
from ..data.preprocessing import class_names, data_config, model_name
from ..files import to_json, write_text
from ..settings import shown
from .findings import Findings, measure_all
from .page import encodable, page, plotly_js

__all__ = ['photos', 'spotlight', 'write_report']

MOST = 64  # images; a page grows with each
SHOWN = 5  # classes


def write_report(
        model: nn.Module,
        images: Tensor,
        out: str | Path,
        *,
        teacher: nn.Module | None = None,
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        title: str | None = None,
        progress: bool = True,
) -> Path:
    """Write a page that shows what a model does with a few images; it needs no network and no server.

    A slider over t moves attention and the probabilities of the classes together; report.json has the numbers.

    Args:
        model: timm model with one sequence of blocks: an ODE-ViT or an ordinary ViT, in float32.
        images: 1 to 64 images [B, C, H, W], normalised for the model, on its device.
        out: Folder for index.html and report.json; files of these names are replaced.
        teacher: Model to compare with, of the same width, tokens, classes and normalisation of images.
        names: Names of the images.
        classes: True class of each image, for the table.
        title: Title of the page.
        progress: Show a progress bar.

    Returns:
        The path of index.html.

    Raises:
        ImportError: plotly is not installed; the message says what to type.
        TypeError, ValueError: A model has no single sequence of blocks; images, names or teacher do not fit it.
        OSError: The folder cannot be written to.

    Examples:
        >>> page = write_report(student, images, 'report', teacher=teacher)    # report/index.html
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or not 1 <= len(images) <= MOST:
        given = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f'images must be a tensor [B, C, H, W] of 1 to {MOST} images; got {given}.')
    columns: dict[str, Any] = {'image': names or [f'image {i + 1}' for i in range(len(images))]}
    if classes is not None:
        columns['class'] = classes
    for heading, texts in columns.items():
        if len(texts) != len(images) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'names and classes must be {len(images)} strings each; got {shown(texts)}.')
        columns[heading] = list(map(encodable, texts))
    plotly_js()  # says what to install before anything is measured
    title, known = encodable(title or model_name(model)), class_names(model)
    found = measure_all(model, images, teacher, progress)
    columns.update(_columns(found, known))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    html = _page(title, found, [_uri(picture) for picture in photos(images, model)], rows, known)
    numbers = {name: value for name, value in asdict(found).items() if name not in ('probabilities', 'taught')}
    text = to_json({'title': title, 'sentence': found.sentence(), 'version': __version__, 'torch': torch.__version__,
                    'images': rows, **numbers})
    path = Path(out) / 'index.html'
    path.unlink(missing_ok=True)  # an interrupted report has no page
    write_text(path.with_name('report.json'), text)
    write_text(path, html)
    return path


def _page(title: str, found: Findings, photos: list[str], rows: list[dict[str, Any]], known: Any) -> str:
    names, seen = [row['image'] for row in rows], found.attention
    looks: list[Any] = [['what the model sees']]
    if seen is not None and found.grid is not None:
        of = 'class token' if seen.class_token else 'tokens'
        for words, name in ((f'attention of the {of} in the step that ends at t', 'attention'),
                            ('attention through all steps up to t (rollout)', 'rollout')):
            tokens = getattr(seen, name)[..., seen.prefix:].unflatten(-1, found.grid)
            # before the first step, there is none
            veils = [[_uri(spotlight(x)) for x in (torch.ones(found.grid), *steps)] for steps in tokens]
            looks.append([words, name, veils])
    legend = '' if found.followed is None else 'Dashed: the teacher. '
    return page(
        title, found.sentence(), f'Made by timm-odevit {__version__}: odevit report. One unit of time is one block of '
        'the base model. The numbers are in report.json.',
        [list(rows[0]), *([value if isinstance(value, str) else f'{value:.3g}' if value == value else '-'
                           for value in row.values()] for row in rows)], _classes_over_time(found, known),
        notes=[f'{name}: {ABOUT[name]}.' for name in rows[0] if name in ABOUT], looks=looks, photos=photos, names=names,
        more=['The dynamics, and what they suggest', 'Solid: the model, mean over all images. Dotted: the selected '
              f'image. {legend}The vertical bar marks the selected time.', _lines(found)],
        times=[float(f'{t:.3g}') for t in found.times], said=_said(found, names, known))


def _said(found: Findings, names: Sequence[str], known: Sequence[str] | None) -> list[list[str]]:
    """What is written beside the slider, for each image and state."""
    if found.probabilities is None:
        return [[name] * len(found.times) for name in names]
    best, index = found.probabilities.max(dim=-1)
    return [[f'{name}: {_name(k, known)}, {100 * p:.0f} %' for p, k in zip(ps.tolist(), ks.tolist(), strict=True)]
            for name, ps, ks in zip(names, best, index, strict=True)]


def _name(index: Any, known: Sequence[str] | None) -> str:
    return known[int(index)] if known else f'class {int(index)}'


ABOUT = {
    'settled at t': 'the class no longer changes after this time',
    'radius': 'how far the tokens that the head reads can move at the end before the class changes, in the worst '
              'direction, relative to their norm',
    'exponent': 'largest finite-time Lyapunov exponent, per unit of time',
    'distance': "distance of the last state, over all tokens, from the teacher's, relative to the norm of the "
                "teacher's",
    "patches' cosine": "mean cosine of the patch tokens with the teacher's, at the end",
}


def _columns(found: Findings, known: Sequence[str] | None) -> dict[str, Any]:
    """What was measured of each image, by the heading of the column."""
    decided, followed, region = found.decided, found.followed, found.region
    columns: dict[str, Any] = {}
    if decided is not None and region is not None:
        columns['model'] = [_name(index, known) for index in decided.classes[:, -1]]
        columns['probability'] = decided.probability[:, -1].tolist()
        columns['settled at t'] = decided.settled.tolist()
        columns['radius'] = (region.worst / region.norm).tolist()
    columns['exponent'] = found.exponents.values[:, 0].tolist()
    if found.taught is not None:
        columns['teacher'] = [_name(index, known) for index in found.taught.argmax(dim=-1)]
    if followed is not None:
        columns['distance'] = followed.distance[:, -1].tolist()
        columns["patches' cosine"] = followed.patches.mean(dim=-1).tolist()
    return columns


LINES: list[tuple[str, str, str, Any]] = [  # title, what it shows, where it is in Findings, its times and values there
    ('Distance from the teacher', "Relative to the norm of the teacher's state, over all tokens. Where it jumps, try "
     'another phase or a higher rank.', 'followed', lambda m: (m.times, m.distance)),
    ('Probability of the final class', 'As the norm and head read it from the state at t. If it is high early, images '
     'can stop early: odevit halt.', 'decided', lambda m: (m.times, m.probability)),
    ('Speed', 'Length of a step over the norm of the state, per unit of time. Where it is low, fewer steps are enough.',
     'geometry', lambda m: (m.times[1:], m.speed / m.norm[:, 1:])),
    ('Angle between steps', 'In degrees: 0 is straight on, 90 a right angle. Straight trajectories need few steps.',
     'geometry', lambda m: (m.times[1:-1], m.angle)),
    ('Class token and patches', 'Cosine of the class token and the mean patch token: near 1, pooling the patches would '
     'do as well.', 'geometry', lambda m: (m.times, m.cosine)),
    ('Similarity of the patches', 'Mean cosine of two patch tokens (anisotropy). Near 1, try fewer tokens: tokens=0.5.',
     'geometry', lambda m: (m.times, m.anisotropy)),
    ('Entropy of attention', 'In nats: low where a token attends to few others; where it is high, try fewer tokens.',
     'attention', lambda m: (m.times, m.entropy)),
    ('Largest Lyapunov exponent', 'Up to t, per unit of time: above 0, some small changes of the state grow, and '
     'larger steps are a risk.', 'exponents', lambda m: (m.times, m.running[..., 0])),
]


def _lines(found: Findings) -> list[dict[str, Any]]:
    """The charts over t that have anything to show, as numbers for page.html."""
    lines = []
    for title, about, name, of in LINES:
        measured = getattr(found, name)
        ours, theirs = measured if name == 'geometry' else (measured, None)
        if ours is None or bool(of(ours)[1].isnan().all()):
            continue
        line: dict[str, Any] = dict(kind='line', title=title, about=about)
        line['times'], line['values'] = map(_rounded, of(ours))
        line['mean'] = _rounded(of(ours)[1].nanmean(dim=0))
        if theirs is not None:
            times, values = of(theirs)
            line['teacher'] = [_rounded(times), _rounded(values.nanmean(dim=0))]
        lines.append(line)
    return lines


def _classes_over_time(found: Findings, known: Sequence[str] | None) -> list[dict[str, Any]]:
    """The chart of the likeliest classes of each image: their names, and their probabilities over t; none without."""
    taught = found.taught
    labels, values, teacher = [], [], []
    for i, path in enumerate([] if found.probabilities is None else found.probabilities):
        best = path.amax(dim=0) + 2 * path[-1] + (0 if taught is None else 2 * taught[i])
        best = best.topk(min(SHOWN, path.shape[1])).indices
        best = best[path[-1, best].argsort()]
        labels.append([escape(_name(k, known)) for k in best])
        values.append(_rounded(path[:, best]))
        teacher.append(None if taught is None else _rounded(taught[i, best]))
    return [dict(kind='bars', title='What it would answer at t',
                 about='Probabilities, as the norm and head read them from the state at t.', labels=labels,
                 values=values, teacher=None if taught is None else teacher)] if values else []


def _rounded(values: Tensor) -> Any:
    """As nested lists for JSON; what is not finite becomes None."""
    if values.ndim:
        return [_rounded(value) for value in values.cpu()]
    return float(f'{float(values):.4g}') if torch.isfinite(values) else None


def photos(images: Tensor, model: Any) -> list[Image.Image]:
    """What a model sees: images [B, C, H, W], normalised for it, as pictures; grey with less than three channels."""
    cfg = data_config(model)
    mean, std = (torch.tensor(cfg[key]).view(1, -1, 1, 1) for key in ('mean', 'std'))
    pixels = ((images.cpu().float() * std + mean).clamp(0, 1) * 255).round().byte()
    pixels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1].expand(-1, 3, -1, -1)
    return [Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()) for x in pixels]


def spotlight(attention: Tensor) -> Image.Image:
    """A veil over an image [rows, columns], the more transparent the more attention a patch gets."""
    alpha = (200 * (1 - attention / attention.max().clamp_min(1e-12))).round().byte().cpu().numpy()
    return Image.fromarray(np.dstack([np.zeros((*alpha.shape, 3), np.uint8), alpha]))


def _uri(image: Image.Image) -> str:
    """A picture as a PNG inside of a page."""
    file = BytesIO()
    image.save(file, 'png', optimize=True)
    return f'data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'
