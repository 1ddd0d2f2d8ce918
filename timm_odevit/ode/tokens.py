"""Token merging: patch tokens that have become alike are merged along t, so that later steps compute fewer of them."""
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fields import Context

__all__ = ['Merging', 'Tokens', 'tokens_at']


def tokens_at(patches: int, share: float, progress: float) -> int:
    """How many patch tokens are left: the number falls linearly in t, to `share` of them at T.

    Args:
        patches: Number of patch tokens at t = 0.
        share: Share of them that is left at T.
        progress: t / T, from 0 to 1.
    """
    return max(1, round(int(patches) * (1. - (1. - share) * progress) + 1e-6))  # halves up, whatever the rounding of t


class Merging(threading.local):
    """What the steps of a solver share: the Tokens of the pass that each thread makes by calling them one by one.

    Args:
        share: Share of the patch tokens that is left at T.
        prefix: How many tokens, such as a class token and registers, come before those of the patches.
        span: Time at which the first step starts, and T.
    """

    def __init__(self, share: float, prefix: int, span: tuple[float, float]) -> None:
        self.arguments = share, prefix, span
        self.tokens = self.start()

    def start(self) -> 'Tokens':
        """The Tokens of a new pass."""
        return Tokens(*self.arguments)

    def __reduce__(self) -> Any:
        return Merging, self.arguments


class Tokens:
    """Which tokens have been merged in one pass through the steps.

    The state between two steps always has all tokens; merged ones have equal states there. A step computes each group
    once: the state of a group is the mean over its tokens, and attention counts a group as many times as it has tokens,
    so that the result is what the same step would give for the whole state. At the start of a step, the patch tokens
    are split into two halves, alternately, and those of the first half that are most like one of the second (in the
    cosine of their states) are merged with it. Prefix tokens are never merged.

    A state that is not the one with which the last step ended starts a new pass, in which all tokens are separate.

    Args:
        share, prefix, span: See Merging.

    Source: Token Merging (ToMe), arXiv 2210.09461.
    """

    def __init__(self, share: float, prefix: int, span: tuple[float, float]) -> None:
        self.share, self.prefix, (self.start, self.T) = share, prefix, span
        self.groups: Tensor | None = None  # the group of each token [B, N]; the prefix tokens are the first groups
        self.sizes: Tensor | None = None  # tokens in each group [B, G]
        self.first: Tensor | None = None  # one token of each group [B, G]
        self.entered: dict[Any, Any] = {}  # these three before each step, for gradient checkpointing
        self.end = 0.  # of the last step
        self.ended: Any = None  # its state, as `_identity` tells it from others

    def enter(self, step: Any, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        """The state of the groups [B, G, D] for a state of all tokens [B, N, D] at the start of a step, some merged.

        The context that is also returned makes attention count each group as many times as it has tokens.
        """
        if isinstance(x, torch.fx.Proxy):
            raise ValueError('FX cannot trace the merging of tokens. Set tokens=1, or use torch.export.')
        if context.passed.get('attn_mask') is not None or context.passed.get('is_causal'):
            raise ValueError(
                'Tokens cannot be merged under an attention mask, which names them by position. Set tokens=1.')
        state = _identity(step.t, x)
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # in a backward pass
        if again and state in self.entered:
            self.groups, self.sizes, self.first = self.entered[state]
        else:
            if state != self.ended:
                self.groups = self.sizes = self.first = None
            if step.t <= self.start + 1e-6:
                self.entered.clear()
            self.entered[state] = self.groups, self.sizes, self.first
        self.end, self.ended = step.t + step.h, None
        groups = x if self.first is None else _rows(x, self.first)
        merged = self._merge(groups, (step.t - self.start) / self.T, x.shape[1])
        context = context._replace(tokens=self)
        if self.sizes is None:
            return merged, context
        mask = self.sizes.to(x.dtype).log()[:, None, None]  # [B, 1, 1, G]
        return merged, context._replace(passed={**context.passed, 'attn_mask': mask})

    def leave(self, x: Tensor) -> Tensor:
        """The state of all tokens [B, N, D] for that of the groups [B, G, D] at the end of a step."""
        if self.groups is not None:
            x = _rows(x, self.groups)
        self.ended = _identity(self.end, x)
        return x

    def keep(self, images: Tensor, x: Tensor) -> None:
        """Keep only some of the images [B', as indices] of the batch, whose states are x [B', N, D]."""
        if self.groups is not None and self.sizes is not None and self.first is not None:
            self.groups, self.sizes, self.first = (of[images] for of in (self.groups, self.sizes, self.first))
        self.ended = _identity(self.end, x)

    def _merge(self, x: Tensor, progress: float, tokens: int) -> Tensor:
        """Merge as many groups of a state x [B, G, D] as is due; returns the state of those that are left."""
        B, G, D = x.shape
        patches = G - self.prefix
        count = min(patches - tokens_at(tokens - self.prefix, self.share, progress), patches // 2)
        if count < 1:
            return x
        with torch.no_grad():
            into, left = self._pairs(x, count)
            sizes = x.new_ones(B, G, dtype=torch.float32) if self.sizes is None else self.sizes
            self.sizes = sizes.new_zeros(B, G - count).scatter_add_(1, into, sizes)
            self.groups = into if self.groups is None else into.gather(1, self.groups)
            self.first = left if self.first is None else self.first.gather(1, left)
            share = (sizes / self.sizes.gather(1, into)).to(x.dtype)
        rows = (into + (G - count) * torch.arange(B, device=x.device)[:, None]).flatten()
        summed = x.new_zeros(B * (G - count), D).index_add(0, rows, (x * share[..., None]).flatten(0, 1))
        return summed.view(B, G - count, D)

    def _pairs(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The new number of each group of a state x [B, G, D] [B, G], and an old number of each new one [B, G']."""
        B, G, _ = x.shape
        unit = F.normalize(x[:, self.prefix:].float(), dim=-1)
        alike, partner = (unit[:, 1::2] @ unit[:, ::2].transpose(1, 2)).max(dim=-1)  # odd tokens, at least one even
        odd, even = (torch.arange(i, G - self.prefix, 2, device=x.device) + self.prefix for i in (1, 0))
        chosen = alike.topk(count, dim=-1).indices  # [B, count], of the odd ones
        source, target = odd[chosen], even[partner.gather(1, chosen)]
        old = torch.arange(G, device=x.device).expand(B, G)
        stays = torch.ones_like(old).scatter(1, source, 0)
        number = stays.cumsum(dim=1) - 1  # the new number of each group that stays
        into = number.gather(1, old.scatter(1, source, target))
        places = torch.where(stays > 0, number, G - count)  # those that do not stay share one that is cut off
        return into, torch.zeros_like(old)[:, :G - count + 1].scatter(1, places, old)[:, :G - count]


def _identity(t: float, x: Tensor) -> Any:
    """What tells the state x at t from others that live at the same time; only t where tensors have no addresses."""
    return round(t, 6) if torch.compiler.is_compiling() else (round(t, 6), tuple(x.shape), x.data_ptr())


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The tokens [B, G, D] of x [B, N, D] with the indices [B, G]."""
    B, N, D = x.shape
    flat = (index + N * torch.arange(B, device=x.device)[:, None]).flatten()
    return x.flatten(0, 1).index_select(0, flat).view(B, index.shape[1], D)
