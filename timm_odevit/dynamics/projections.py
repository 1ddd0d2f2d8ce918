"""States as pictures: trajectories in a plane, patch tokens as colours."""
import dataclasses
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..settings import checks_keywords
from .flow import Flow, Images, PerImage, over_images

__all__ = ['Plane', 'plane', 'token_colours']


@dataclass(frozen=True, repr=False)
class Plane(PerImage):
    """The trajectories of one token of B images in the plane of their two first principal components.

    Attributes:
        points: Coordinates of the model's states [B, K + 1, 2].
        others: Coordinates of the other model's states [B, L + 1, 2]; without another model, L + 1 is 0.
        times: The times of the states [K + 1].
        other_times: The times of the other model's states [L + 1].
        explained: Share of the variance that the plane shows.
    """
    points: Tensor
    others: Tensor
    times: Tensor = dataclasses.field(metadata={'shared': True})
    other_times: Tensor = dataclasses.field(metadata={'shared': True})
    explained: float = dataclasses.field(metadata={'shared': True}, default=0.)

    def __repr__(self) -> str:
        return f'Plane({len(self.points)} images, {100 * self.explained:.0f} % of the variance)'


@checks_keywords
def plane(model: Any, images: Images = None, *, other: Any = None, batch_size: int = 64) -> Plane:
    """The trajectories of the class token, of a model and of another, in one plane for all images.

    Args:
        model: timm model with one sequence of blocks, an ODE-ViT or an ordinary ViT; or a Flow, without images.
        images: Images [B, C, H, W], normalised for both models, on their device; or a loader of such batches.
        other: A model of the same width, such as the teacher; for a Flow, another Flow.
        batch_size: Images at a time.

    Returns:
        Plane. Without a class token, it shows the mean of the patch tokens.

    Raises:
        TypeError: A model has no single sequence of blocks.
        ValueError: There are no images, or the two models differ in width.
    """
    found = over_images(_tokens, model, images, batch_size, *([] if other is None else [other]))
    if other is not None and found.points.shape[-1] != found.others.shape[-1]:
        raise ValueError(f'Tokens of different width do not lie in one plane: {found.points.shape[-1]} and '
                         f'{found.others.shape[-1]}. Give a model of the same width.')
    everything = [found.points.flatten(0, 1), *([] if other is None else [found.others.flatten(0, 1)])]
    mean, axes, share = _principal(torch.cat(everything), 2)
    points = (found.points - mean) @ axes
    others = points[:, :0] if other is None else (found.others - mean) @ axes
    return dataclasses.replace(found, points=points, others=others, explained=share)


def _tokens(flow: Flow, other: Optional[Flow] = None) -> Plane:
    first = _token_path(flow)
    return Plane(first, first[:, :0] if other is None else _token_path(other),
                 torch.tensor(flow.times, dtype=torch.float64),
                 torch.tensor(() if other is None else other.times, dtype=torch.float64))


def _token_path(flow: Flow) -> Tensor:
    rows = [x if x.ndim == 2 else x[:, 0] if x.ndim == 3 and flow.class_token else x.flatten(1, -2).mean(dim=1)
            for x in flow.states()]
    return torch.stack(rows, dim=1)


def _principal(rows: Tensor, count: int) -> Tuple[Tensor, Tensor, float]:
    """The mean [D], the first principal axes [D, count] and the share of the variance along them, of rows [n, D].

    Rows that are not finite do not count. Each axis points so that its largest entry is positive.
    """
    rows = rows[rows.isfinite().all(dim=-1)]
    mean = rows.sum(dim=0, dtype=torch.float64) / max(len(rows), 1)
    spread = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=rows.device)
    for part in rows.split(8192):
        part = part.double() - mean
        spread += part.T @ part
    values, axes = torch.linalg.eigh(spread)  # ascending
    values, axes = values.flip(0).clamp_min(0.), axes.flip(1)[:, :count]
    axes = torch.nn.functional.pad(axes, (0, max(0, count - axes.shape[1])))
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    share = float(values[:count].sum() / values.sum().clamp_min(1e-30))
    return mean.to(rows.dtype), (axes * largest.sign()).to(rows.dtype), share


def token_colours(states: Sequence[Tensor]) -> List[Tensor]:
    """Tokens [..., D] as colours between 0 and 1 [..., 3], the same for equal tokens of all the given states.

    The three channels are the first principal components of the tokens of all states, cut off at their 2nd and 98th
    percentile. Tokens that are not finite are grey.

    Raises:
        ValueError: There are no states, or they differ in width.
    """
    if not states or len({x.shape[-1] for x in states}) > 1:
        raise ValueError(f'Give one or more states of the same width; got widths {[x.shape[-1] for x in states]}.')
    rows = torch.cat([x.flatten(0, -2).float() for x in states])
    mean, axes, _ = _principal(rows, 3)
    seen = (rows[rows.isfinite().all(dim=-1)] - mean) @ axes
    low, high = seen.quantile(torch.tensor([0.02, 0.98]).to(mean), dim=0) if len(seen) else (mean[:3] * 0, mean[:3] * 0)
    span = (high - low).clamp_min(1e-12)
    return [(((x.float() - mean) @ axes - low) / span).nan_to_num(0.5).clamp(0, 1) for x in states]
