"""write_report: the page and report.json."""
import base64
import json
from collections.abc import Sequence
from contextlib import suppress
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
from ..data.pictures import class_names, model_name
from ..data.preprocessing import data_config
from ..files import to_json, write_text
from ..settings import shown
from .charts import Chart, charts, drawn, fill_page, plotly
from .findings import Findings, measure_all

__all__ = ['PAGE', 'photos', 'spotlight', 'write_report']

PAGE = 'index.html'
MOST = 64  # images; a page grows with each


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

    A slider over t moves attention and the probabilities of the classes together. Beside the
    page, report.json has the numbers.

    Args:
        model: timm model with one sequence of blocks: an ODE-ViT or an ordinary ViT.
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
        TypeError: A model has no single sequence of blocks.
        ValueError: The images are not a batch of 1 to 64, names do not fit, or the teacher does not fit the model.
        OSError: The folder cannot be written to.

    Examples:
        >>> page = write_report(student, images, 'report', teacher=teacher)    # report/index.html
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or not 1 <= len(images) <= MOST:
        given = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f'images must be a tensor [B, C, H, W] of 1 to {MOST} images; got {given}.')
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"'{out}' is a file. Give a folder to write to.")
    plotly()  # say what to install before anything is measured
    names = [f'image {i + 1}' for i in range(len(images))] if names is None else _texts('names', names, len(images))
    classes = None if classes is None else _texts('classes', classes, len(images))
    known = class_names(model)
    title = _texts('title', [title], 1)[0] if title is not None else model_name(model)
    found = measure_all(model, images, teacher, progress)
    page = _page(title, found, photos(images, model), charts(found, known), names, classes, known)
    numbers = to_json({
        'title': title, 'sentence': found.sentence(), 'version': __version__, 'torch': torch.__version__,
        'images': _rows(found, names, classes, known), **{
            name: value for name, value in asdict(found).items() if name not in ('probabilities', 'taught')}})
    with suppress(FileNotFoundError):
        (out / PAGE).unlink()  # an interrupted report has no page
    write_text(out / 'report.json', numbers)
    write_text(out / PAGE, page)
    return out / PAGE


def _texts(what: str, given: Sequence[Any], count: int) -> list[str]:
    """Strings, one per image, that can be written as UTF-8."""
    if isinstance(given, str) or len(given) != count or not all(isinstance(text, str) for text in given):
        raise ValueError(f'{what} must be {count} strings, one for each image; got {shown(given)}.')
    return [text.encode(errors='replace').decode() for text in given]


def _page(
        title: str, found: Findings, seen: list[Image.Image], made: list[Chart], names: Sequence[str],
        classes: Sequence[str] | None, known: Sequence[str] | None,
) -> str:
    from plotly.offline import get_plotlyjs  # charts() has imported plotly
    pictures = [_uri(picture) for picture in seen]
    frames: dict[str, Any] = {'times': [float(f'{t:.3g}') for t in found.times], 'photo': pictures,
                              'said': _said(found, names, known)}
    looks = [_figure('what the model sees')]
    if found.attention is not None and found.grid is not None:
        token = 'class token' if found.attention.class_token else 'tokens'
        about = f'attention of the {token} in the step that ends at t'
        for name, tokens, words in (('attention', found.attention.attention, about),
                                    ('rollout', found.attention.rollout,
                                     'attention through all steps up to t (rollout)')):
            # before the first step, there is none
            frames[name] = [[_uri(spotlight(torch.ones(found.grid))), *(_uri(spotlight(x)) for x in image)]
                            for image in tokens[..., found.attention.prefix:].unflatten(-1, found.grid)]
            looks.append(_figure(words, name))
    first = [_panel('What it looks at', 'The image is dark where there is little attention.',
                    f'<div class="seen">{"".join(looks)}</div>')]
    others: list[str] = []
    for i, chart in enumerate(made):
        (first if chart.first else others).append(_panel(chart.title, chart.about, _chart(i, chart)))
    choices = ''.join(
        f'<label title="{escape(name)}"><input type="radio" name="image" value="{i}"{" checked" if i == 0 else ""} '
        f'aria-label="{escape(name)}"><img src="{picture}" alt=""></label>'
        for i, (name, picture) in enumerate(zip(names, pictures, strict=True)))
    width, height = seen[0].size
    parts = {
        'title': escape(title), 'sentence': escape(found.sentence()), 'aspect': f'{width} / {height}',
        'last': str(len(found.times) - 1), 'choices': choices, 'first': ''.join(first), 'others': ''.join(others),
        'legend': 'Dashed: the teacher. ' if found.followed is not None else '',
        'table': _table(found, names, classes, known),
        'footer': f'Made by timm-odevit {__version__}: odevit report. One unit of time is one block of the base model. '
                  'The numbers are in report.json.',
        'frames': json.dumps(frames).replace('<', '\\u003c'), 'plotly': get_plotlyjs(),
    }
    return fill_page(__package__, parts)


def _said(found: Findings, names: Sequence[str], known: Sequence[str] | None) -> list[list[str]]:
    """What is written beside the slider, for each image and state."""
    if found.probabilities is None:
        return [[name] * len(found.times) for name in names]
    best, index = found.probabilities.max(dim=-1)
    return [[f'{name}: {_name(k, known)}, {100 * p:.0f} %' for p, k in zip(ps.tolist(), ks.tolist(), strict=True)]
            for name, ps, ks in zip(names, best, index, strict=True)]


def _panel(title: str, about: str, content: str) -> str:
    return f'<div class="panel"><h3>{escape(title)}</h3><p class="about">{escape(about)}</p>{content}</div>'


def _figure(caption: str, veil: str | None = None) -> str:
    """The photo, under a veil that lets through what is attended to."""
    images = f'<img data-of="photo" alt="{escape(caption)}">' + (f'<img data-of="{veil}" alt="">' if veil else '')
    return f'<figure><div class="stack">{images}</div><figcaption>{escape(caption)}</figcaption></figure>'


def _chart(i: int, chart: Chart) -> str:
    moves = f' data-moves="{chart.moves}"' if chart.moves else ''
    return f'<div role="img" aria-label="{escape(chart.title)}"{moves}>' + drawn(
        chart.figure, auto_play=False, div_id=f'chart-{i}') + '</div>'


def _name(index: Any, known: Sequence[str] | None) -> str:
    return known[int(index)] if known else f'class {int(index)}'


def _rows(found: Findings, names: Sequence[str], classes: Sequence[str] | None,
          known: Sequence[str] | None) -> list[dict[str, Any]]:
    """What is said about each image, by the heading of the column."""
    rows = []
    for i, name in enumerate(names):
        row: dict[str, Any] = {'image': name}
        if classes is not None:
            row['class'] = classes[i]
        if found.decided is not None:
            row['model'] = _name(found.decided.classes[i, -1], known)
            row['probability'] = float(found.decided.probability[i, -1])
        if found.taught is not None:
            row['teacher'] = _name(found.taught[i].argmax(), known)
        if found.decided is not None:
            row['settled at t'] = float(found.decided.settled[i])
        if found.region is not None:
            row['radius'] = float(found.region.worst[i] / found.region.norm[i])
        row['exponent'] = float(found.exponents.values[i, 0])
        if found.followed is not None:
            row['distance'] = float(found.followed.distance[i, -1])
            row["patches' cosine"] = float(found.followed.patches[i].mean())
        rows.append(row)
    return rows


ABOUT = {
    'settled at t': 'the class no longer changes after this time',
    'radius': 'how far the tokens that the head reads can move at the end before the class changes, in the worst '
              'direction, relative to their norm',
    'exponent': 'largest finite-time Lyapunov exponent, per unit of time',
    'distance': "distance of the last state, over all tokens, from the teacher's, relative to the norm of the "
                "teacher's",
    "patches' cosine": "mean cosine of the patch tokens with the teacher's, at the end",
}


def _table(found: Findings, names: Sequence[str], classes: Sequence[str] | None,
           known: Sequence[str] | None) -> str:
    rows = _rows(found, names, classes, known)

    def cell(value: Any) -> str:
        return f'<td class="n">{value:.3g}</td>' if isinstance(value, float) else f'<td>{escape(str(value))}</td>'
    head = ''.join(f'<th scope="col" title="{escape(ABOUT.get(name, ""))}">{escape(name)}</th>' for name in rows[0])
    body = ''.join(f"<tr>{''.join(cell(value) for value in row.values())}</tr>" for row in rows)
    notes = ''.join(f'<p class="about">{escape(name)}: {escape(ABOUT[name])}.</p>' for name in rows[0] if name in ABOUT)
    return f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}'


def photos(images: Tensor, model: Any) -> list[Image.Image]:
    """What a model sees: images [B, C, H, W], normalised for it, as pictures; grey with less than three channels."""
    cfg = data_config(model)
    mean, std = (torch.tensor(cfg[key]).view(1, -1, 1, 1) for key in ('mean', 'std'))
    pixels = ((images.cpu().float() * std + mean).clamp(0, 1) * 255).round().byte()
    pixels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1].expand(-1, 3, -1, -1)
    return [Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()) for x in pixels]


def spotlight(attention: Tensor) -> Image.Image:
    """A veil over an image [rows, columns], the more transparent the more attention a patch gets."""
    alpha = (200 * (1 - attention / attention.max().clamp_min(1e-12))).round().byte().numpy()
    return Image.fromarray(np.dstack([np.zeros((*alpha.shape, 3), np.uint8), alpha]))


def _uri(image: Image.Image) -> str:
    """A picture as a PNG inside of a page."""
    file = BytesIO()
    image.save(file, 'png', optimize=True)
    return f'data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'
