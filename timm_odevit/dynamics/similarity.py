"""How alike the states at different times are, of one model or of two."""
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .flow import Flow, Images, PerImage, over_images

__all__ = ['Similarity', 'state_similarity']


@dataclass(frozen=True, repr=False)
class Similarity(PerImage):
    """Likeness of the states at each time of a model and those at each time of another.

    Attributes:
        values: Mean cosine of each token with itself at the other time [B, K + 1, L + 1].
        times: The times of the rows [K + 1].
        other_times: The times of the columns [L + 1].
    """
    values: Tensor
    times: Tensor = field(metadata={'shared': True})
    other_times: Tensor = field(metadata={'shared': True})


def state_similarity(model: Any, images: Images = None, *, other: Any = None, batch_size: int = 64) -> Similarity:
    """Likeness of the states at all pairs of times, over all tokens.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.
        other: A model of the same width and tokens; None for the model itself.

    Raises:
        ValueError: The two models have states of different shapes.

    Source: Raptor, arXiv 2512.19941.
    """
    return over_images(_similarity, model, images, batch_size, *([] if other is None else [other]))


def _similarity(flow: Flow, other: Flow | None = None) -> Similarity:
    other = other or flow
    if flow.start.shape != other.start.shape:
        raise ValueError(f'Cosines compare tokens one by one, but the states have the shapes {list(flow.start.shape)} '
                         f'and {list(other.start.shape)}. Give a model of the same width and tokens.')
    ours, theirs = (torch.stack([F.normalize(x.flatten(1, -2) if x.ndim > 2 else x[:, None], dim=-1)
                                 for x in each.states()], dim=1) for each in (flow, other))  # [B, times, N, D]
    return Similarity(torch.einsum('bknd,blnd->bkl', ours, theirs) / ours.shape[2],
                      *(torch.tensor(each.times, dtype=torch.float64) for each in (flow, other)))
