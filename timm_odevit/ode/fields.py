"""Vector fields: what the solver integrates, the sum of an attention and an MLP sub-flow."""
import copy
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath, Mlp, maybe_add_mask, resolve_self_attn_mask, use_fused_attn
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Module = TypeVar('Module', bound=nn.Module)


class Groups(NamedTuple):
    """The group of each token [B, N], prefix tokens first, and the size of each group [B, G]."""
    numbers: Tensor
    sizes: Tensor


class Context(NamedTuple):
    """What a field is called with, besides the time and the state."""
    block_kwargs: dict[str, Any]  # what the host passes to its blocks, by name: masks, RoPE tables, ...
    weights: list[Tensor] | None = None  # what `fold()` returned for this forward pass
    groups: Groups | None = None  # the merged tokens of the step, if any


class Field(nn.Module):
    """A vector field psi(t, x) = attention(t, x) + mlp(t, x); one that cannot be split overrides `both`.

    t is a float or a 0-dim tensor.
    """
    about: str = ''  # what its sub-layers are, for the report of a conversion
    names: tuple[str, ...] = ('attn_mask', 'is_causal')  # what a host's blocks take after the state, in order
    jumps: Sequence[float] = ()  # times at which it is not continuous, increasing
    borders: Sequence[float] = ()  # times that no step crosses: another phase begins
    has_attention_maps: bool = False
    attention: Any
    mlp: Any
    probabilities: Any  # of the attention [B, heads, N, N]
    like: Any  # (blocks): a field with the structure of some blocks of the base
    values: Any  # (block): what a block gives its parameters and buffers, by name

    def forward(self, t: float, x: Tensor, context: Context | None = None, part: str = '') -> Tensor:
        return getattr(self, part or 'both')(t, x, Context({}) if context is None else context)

    def both(self, t: float, x: Tensor, context: Context) -> Tensor:
        return self.attention(t, x, context) + self.mlp(t, x, context)

    @classmethod
    def refused(cls, block: Any, init: str) -> str:
        """Why it cannot replace a block of the base, or ''."""
        return ''

    def context(self, args: Sequence[Any], kwargs: dict[str, Any], weights: list[Tensor] | None = None) -> Context:
        """Of what a host passes after the state; or that of OdeBlocks, which makes one for all steps."""
        return args[0] if args and isinstance(args[0], Context) else Context(
            {**dict(zip(self.names, args, strict=False)), **kwargs}, weights)

    def fold(self) -> list[Tensor] | None:
        """What is computed once per forward pass, for `Context.weights`."""
        return None

    def select(self, t: float) -> Any:
        """That of the phase at t."""
        return self

    @property
    def phases(self) -> list[Any]:
        return [self]

    def attention_map(self, t: float, x: Tensor) -> Tensor:
        """The attention probabilities [B, heads, N, N] in float32, before dropout."""
        if not self.has_attention_maps:
            raise ValueError(f'{type(self).__name__} has no attention maps: it has windows, RoPE or a position bias.')
        return self(t, x, part='probabilities')


class NativeField(Field):
    """The base model's own sub-layers; of pre-norm blocks (norm1, attn, ls1, norm2, mlp, ls2), others by subclasses.

    `block` itself is not called: hooks and wrappers belong around its parts, or around the field (each
    of `shared.phases`).
    """
    about = "the base's own"
    block: Any

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.names = tuple(inspect.signature(type(block).forward).parameters)[2:]

    @classmethod
    def like(cls, blocks):
        block = copy_module(blocks[0])  # hooks belong to the layer they were registered on
        trainable = {name for each in blocks for name, p in each.named_parameters() if p.requires_grad}
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name in trainable)
        return cls(block)

    @staticmethod
    def values(block):
        return {f'block.{name}': tensor for name, tensor in (*block.named_parameters(), *block.named_buffers())}

    def attention(self, t, x, context):
        return self.block.drop_path1(self.block.ls1(self.block.attn(self.block.norm1(x), **context.block_kwargs)))

    def mlp(self, t, x, context):
        return self.block.drop_path2(self.block.ls2(self.block.mlp(self.block.norm2(x))))

    @property
    def has_attention_maps(self):
        plain = type(self).attention is NativeField.attention  # wrappers such as FSDP2 change the class
        return plain and type(self.block.attn) is Attention

    def probabilities(self, t, x, context):
        attn = self.block.attn
        q, k, _ = _heads(attn.qkv(self.block.norm1(x)), attn.num_heads)
        return _probabilities(attn.q_norm(q), attn.k_norm(k), attn.scale)


class CenterNorm(nn.Module):
    """gamma * D / (D - 1) * (x - mean(x)) + beta, over the last dimension D. Source: LipsFormer, arXiv 2304.09856."""

    def __init__(self, dim: int, **dd: Any) -> None:
        super().__init__()
        self.scale = dim / (dim - 1)
        self.weight, self.bias = (nn.Parameter(torch.empty(dim, **dd)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.scale * (x - x.mean(dim=-1, keepdim=True))) + self.bias

    def fold(self, projection: Tensor) -> list[Tensor]:
        """Weight [M, D] and bias [M] of the one linear map that equals this norm followed by a projection [M, D]."""
        w = projection * (self.weight * self.scale)
        return [w - w.mean(dim=1, keepdim=True), projection @ self.bias]


class LipschitzField(Field):
    """The paper's field (arXiv 2511.16501): bias-free self-attention and a bias-free MLP, each behind a CenterNorm.

    A CenterNorm is linear, so it is one matrix product with the projection behind it, qkv or fc1, unless hooked.
    """
    about = 'new: no biases, no qk-norm, CenterNorm instead of LayerNorm'
    has_attention_maps = True

    def __init__(
            self, dim: int, num_heads: int, head_dim: int, hidden: int, act: nn.Module, attn_drop: float = 0.,
            proj_drop: float = 0., drop_path: float = 0., **dd: Any,
    ) -> None:
        super().__init__()
        self.num_heads, self.scale, self.fused_attn = num_heads, head_dim ** -0.5, use_fused_attn()
        self.norm1 = CenterNorm(dim, **dd)
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim, bias=False, **dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(num_heads * head_dim, dim, bias=False, **dd)
        self.norm2 = CenterNorm(dim, **dd)
        self.fc1 = nn.Linear(dim, hidden, bias=False, **dd)
        self.act = act
        self.fc2 = nn.Linear(hidden, dim, bias=False, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0. else nn.Identity()

    @classmethod
    def refused(cls, block, init):
        if not isinstance(block, Block) or not isinstance(block.attn, Attention):
            return 'it replaces plain pre-norm ViT blocks'
        plain = isinstance(block.mlp, Mlp) and isinstance(block.norm1, nn.LayerNorm) and (
            block.norm1.bias is not None and isinstance(block.attn.q_norm, nn.Identity))
        if init != 'spectral' and not plain:
            return "only with init='spectral' can it replace blocks with another MLP or norm than a plain ViT's"
        return ''

    @classmethod
    def like(cls, blocks):
        first, attn, weight = blocks[0], blocks[0].attn, blocks[0].attn.qkv.weight
        field = cls(
            weight.shape[1], attn.num_heads, weight.shape[0] // (3 * attn.num_heads), first.mlp.fc2.in_features,
            copy_module(first.mlp.act), attn.attn_drop.p, attn.proj_drop.p,
            sum(getattr(block.drop_path1, 'drop_prob', 0.) for block in blocks) / len(blocks),
            device=weight.device, dtype=weight.dtype)
        return field.requires_grad_(any(p.requires_grad for block in blocks for p in block.parameters()))

    @staticmethod
    def values(block):
        def scaled(weight: Tensor, layer_scale: Any) -> Tensor:  # this field has no LayerScale: it scales these rows
            return weight * getattr(layer_scale, 'gamma', weight.new_ones(1))[:, None]
        return {
            'norm1.weight': block.norm1.weight, 'norm1.bias': block.norm1.bias, 'qkv.weight': block.attn.qkv.weight,
            'proj.weight': scaled(block.attn.proj.weight, block.ls1), 'norm2.weight': block.norm2.weight,
            'norm2.bias': block.norm2.bias, 'fc1.weight': block.mlp.fc1.weight,
            'fc2.weight': scaled(block.mlp.fc2.weight, block.ls2),
        }

    def fold(self) -> list[Tensor] | None:
        """Weight and bias of qkv behind its norm, then of fc1 behind its own."""
        # FSDP2 gathers weights only for calls; LoRA and int8 do more than multiply; hooks watch or change what they see
        layers = self.norm1, self.qkv, self.norm2, self.fc1
        if [*map(type, layers)] != 2 * [CenterNorm, nn.Linear] or any(
                hooked(layer) or 'forward' in vars(layer) or is_traceable_wrapper_subclass(layer.weight)
                for layer in layers):
            return None
        return [*self.norm1.fold(self.qkv.weight), *self.norm2.fold(self.fc1.weight)]

    def attention(self, t: float, x: Tensor, context: Context) -> Tensor:
        folded = context.weights or self.fold()
        q, k, v = _heads(F.linear(x, *folded[:2]) if folded else self.qkv(self.norm1(x)), self.num_heads)
        mask, causal = context.block_kwargs.get('attn_mask'), context.block_kwargs.get('is_causal', False)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            attn = maybe_add_mask(attn, resolve_self_attn_mask(attn.shape[-1], attn, mask, causal))
            y = self.attn_drop(attn.softmax(dim=-1)) @ v
        return self.drop_path(self.proj_drop(self.proj(y.transpose(1, 2).flatten(2))))

    def mlp(self, t: float, x: Tensor, context: Context) -> Tensor:
        folded = context.weights or self.fold()
        y = self.proj_drop(self.act(F.linear(x, *folded[2:]) if folded else self.fc1(self.norm2(x))))
        return self.drop_path(self.proj_drop(self.fc2(y)))

    def probabilities(self, t: float, x: Tensor, context: Context) -> Tensor:
        q, k, _ = _heads(self.qkv(self.norm1(x)), self.num_heads)
        return _probabilities(q, k, self.scale)


class PiecewiseField(Field):
    """Several fields, one at a time: fields[which[i]] from times[i] to times[i + 1], and before the first and after the
    last time. No step crosses a border. Source: Raptor, arXiv 2512.19941.
    """

    def __init__(
            self, fields: Sequence[Field], times: Sequence[float], which: Sequence[int], borders: Sequence[float],
    ) -> None:
        super().__init__()
        self.fields, self.names = nn.ModuleList(fields), fields[0].names
        self.times, self.which, self.borders = tuple(times), tuple(which), tuple(borders)
        self.jumps = [float(t) for t, (a, b) in zip(self.times[1:], pairwise(self.which), strict=True) if a != b]

    @property
    def has_attention_maps(self):
        return all(field.has_attention_maps for field in self.fields)

    @property
    def phases(self):
        return list(self.fields)

    def select(self, t):
        t = float(t.detach()) if isinstance(t, Tensor) else t
        return self.fields[self.which[max(sum(time <= t + 1e-6 for time in self.times) - 1, 0)]]  # bisect: no compile

    def forward(self, t, x, context=None, part=''):
        return self.select(t)(t, x, context, part)


def hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks)


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values [B, heads, N, head_dim]."""
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return (q.float() * scale @ k.float().transpose(-2, -1)).softmax(dim=-1)


def copy_module(module: Module) -> Module:
    """A deep copy without the hooks, which may hold what cannot be copied."""
    memo: dict[int, Any] = {
        id(value): OrderedDict() for inner in module.modules() for name, value in vars(inner).items()
        if '_hooks' in name and isinstance(value, dict)}
    return copy.deepcopy(module, memo)


FIELDS: dict[str, type[Field]] = {'native': NativeField, 'lipschitz': LipschitzField}
