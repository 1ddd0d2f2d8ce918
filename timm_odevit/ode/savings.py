"""What steps need not compute: patch tokens that have become alike are merged, and images that are done leave."""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fields import Context, Groups

__all__ = ['HALTING', 'Readout', 'TokenMerging', 'groups_of', 'run_halting', 'tokens_at']

Readout = Callable[[Tensor], Tensor]  # logits [B, classes] for a state [B, N, D]


class TokenMerging:
    """How the steps of a solver on [start, start + T] merge tokens, so that a `share` of them is left at T.

    The state between two steps has all tokens; merged ones are equal there. A step computes each group once: its state
    is the mean over its tokens, and attention counts it as often as it has tokens. At the start of a step, every second
    patch token may be merged with the one of the others that is most like it, in the cosine of their states.

    Source: Token Merging (ToMe), arXiv 2210.09461.
    """

    def __init__(self, share: float, num_prefix_tokens: int, start: float, T: float) -> None:
        self.share, self.num_prefix_tokens, self.start, self.T = share, num_prefix_tokens, start, T

    def enter(self, t: float, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        """The state of the groups [B, G, D] for that of all tokens [B, N, D], and the context for it."""
        if context.block_kwargs.get('attn_mask') is not None or context.block_kwargs.get('is_causal'):
            raise ValueError('Tokens cannot be merged under an attention mask. Set tokens=1.')
        groups = groups_of(x)
        in_backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if groups is None and t > self.start and x.is_leaf and x.requires_grad and in_backward:
            raise RuntimeError('Merged tokens do not pass through reentrant checkpoints. Use use_reentrant=False.')
        y = x if groups is None else _rows(x, groups.first)
        y, groups = self.merge(y, (t - self.start) / self.T, x.shape[1], groups)
        if groups is None:
            return y, context
        mask = groups.sizes.to(x.dtype).log()[:, None, None]  # [B, 1, 1, G]
        return y, context._replace(block_kwargs={**context.block_kwargs, 'attn_mask': mask}, groups=groups)

    def leave(self, x: Tensor, context: Context) -> Tensor:
        return x if context.groups is None else _with_groups(_rows(x, context.groups.numbers), context.groups)

    def merge(self, x: Tensor, progress: float, tokens: int, groups: Groups | None) -> tuple[Tensor, Groups | None]:
        """Merge as many groups of a state x [B, G, D] as is due at t = `progress` T."""
        B, G, D = x.shape
        patches = G - self.num_prefix_tokens
        count = min(patches - tokens_at(tokens - self.num_prefix_tokens, self.share, progress), patches // 2)
        if count < 1:
            return x, groups
        with torch.no_grad():
            into, left = self._pairs(x, count)
            before = x.new_ones(B, G, dtype=torch.float32) if groups is None else groups.sizes
            sizes = before.new_zeros(B, G - count).scatter_add(1, into, before)
            weight = (before / sizes.gather(1, into)).to(x.dtype)
            groups = Groups(into, sizes, left) if groups is None else Groups(
                into.gather(1, groups.numbers), sizes, groups.first.gather(1, left))
        rows = (into + (G - count) * torch.arange(B, device=x.device)[:, None]).flatten()
        summed = x.new_zeros(B * (G - count), D).index_add(0, rows, (x * weight[..., None]).flatten(0, 1))
        return summed.view(B, G - count, D), groups

    def _pairs(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The new number of each group of a state x [B, G, D] [B, G], and an old number of each new one [B, G']."""
        (B, G, _), prefix = x.shape, self.num_prefix_tokens
        unit = F.normalize(x[:, prefix:].float(), dim=-1)
        alike, partner = (unit[:, 1::2] @ unit[:, ::2].transpose(1, 2)).max(dim=-1)  # odd tokens, at least one even
        odd, even = (torch.arange(i, G - prefix, 2, device=x.device) + prefix for i in (1, 0))
        chosen = alike.topk(count, dim=-1).indices  # [B, count], of the odd ones
        source, target = odd[chosen], even[partner.gather(1, chosen)]
        old = torch.arange(G, device=x.device).expand(B, G)
        stays = torch.ones_like(old).scatter(1, source, 0)
        number = stays.cumsum(dim=1) - 1  # the new number of each group that stays
        into = number.gather(1, old.scatter(1, source, target))
        places = torch.where(stays > 0, number, G - count)  # those that do not stay share one that is cut off
        return into, torch.zeros_like(old)[:, :G - count + 1].scatter(1, places, old)[:, :G - count]


def tokens_at(patches: int, share: float, progress: float) -> int:
    """How many of some patch tokens are left at t = `progress` T: the number falls linearly in t, to a share at T."""
    return max(1, round(int(patches) * (1. - (1. - share) * progress) + 1e-6))  # halves up, whatever the rounding of t


def groups_of(x: Tensor) -> Groups | None:
    """The groups that a state [B, N, D] carries: those of the step that returned it; None if its tokens are separate.

    They are an attribute of that very tensor. What is made from it carries none; nor does what was changed in place, as
    its version tells (inference mode and compiled graphs keep none: there, a hook must return a new state).
    """
    version, groups = getattr(x, 'merged_groups', (None, None))
    return groups if version == _version(x) else None


def _with_groups(x: Tensor, groups: Groups) -> Tensor:
    x.merged_groups = _version(x), groups  # type: ignore[attr-defined]
    return x


def _version(x: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The tokens [B, G, D] of x [B, N, D] with the indices [B, G]."""
    B, N, D = x.shape
    flat = (index + N * torch.arange(B, device=x.device)[:, None]).flatten()
    return x.flatten(0, 1).index_select(0, flat).view(B, index.shape[1], D)


class Rule:
    """Called after each step, of length h, with the states [B, N, D] before and after it: a score of each image [B]."""
    needs_head = False

    def __init__(self, readout: Readout | None = None) -> None:
        self.readout: Any = readout

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Any: ...

    def keep(self, images: Tensor) -> None:
        """Keep only some of the images of the batch, by index [B']."""


class Entropy(Rule):
    """The entropy of the class probabilities, relative to log(classes). Source: Loop-ViT, arXiv 2602.02156."""
    needs_head = True

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Tensor:
        p = self.readout(after).softmax(dim=-1, dtype=torch.float32)
        return torch.special.entr(p).sum(dim=-1) / math.log(max(p.shape[-1], 2))


class Acceleration(Rule):
    """The change of the velocity from one step to the next, the larger of the last two, relative to the state."""
    velocity: Tensor | None = None
    change: Tensor | None = None

    def __call__(self, before: Tensor, after: Tensor, h: float) -> Tensor:
        velocity = ((after - before) / h).flatten(1).float()
        norm = after.flatten(1).float().norm(dim=-1)
        never = torch.full_like(norm, torch.inf)
        change = never if self.velocity is None else (velocity - self.velocity).norm(dim=-1) / norm
        score = never if self.change is None else torch.maximum(change, self.change)
        self.velocity, self.change = velocity, change
        return score

    def keep(self, images: Tensor) -> None:
        if self.velocity is not None and self.change is not None:
            self.velocity, self.change = self.velocity[images], self.change[images]


HALTING: dict[str, type[Rule]] = {'entropy': Entropy, 'acceleration': Acceleration}


def run_halting(
        steps: Sequence[tuple[Any, Context]], x: Tensor, rule: Rule, threshold: float) -> tuple[Tensor, Tensor]:
    """Run the steps, each with its context; an image whose score is at most the threshold leaves the batch.

    Returns the last state of each image [B, N, D], and how many steps it took [B].
    """
    for name, value in steps[0][1].block_kwargs.items():
        if isinstance(value, Tensor) and (value.ndim > 2 or name == 'attn_mask'):
            raise ValueError(f'The model passes its blocks a {name} for the whole batch, so no image can leave early. '
                             'Set halting=None.')
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _run_all(steps, x, rule, threshold)
    taken = torch.full((len(x),), len(steps), device=x.device)
    active, ended = torch.arange(len(x), device=x.device), x
    for i, (step, context) in enumerate(steps):
        before, x = x, step(x, context)
        if i == len(steps) - 1:
            break
        done = rule(before, x, step.h) <= threshold
        if done.any():
            where, stay = active[done], (~done).nonzero()[:, 0]
            taken[where] = i + 1
            ended = ended.index_copy(0, where, x[done])
            x, active = _carry(x, x[stay], stay), active[stay]
            if not len(active):
                break
            rule.keep(stay)
    return ended.index_copy(0, active, x), taken


def _run_all(
        steps: Sequence[tuple[Any, Context]], x: Tensor, rule: Rule, threshold: float) -> tuple[Tensor, Tensor]:
    # shapes must not depend on values: every image goes through all steps; len(x) would fix the number of images
    taken = torch.full((x.shape[0],), len(steps), device=x.device)
    halted = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    for i, (step, context) in enumerate(steps):
        stepped = step(x, context)
        after = _carry(stepped, torch.where(halted.view(-1, *[1] * (x.ndim - 1)), x, stepped))
        if i < len(steps) - 1:
            done = rule(x, after, step.h) <= threshold
            taken = torch.where(done & ~halted, i + 1, taken)
            halted = halted | done
        x = after
    return x, taken


def _carry(before: Tensor, after: Tensor, images: Tensor | slice = slice(None)) -> Tensor:
    """Let some images of a batch [B', N, D], here all, keep the groups of its state [B, N, D]."""
    groups = groups_of(before)
    return after if groups is None else _with_groups(after, Groups(*(of[images] for of in groups)))
