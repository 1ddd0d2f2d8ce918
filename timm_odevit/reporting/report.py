"""write_report: index.html, with its charts, and report.json."""
import base64
import math
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
        names, classes: Name and true class of each image.
        title, progress: Title of the page; whether to show a progress bar.

    Returns the path of index.html. Raises ImportError without plotly, TypeError for a model without a single sequence
    of blocks, and ValueError if images, names or teacher do not fit it.

    Examples:
        >>> page = write_report(student, images, 'report', teacher=teacher)    # report/index.html
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or not 1 <= len(images) <= MOST:
        raise ValueError(f'images must be a tensor [B, C, H, W] of 1 to {MOST} images; got '
                         f'{getattr(images, "shape", type(images))}.')
    columns: dict[str, Any] = {'image': names or [f'image {i + 1}' for i in range(len(images))]}
    if classes is not None:
        columns['class'] = classes
    for heading, texts in columns.items():
        if len(texts) != len(images) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'names and classes must be {len(images)} strings each; got {shown(texts)}.')
        columns[heading] = list(map(encodable, texts))
    plotly_js()  # says what to install before anything is measured
    title, known = encodable(title or model_name(model)), class_names(model)
    known = known or [f'class {i}' for i in range(model.num_classes)]  # type: ignore[arg-type]
    found = measure_all(model, images, teacher, progress)
    columns.update(_columns(found, known))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    pictures = {'photos': [_uri(photo) for photo in photos(images, model)], 'looks': _looks(found, model)}
    html = _page(title, found, rows, known, pictures)
    numbers = {name: value for name, value in asdict(found).items() if name not in ('probabilities', 'taught')}
    numbers.update(title=title, sentence=found.sentence(), version=__version__, images=rows)
    text, path = to_json(numbers), Path(out) / 'index.html'
    path.unlink(missing_ok=True)  # an interrupted report has no page
    write_text(path.with_name('report.json'), text)
    write_text(path, html)
    return path


def _looks(found: Findings, model: Any) -> list[Any]:
    """What is shown of each image: its caption, and, if it is attention, its name and the veils [B][K + 1]."""
    seen, grid = found.attention, getattr(getattr(model, 'patch_embed', None), 'grid_size', None)
    looks: list[Any] = [['what the model sees']]
    if seen is None or grid is None or math.prod(grid) != seen.attention.shape[-1] - seen.prefix:
        return looks
    of = 'class token' if seen.class_token else 'tokens'
    for words, name in ((f'attention of the {of} in the step that ends at t', 'attention'),
                        ('attention through all steps up to t (rollout)', 'rollout')):
        tokens = getattr(seen, name)[..., seen.prefix:].unflatten(-1, grid)
        # before the first step, there is none
        looks.append([words, name, [[_uri(spotlight(x)) for x in (torch.ones(grid), *steps)] for steps in tokens]])
    return looks


def _page(
        title: str, found: Findings, rows: list[dict[str, Any]], known: Sequence[str], pictures: dict[str, Any],
) -> str:
    names, times = [row['image'] for row in rows], found.geometry.times.tolist()
    said = [[name] * len(times) for name in names]  # beside the slider, for each image and state
    if found.probabilities is not None:
        best, index = found.probabilities.max(dim=-1)
        said = [[f'{name}: {known[k]}, {100 * p:.0f} %' for p, k in zip(*path, strict=True)]
                for name, *path in zip(names, best.tolist(), index.tolist(), strict=True)]
    cells = [[value if isinstance(value, str) else '-' if math.isnan(value) else f'{value:.3g}'
              for value in row.values()] for row in rows]
    return page(
        title, found.sentence(), f'Made by timm-odevit {__version__}: odevit report. One unit of time is one block of '
        'the base model. The numbers are in report.json.', [list(rows[0]), *cells], _classes_over_time(found, known),
        notes=[f'{name}: {ABOUT[name]}.' for name in rows[0] if name in ABOUT], names=names,
        more=['The dynamics, and what they suggest', 'Solid: the model, mean over all images. Dotted: the selected '
              'image. Dashed: the teacher. The vertical bar marks the selected time.', _lines(found)],
        times=[float(f'{t:.3g}') for t in times], said=said, **pictures)


ABOUT = {
    'settled at t': 'the class no longer changes after this time',
    'radius': 'how far the tokens that the head reads can move at the end before the class changes, in the worst '
              'direction, relative to their norm',
    'exponent': 'largest finite-time Lyapunov exponent, per unit of time',
    'distance': "of the last state, over all tokens, from the teacher's, relative to the teacher's norm",
    "patches' cosine": "mean cosine of the patch tokens with the teacher's, at the end",
}


def _columns(found: Findings, known: Sequence[str]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if found.decided is not None and found.region is not None:
        columns['model'] = [known[k] for k in found.decided.classes[:, -1].tolist()]
        columns['probability'] = found.decided.probability[:, -1].tolist()
        columns['settled at t'] = found.decided.settled.tolist()
        columns['radius'] = (found.region.worst / found.region.norm).tolist()
    columns['exponent'] = found.exponents.values[:, 0].tolist()
    if found.taught is not None:
        columns['teacher'] = [known[k] for k in found.taught.argmax(dim=-1).tolist()]
    if found.followed is not None:
        columns['distance'] = found.followed.distance[:, -1].tolist()
        columns["patches' cosine"] = found.followed.patches.mean(dim=-1).tolist()
    return columns


LINES: list[tuple[str, str, str, Any]] = [  # title, what it shows, where it is in Findings, its times and values
    ('Distance from the teacher', "Over all tokens, relative to the teacher's norm. Where it jumps, try more phases.",
     'followed', lambda m: (m.times, m.distance)),
    ('Probability of the final class', 'Read from the state at t. If it is high early, images can stop early: odevit '
     'halt.', 'decided', lambda m: (m.times, m.probability)),
    ('Speed', 'Relative to the norm of the state, per unit of time. Where it is low, fewer steps are enough.',
     'geometry', lambda m: (m.times[1:], m.speed / m.norm[:, 1:])),
    ('Angle between steps', 'In degrees: 0 is straight on. Straight trajectories need few steps.',
     'geometry', lambda m: (m.times[1:-1], m.angle)),
    ('Class token and patches', 'Cosine of the class token and the mean patch token. Near 1, pooling would do as well.',
     'geometry', lambda m: (m.times, m.cosine)),
    ('Similarity of the patches', 'Mean cosine of two patch tokens (anisotropy). Near 1, try fewer tokens: tokens=0.5.',
     'geometry', lambda m: (m.times, m.anisotropy)),
    ('Entropy of attention', 'In nats: low where a token attends to few others; where it is high, try fewer tokens.',
     'attention', lambda m: (m.times, m.entropy)),
    ('Largest Lyapunov exponent', 'Up to t, per unit of time. Above 0, some small changes grow; larger steps are a '
     'risk.', 'exponents', lambda m: (m.times, m.running[..., 0])),
]


def _lines(found: Findings) -> list[dict[str, Any]]:
    """The charts over t that have anything to show."""
    lines = []
    for title, about, name, of in LINES:
        measured = getattr(found, name)
        if measured is None or bool(of(measured)[1].isnan().all()):
            continue
        times, values = of(measured)
        line = dict(kind='line', title=title, about=about, times=times, values=values, mean=values.nanmean(dim=0))
        if name == 'geometry' and found.teacher is not None:
            times, values = of(found.teacher)
            line['teacher'] = [times, values.nanmean(dim=0)]
        lines.append(line)
    return lines


def _classes_over_time(found: Findings, known: Sequence[str]) -> list[dict[str, Any]]:
    """The chart of the likeliest classes of each image; none without classes."""
    if found.probabilities is None:
        return []
    labels, values, teacher = [], [], []
    for i, path in enumerate(found.probabilities):
        best = path.amax(dim=0) + 2 * path[-1]
        best = (best if found.taught is None else best + 2 * found.taught[i]).topk(min(SHOWN, path.shape[1])).indices
        best = best[path[-1, best].argsort()]
        labels.append([escape(known[k]) for k in best.tolist()])
        values.append(path[:, best])
        if found.taught is not None:
            teacher.append(found.taught[i, best])
    return [dict(kind='bars', title='What it would answer at t',
                 about='Probabilities, as the norm and head read them from the state at t.', labels=labels,
                 values=values, teacher=teacher or None)]


def photos(images: Tensor, model: Any) -> list[Image.Image]:
    """What a model sees, of images [B, C, H, W] normalised for it; grey with less than three channels."""
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
    file = BytesIO()
    image.save(file, 'png', optimize=True)
    return f'data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'
