"""Pictures: images, attention and tokens as PNG, and static plots, with matplotlib."""
import base64
from io import BytesIO
from typing import Any, List, Optional, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.preprocessing import data_config
from ..evaluation.results import new_figure

__all__ = ['as_uri', 'draw_attention', 'draw_classes', 'draw_trajectories', 'photos', 'spotlight']

SHOWN = 5  # classes, and times


def photos(images: Tensor, model: Any) -> List[Image.Image]:
    """What a model sees: images [B, C, H, W], normalised for it, as pictures; grey with less than three channels."""
    cfg = data_config(model)
    mean, std = (torch.tensor(cfg[key]).view(1, -1, 1, 1) for key in ('mean', 'std'))
    pixels = ((images.cpu().float() * std + mean).clamp(0, 1) * 255).round().byte()
    pixels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1].expand(-1, 3, -1, -1)
    return [Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()) for x in pixels]


def spotlight(attention: Tensor) -> Image.Image:
    """A veil over an image [rows, columns], the more transparent the more attention a patch gets."""
    veil = 200 * (1 - attention / attention.max().clamp_min(1e-12))
    alpha = veil.round().byte().numpy()
    return Image.fromarray(np.dstack([np.zeros((*alpha.shape, 3), np.uint8), alpha]))


def as_uri(image: Image.Image) -> str:
    """A picture as a PNG inside of a page."""
    file = BytesIO()
    image.save(file, 'png', optimize=True)
    return f'data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'


def draw_classes(probabilities: Tensor, times: Sequence[float], names: Optional[Sequence[str]]) -> Any:
    """The classes of the last state along the way of one image, from probabilities [K + 1, classes]."""
    figure = new_figure(5, 3.6)
    axes = figure.subplots()
    for index in probabilities[-1].topk(min(SHOWN, probabilities.shape[1])).indices.tolist():
        axes.plot(times, probabilities[:, index].numpy(), marker='.', label=names[index] if names else f'class {index}')
    axes.set(xlabel='t', ylabel='probability', ylim=(0, 1.02), title='Classes, if the head read the state at t')
    axes.legend(frameon=False)
    return figure


def draw_attention(picture: Image.Image, attention: Tensor, times: Sequence[float]) -> Any:
    """An image, as the model sees it, and where its attention is at five times, on one scale [K, rows, columns]."""
    figure = new_figure(5, 3.6)
    first, *others = figure.subplots(2, 3).flat
    first.imshow(picture)
    first.set_title('image', fontsize=9)
    chosen = torch.linspace(0, len(attention) - 1, min(SHOWN, len(attention))).round().int().tolist()
    for axes, i in zip(others, chosen, strict=False):
        drawn = axes.imshow(attention[i].numpy(), cmap='magma', vmin=0, vmax=float(attention.max()))
        axes.set_title(f't = {times[i]:.3g}', fontsize=9)
    for axes in (first, *others):
        axes.axis('off')
    figure.colorbar(drawn, ax=[first, *others], shrink=0.8, label='attention')
    return figure


def draw_trajectories(points: Tensor, others: Tensor, explained: float) -> Any:
    """The trajectories of all images in their plane, from coordinates [B, K + 1, 2] of the model and the teacher."""
    figure = new_figure(6, 5)
    axes = figure.subplots()
    for i, path in enumerate(points):
        line, = axes.plot(*path.T.numpy(), marker='.', label='model' if i == 0 else None)
        if others.numel():
            axes.plot(*others[i].T.numpy(), '--', color=line.get_color(), label='teacher' if i == 0 else None)
        axes.plot(*path[-1].numpy(), 'o', color=line.get_color())
    axes.set(xlabel='first principal component', ylabel='second',
             title=f'Trajectories, {100 * explained:.0f} % of the variance')
    axes.legend(frameon=False)
    return figure
