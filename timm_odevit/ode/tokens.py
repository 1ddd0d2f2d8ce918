"""Fewer tokens along t: patch tokens that have become alike are merged."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .fields import Context, Groups


@dataclass(eq=False)
class TokenMerging:
    """How the steps of a solver on [start, start + T] merge tokens, so that a `share` of them is left at T.

    The state between two steps has all tokens; merged ones are equal there. A step computes each group once: its state
    is the mean over its tokens, and attention counts it as often as it has tokens. At the start of a step, every second
    patch token may be merged with the one of the others that is most like it, in the cosine of their states.

    Source: Token Merging (ToMe), arXiv 2210.09461.
    """
    share: float
    num_prefix_tokens: int
    start: float
    T: float

    def enter(self, t: float, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        """The state of the groups [B, G, D] for that of all tokens [B, N, D], and the context for it."""
        if context.block_kwargs.get('attn_mask') is not None or context.block_kwargs.get('is_causal'):
            raise ValueError('Tokens cannot be merged under an attention mask. Set tokens=1.')
        groups, y, (B, N, _) = groups_of(x), x, x.shape
        if groups is not None:
            tokens, one_of_each = torch.arange(N, device=x.device), torch.zeros_like(groups.sizes, dtype=torch.long)
            y = _rows(x, one_of_each.scatter(1, groups.numbers, tokens.expand(B, N)))
        elif not torch.compiler.is_compiling() and t > self.start and x.is_leaf and x.requires_grad and (
                torch._C._current_graph_task_id() != -1):  # in a backward pass
            raise RuntimeError('Merged tokens do not pass through reentrant checkpoints. Call '
                               'timm.layers.set_reentrant_ckpt(False), or use_reentrant=False.')
        y, groups = self.merge(y, (t - self.start) / self.T, N, groups)
        if groups is None:
            return y, context
        mask = groups.sizes.to(x.dtype).log()[:, None, None]  # [B, 1, 1, G]
        return y, context._replace(block_kwargs={**context.block_kwargs, 'attn_mask': mask}, groups=groups)

    def leave(self, x: Tensor, context: Context) -> Tensor:
        return x if context.groups is None else carry(context.groups, _rows(x, context.groups.numbers))

    def merge(self, x: Tensor, progress: float, tokens: int, groups: Groups | None) -> tuple[Tensor, Groups | None]:
        """Merge as many groups of a state x [B, G, D] as is due at t = `progress` T."""
        B, G, D = x.shape
        patches = G - self.num_prefix_tokens
        count = min(patches - tokens_at(tokens - self.num_prefix_tokens, self.share, progress), patches // 2)
        if torch.compiler.is_dynamo_compiling():
            count = len(range(count))  # a constant: graphs with a symbol here take a minute to trace
        if count < 1:
            return x, groups
        with torch.no_grad():
            into = self._pairs(x, count)
            before = x.new_ones(B, G, dtype=torch.float32) if groups is None else groups.sizes
            sizes = before.new_zeros(B, G - count).scatter_add(1, into, before)
            weight = (before / sizes.gather(1, into)).to(x.dtype)
            numbers = into if groups is None else into.gather(1, groups.numbers)
        rows = (into + (G - count) * torch.arange(B, device=x.device)[:, None]).flatten()
        summed = x.new_zeros(B * (G - count), D).index_add(0, rows, (x * weight[..., None]).flatten(0, 1))
        return summed.view(B, G - count, D), Groups(numbers, sizes)

    def _pairs(self, x: Tensor, count: int) -> Tensor:
        """The new number of each group of a state x [B, G, D] [B, G], when `count` of them join others."""
        (B, G, _), prefix = x.shape, self.num_prefix_tokens
        unit = F.normalize(x[:, prefix:].float(), dim=-1)
        alike, partner = (unit[:, 1::2] @ unit[:, ::2].transpose(1, 2)).max(dim=-1)  # odd tokens, at least one even
        odd, even = (torch.arange(i, G - prefix, 2, device=x.device) + prefix for i in (1, 0))
        chosen = alike.topk(count, dim=-1).indices  # [B, count], of the odd ones
        source, target = odd[chosen], even[partner.gather(1, chosen)]
        old = torch.arange(G, device=x.device).expand(B, G)
        number = torch.ones_like(old).scatter(1, source, 0).cumsum(dim=1) - 1  # of each group that stays
        return number.gather(1, old.scatter(1, source, target))


def tokens_at(patches: int, share: float, progress: float) -> int:
    """How many of some patch tokens are left at t = `progress` T: the number falls linearly in t, to a share at T."""
    # halves up, whatever the rounding of t; compiled shapes cannot be rounded
    return max(1, int(int(patches) * (1. - (1. - share) * progress) + 0.5 + 1e-6))


def groups_of(x: Tensor) -> Groups | None:
    """The groups that a state [B, N, D] carries: those of the step that returned it; None if its tokens are separate.

    They are an attribute of that very tensor. What is made from it carries none; nor does what was changed in place, as
    its version tells (inference mode and compiled graphs keep none: there, a hook must return a new state).
    """
    version, groups = getattr(x, 'merged_groups', (None, None))
    return groups if version == _version(x) else None


def carry(groups: Groups | None, x: Tensor) -> Tensor:
    if groups is not None:
        x.merged_groups = _version(x), groups  # type: ignore[attr-defined]
    return x


def _version(x: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The tokens [B, G, D] of x [B, N, D] with the indices [B, G]."""
    B, N, D = x.shape
    flat = (index + N * torch.arange(B, device=x.device)[:, None]).flatten()
    return x.flatten(0, 1).index_select(0, flat).view(B, index.shape[1], D)
