"""Token merging: patch tokens that have become alike are merged along t, so that later steps compute fewer of them."""
from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .fields import Context

__all__ = ['Tokens', 'tokens_at']


def tokens_at(patches: int, share: float, progress: float) -> int:
    """How many patch tokens are left: the number falls linearly in t, to `share` of them at T.

    Args:
        patches: Number of patch tokens at t = 0.
        share: Share of them that is left at T.
        progress: t / T, from 0 to 1.
    """
    return max(1, round(int(patches) * (1. - (1. - share) * progress) + 1e-6))  # halves up, whatever the rounding of t


class Tokens:
    """Which tokens have been merged in one pass through the steps.

    The state between two steps always has all tokens; merged ones have equal states there. A step computes each group
    once: the state of a group is the mean over its tokens, and attention counts a group as many times as it has tokens,
    so that the result is what the same step would give for the whole state. At the start of a step, the patch tokens
    are split into two halves, alternately, and those of the first half that are most like one of the second (in the
    cosine of their states) are merged with it. Prefix tokens are never merged.

    Args:
        share: Share of the patch tokens that is left at T.
        prefix: How many tokens, such as a class token and registers, come before those of the patches.
        span: Time at which the first step starts, and T.

    Source: Token Merging (ToMe), arXiv 2210.09461.
    """

    def __init__(self, share: float, prefix: int, span: Tuple[float, float]) -> None:
        self.share, self.prefix, (self.start, self.T) = share, prefix, span
        self.groups: Optional[Tensor] = None  # the group of each token [B, N]; the prefix tokens are the first groups
        self.sizes: Optional[Tensor] = None  # tokens in each group [B, G]
        self.first: Optional[Tensor] = None  # one token of each group [B, G]
        self.entered: Dict[float, Any] = {}  # these three before each step, for gradient checkpointing
        self.t, self.images = self.start, 0  # where the last step ended, and the size of its batch

    def step(self, step: Any, x: Tensor, context: Context) -> Tensor:
        """Run a step from t to t + h on the groups of the state x [B, N, D]; returns a state of all tokens."""
        if isinstance(x, torch.fx.Proxy):
            raise ValueError('FX cannot trace the merging of tokens. Set tokens=1, or use torch.export.')
        if context.passed.get('attn_mask') is not None or context.is_causal:
            raise ValueError(
                'Tokens cannot be merged under an attention mask, which names them by position. Set tokens=1.')
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # in a backward pass
        if again and step.t in self.entered:
            self.groups, self.sizes, self.first = self.entered[step.t]
        else:
            if step.t <= self.start + 1e-6 or abs(step.t - self.t) > 1e-6 or x.shape[0] != self.images:  # a new pass
                self.groups = self.sizes = self.first = None
                self.entered.clear()
            self.entered[step.t] = self.groups, self.sizes, self.first
            self.t, self.images = step.t + step.h, x.shape[0]
        small = x if self.first is None else _rows(x, self.first)
        small = self._merge(small, x.shape[1], (step.t - self.start) / self.T)
        if self.sizes is None:
            return step.advance(x, context)
        mask = self.sizes.to(x.dtype).log()[:, None, None]  # [B, 1, 1, G]
        masked = context._replace(attn_mask=mask, passed={**context.passed, 'attn_mask': mask})
        return _rows(step.advance(small, masked), self.groups)

    def keep(self, images: Tensor) -> None:
        """Keep only some of the images [B', as indices] of the batch."""
        self.images = len(images)
        if self.groups is not None and self.sizes is not None and self.first is not None:
            self.groups, self.sizes, self.first = (x[images] for x in (self.groups, self.sizes, self.first))

    def _merge(self, x: Tensor, tokens: int, progress: float) -> Tensor:
        """Merge tokens of the state x [B, G, D] of the groups, as many as is due; returns the state of the groups."""
        B, G, D = x.shape
        patches = G - self.prefix
        count = min(patches - tokens_at(tokens - self.prefix, self.share, progress), patches // 2)
        if count < 1:
            return x
        device = x.device
        with torch.no_grad():
            unit = F.normalize(x[:, self.prefix:].float(), dim=-1)
            alike, partner = (unit[:, 1::2] @ unit[:, ::2].transpose(1, 2)).max(dim=-1)  # odd tokens, at least one even
            odd, even = (torch.arange(i, patches, 2, device=device) + self.prefix for i in (1, 0))
            chosen = alike.topk(count, dim=-1).indices  # [B, count], of the odd ones
            source, target = odd[chosen], even[partner.gather(1, chosen)]
            old = torch.arange(G, device=device).expand(B, G)
            stays = torch.ones_like(old).scatter(1, source, 0)
            number = stays.cumsum(dim=1) - 1  # the new number of each group that stays
            into = number.gather(1, old.scatter(1, source, target))
            places = torch.where(stays > 0, number, G - count)  # those that do not stay share one that is cut off
            left = torch.zeros_like(old)[:, :G - count + 1].scatter(1, places, old)[:, :G - count]
            sizes = torch.ones(B, G, device=device) if self.sizes is None else self.sizes
            self.sizes = torch.zeros(B, G - count, device=device).scatter_add_(1, into, sizes)
            self.groups = into if self.groups is None else into.gather(1, self.groups)
            self.first = left if self.first is None else self.first.gather(1, left)
            share = (sizes / self.sizes.gather(1, into)).to(x.dtype)
        rows = (into + (G - count) * torch.arange(B, device=device)[:, None]).flatten()
        summed = x.new_zeros(B * (G - count), D).index_add(0, rows, (x * share[..., None]).flatten(0, 1))
        return summed.view(B, G - count, D)


def _rows(x: Tensor, index: Optional[Tensor]) -> Tensor:
    """The tokens [B, G, D] of x [B, N, D] with the indices [B, G]."""
    assert index is not None
    B, N, D = x.shape
    flat = (index + N * torch.arange(B, device=x.device)[:, None]).flatten()
    return x.flatten(0, 1).index_select(0, flat).view(B, index.shape[1], D)
