"""Attention maps along the way, recomputed from the states: the model itself runs with fused attention."""
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .flow import Flow, Images, PerImage, over_images
from .lipschitz import PlainAttention, log_softmax_bound

__all__ = ['AttentionOverTime', 'attention_maps', 'attention_over_time', 'has_attention_maps']


def attention_maps(flow: Flow) -> Iterator[Tensor]:
    """The attention probabilities [B, heads, N, N] at the start of each step, one step at a time.

    Of blocks that combine several attentions, such as parallel or differential ones, it is the first.

    Raises:
        ValueError: A step computes no attention of all tokens over all tokens, like those with windows.
    """
    x = flow.start
    for step in flow.maps:
        with PlainAttention(x) as watched:
            y = step(x)
        if watched.found is None:
            raise ValueError('These blocks never attend from all tokens to all tokens (windows, say), so they have no '
                             'attention maps. Use a measure that needs none, such as trajectory_geometry.')
        yield watched.found
        x = y


def has_attention_maps(flow: Flow) -> bool:
    """Whether `attention_maps` works."""
    try:
        return all(True for _ in attention_maps(flow))
    except ValueError:
        return False


@dataclass(frozen=True, repr=False)
class AttentionOverTime(PerImage):
    """Where B images are attended to in K steps, averaged over the heads.

    Attributes:
        attention: What the class token attends to at the start of each step: probabilities over the tokens [B, K, N].
            Without a class token, the mean over all tokens.
        rollout: The same for all steps so far together: of x + h attention(x), x counts 1 and attention h [B, K, N].
        entropy: Mean entropy of the rows of the maps, in nats, at most log N [B, K].
        softmax_bound: JaSMin's g_1 of each head, the largest over the query rows, between 0 and 1/2 [B, K, heads]: a
            bound on the Jacobian of softmax, see `log_softmax_bound`.
        times: The times at which the steps start [K].
        prefix: How many of the tokens come before those of the patches.
        class_token: Whether it is the attention of a class token.
    """
    attention: Tensor
    rollout: Tensor
    entropy: Tensor
    softmax_bound: Tensor
    times: Tensor = dataclasses.field(metadata={'shared': True})
    prefix: int = dataclasses.field(metadata={'shared': True})
    class_token: bool = dataclasses.field(metadata={'shared': True})


def attention_over_time(model: Any, images: Images = None, *, batch_size: int = 64) -> AttentionOverTime:
    """What the class token attends to at each step, and through all steps together (attention rollout).

    The maps of one step at a time are held.

    Args:
        model, images, batch_size: See `timm_odevit.dynamics`.

    Raises:
        ValueError: The blocks have no attention of all tokens over all tokens.

    Examples:
        >>> found = attention_over_time(student, images)
        >>> print(found.rollout[:, -1])    # [B, N]

    Source: attention rollout, arXiv 2005.00928; the bound on the softmax: JaSMin, arXiv 2507.07814.
    """
    return over_images(_attention_over_time, model, images, batch_size)


def _attention_over_time(flow: Flow) -> AttentionOverTime:
    attention: list[Tensor] = []
    rollout: list[Tensor] = []
    entropy: list[Tensor] = []
    bound: list[Tensor] = []
    through: Any = None
    for h, heads in zip(flow.lengths(), attention_maps(flow), strict=True):
        entropy.append(torch.special.entr(heads).sum(dim=-1).mean(dim=(1, 2)))
        bound.append(log_softmax_bound(heads, 1)[..., 0].amax(dim=-1).exp())
        mean = heads.mean(dim=1)
        mixed = (h * mean + torch.eye(mean.shape[-1]).to(mean)) / (1. + h)
        through = mixed if through is None else mixed @ through
        for rows, found in ((mean, attention), (through, rollout)):
            found.append(rows[:, 0] if flow.class_token else rows.mean(dim=1))
    return AttentionOverTime(
        torch.stack(attention, 1), torch.stack(rollout, 1), torch.stack(entropy, 1), torch.stack(bound, 1),
        torch.tensor(flow.times[:-1], dtype=torch.float64), flow.prefix, flow.class_token)
