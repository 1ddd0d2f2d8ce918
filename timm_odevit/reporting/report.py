"""write_report: index.html and report.json."""
import base64
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
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
from .charts import charts
from .findings import Findings, measure_all
from .page import page, plotly_js, printable

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
    plotly_js()  # say what to install before anything is measured
    out, title = Path(out), printable(title or model_name(model))
    names = _texts('names', names or [f'image {i + 1}' for i in range(len(images))], len(images))
    found, known = measure_all(model, images, teacher, progress), class_names(model)
    rows = _rows(found, names, None if classes is None else _texts('classes', classes, len(images)), known)
    html = _page(title, found, [_uri(picture) for picture in photos(images, model)], rows, known)
    numbers = to_json({
        'title': title, 'sentence': found.sentence(), 'version': __version__, 'torch': torch.__version__,
        'images': rows, **{
            name: value for name, value in asdict(found).items() if name not in ('probabilities', 'taught')}})
    with suppress(FileNotFoundError):
        (out / PAGE).unlink()  # an interrupted report has no page
    write_text(out / 'report.json', numbers)
    write_text(out / PAGE, html)
    return out / PAGE


def _texts(what: str, given: Sequence[Any], count: int) -> list[str]:
    """Strings, one per image, that can be written as UTF-8."""
    if isinstance(given, str) or len(given) != count or not all(isinstance(text, str) for text in given):
        raise ValueError(f'{what} must be {count} strings, one for each image; got {shown(given)}.')
    return list(map(printable, given))


def _page(title: str, found: Findings, photos: list[str], rows: list[dict[str, Any]], known: Any) -> str:
    names, (first, more) = [row['image'] for row in rows], charts(found, known)
    looks: list[Any] = [['what the model sees']]
    seen = found.attention
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
        [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)], first,
        notes=[f'{name}: {ABOUT[name]}.' for name in rows[0] if name in ABOUT], looks=looks, photos=photos, names=names,
        more=['The dynamics, and what they suggest', 'Solid: the model, mean over all images. Dotted: the selected '
              f'image. {legend}The vertical bar marks the selected time.', more],
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


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else f'{value:.3g}' if value == value else '-'


ABOUT = {
    'settled at t': 'the class no longer changes after this time',
    'radius': 'how far the tokens that the head reads can move at the end before the class changes, in the worst '
              'direction, relative to their norm',
    'exponent': 'largest finite-time Lyapunov exponent, per unit of time',
    'distance': "distance of the last state, over all tokens, from the teacher's, relative to the norm of the "
                "teacher's",
    "patches' cosine": "mean cosine of the patch tokens with the teacher's, at the end",
}


def _rows(found: Findings, names: Sequence[str], classes: Sequence[str] | None,
          known: Sequence[str] | None) -> list[dict[str, Any]]:
    """What is said about each image, by the heading of the column."""
    decided, followed, region = found.decided, found.followed, found.region
    columns: dict[str, Any] = {'image': names}
    if classes is not None:
        columns['class'] = classes
    if decided is not None:
        columns['model'] = [_name(index, known) for index in decided.classes[:, -1]]
        columns['probability'] = decided.probability[:, -1].tolist()
    if found.taught is not None:
        columns['teacher'] = [_name(index, known) for index in found.taught.argmax(dim=-1)]
    if decided is not None:
        columns['settled at t'] = decided.settled.tolist()
    if region is not None:
        columns['radius'] = (region.worst / region.norm).tolist()
    columns['exponent'] = found.exponents.values[:, 0].tolist()
    if followed is not None:
        columns['distance'] = followed.distance[:, -1].tolist()
        columns["patches' cosine"] = followed.patches.mean(dim=-1).tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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
