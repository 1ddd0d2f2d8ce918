"""The paper's Lipschitz field."""
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, maybe_add_mask, resolve_self_attn_mask, use_fused_attn
from torch import Tensor, nn

from .fields import Context, Field, attention_probabilities
from .skeleton import copy_module

__all__ = ['CenterNorm', 'LipschitzField']


class CenterNorm(nn.Module):
    """gamma * D / (D - 1) * (x - mean(x)) + beta: a LayerNorm without the division, and thus Lipschitz.

    Shape: [..., D] to [..., D].

    Source: LipsFormer, arXiv 2304.09856.
    """

    def __init__(self, dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.scale = dim / (dim - 1)
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.scale * (x - x.mean(dim=-1, keepdim=True))) + self.bias

    def fold(self, projection: Tensor) -> list[Tensor]:
        """Weight [M, D] and bias [M] of the one linear map that equals this norm followed by a projection [M, D]."""
        w = projection * (self.weight * self.scale)
        return [w - w.mean(dim=1, keepdim=True), F.linear(self.bias, projection)]


class LipschitzField(Field):
    """The paper's field: bias-free multi-head self-attention and a bias-free MLP, each behind a CenterNorm.

    A CenterNorm is linear, so each is one matrix product with the projection behind it. The weights of qkv and fc1 are
    read, but these modules are not called: put hooks and wrappers on the field or on a step, not on them.

    Source: ODE-ViT, arXiv 2511.16501.
    """
    about = 'new: no biases, no qk-norm, CenterNorm instead of LayerNorm'
    attention_prefixes = ('norm1', 'qkv', 'proj')
    has_attention_maps = True

    def __init__(
            self, dim: int, num_heads: int, head_dim: int, hidden: int, act: nn.Module, attn_drop: float = 0.,
            proj_drop: float = 0., drop_path: float = 0., device=None, dtype=None,
    ) -> None:
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.head_dim = head_dim
        attn_dim = num_heads * head_dim
        self.scale = head_dim ** -0.5
        self.fused_attn = use_fused_attn()

        self.norm1 = CenterNorm(dim, **dd)
        self.qkv = nn.Linear(dim, 3 * attn_dim, bias=False, **dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(attn_dim, dim, bias=False, **dd)
        self.norm2 = CenterNorm(dim, **dd)
        self.fc1 = nn.Linear(dim, hidden, bias=False, **dd)
        self.act = act
        self.fc2 = nn.Linear(hidden, dim, bias=False, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0. else nn.Identity()

    @classmethod
    def like(cls, blocks):
        first, attn, weight = blocks[0], blocks[0].attn, blocks[0].attn.qkv.weight
        field = cls(
            weight.shape[1], attn.num_heads, weight.shape[0] // (3 * attn.num_heads), first.mlp.fc2.in_features,
            copy_module(first.mlp.act, hooks=False), attn.attn_drop.p, attn.proj_drop.p,
            sum(getattr(block.drop_path1, 'drop_prob', 0.) or 0. for block in blocks) / len(blocks),
            weight.device, weight.dtype)
        return field.requires_grad_(any(p.requires_grad for block in blocks for p in block.parameters()))

    @staticmethod
    def values(block):
        def scaled(weight: Tensor, layer_scale: Any) -> Tensor:
            # LayerScale scales the rows of the projection before it; a field without LayerScale folds it into those
            gamma = getattr(layer_scale, 'gamma', None)
            return weight if gamma is None else weight * gamma[:, None]
        return {
            'norm1.weight': block.norm1.weight, 'norm1.bias': block.norm1.bias, 'qkv.weight': block.attn.qkv.weight,
            'proj.weight': scaled(block.attn.proj.weight, block.ls1), 'norm2.weight': block.norm2.weight,
            'norm2.bias': block.norm2.bias, 'fc1.weight': block.mlp.fc1.weight,
            'fc2.weight': scaled(block.mlp.fc2.weight, block.ls2),
        }

    def fold(self) -> list[Tensor] | None:
        # FSDP2 gathers sharded weights only for a call of the field
        return None if hasattr(self.qkv.weight, 'to_local') else self._products()

    def _products(self) -> list[Tensor]:
        """Weight and bias of qkv behind its norm, then of fc1 behind its own."""
        return [*self.norm1.fold(self.qkv.weight), *self.norm2.fold(self.fc1.weight)]

    def attention(self, t: float, x: Tensor, context: Context) -> Tensor:
        weight, bias = (context.weights or self._products())[:2]
        y = self._attend(F.linear(x, weight, bias), context)
        return self.drop_path(self.proj_drop(self.proj(y)))

    def mlp(self, t: float, x: Tensor, context: Context) -> Tensor:
        weight, bias = (context.weights or self._products())[2:]
        y = self.proj_drop(self.act(F.linear(x, weight, bias)))
        return self.drop_path(self.proj_drop(self.fc2(y)))

    def attention_map(self, t, x, interval=None):
        q, k, _ = self._heads(self.qkv(self.norm1(x))).unbind(0)
        return attention_probabilities(q, k, self.scale)

    def _heads(self, qkv: Tensor) -> Tensor:
        B, N, _ = qkv.shape
        return qkv.reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)

    def _attend(self, qkv: Tensor, context: Context) -> Tensor:
        q, k, v = self._heads(qkv).unbind(0)
        mask, causal = context.block_kwargs.get('attn_mask'), context.block_kwargs.get('is_causal', False)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            attn = maybe_add_mask(attn, resolve_self_attn_mask(attn.shape[-1], attn, mask, causal))
            y = self.attn_drop(attn.softmax(dim=-1)) @ v
        return y.transpose(1, 2).flatten(2)
