"""Vector fields: what the solver integrates. A field is the sum of an attention and an MLP sub-flow."""
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from torch import Tensor, nn
from typing_extensions import Self

from .skeleton import copy_module

__all__ = ['Context', 'Field', 'Groups', 'NativeField', 'attention_probabilities']


class Groups(NamedTuple):
    """The group of each token [B, N], prefix tokens first; the size of each group, and one of its tokens [B, G]."""
    numbers: Tensor
    sizes: Tensor
    first: Tensor


class Context(NamedTuple):
    """What a field is called with, besides the time and the state.

    Attributes:
        block_kwargs: What the host passes to its blocks, by name: masks, RoPE tables, shared position bias, ...
        weights: What `fold()` returned for this forward pass.
        interval: Times over which weights that depend on time are averaged; None to take them at t.
        groups: The merged tokens of the step, if any.
    """
    block_kwargs: dict[str, Any]
    weights: list[Tensor] | None = None
    interval: tuple[float, float] | None = None
    groups: Groups | None = None


class Field(nn.Module):
    """A vector field psi(t, x) = G(t, x) + F(t, x): G is attention, which mixes tokens; F is the MLP on each token.

    A field that can be split has `attention` (G) and `mlp` (F); others override `both`. One that a model can be
    converted to is a row of `FIELDS` in config.py, and has the class methods `like` and `values` as well. t is a float,
    or a 0-dim tensor from an adaptive method.
    """
    about: str = ''  # what its sub-layers are, for the report of a conversion
    fits_layers: bool = False  # whether it has the base's own layers, which init 'svd_data' can fit
    names: tuple[str, ...] = ('attn_mask', 'is_causal')  # what a host's blocks take after the state, in order
    attention_prefixes: tuple[str, ...] = ()  # of the parameters of G; all others belong to F
    depends_on_time: bool = False  # within a phase
    jumps: Sequence[float] = ()  # times at which it is not continuous, increasing
    has_attention_maps: bool = False
    attention: Any
    mlp: Any

    def forward(self, t: float, x: Tensor, context: Context | None = None, part: str = '') -> Tensor:
        if context is None:
            context = Context({})
        if part == 'attention':
            return self.attention(t, x, context)
        if part == 'mlp':
            return self.mlp(t, x, context)
        return self.both(t, x, context)

    def both(self, t: float, x: Tensor, context: Context) -> Tensor:
        return self.attention(t, x, context) + self.mlp(t, x, context)

    def context(self, args: Sequence[Any], kwargs: dict[str, Any], weights: list[Tensor] | None = None) -> Context:
        """From what a host passes to its blocks after the state, and from what `fold()` returned."""
        return Context({**dict(zip(self.names[:len(args)], args, strict=False)), **kwargs}, weights)

    def fold(self) -> list[Tensor] | None:
        """What depends on the parameters alone and is computed once per forward pass, for `Context.weights`."""
        return None

    def select(self, t: float) -> Any:
        """The field that applies at t, of those of its phases."""
        return self

    @property
    def phases(self) -> list[Any]:
        return [self]

    def block_to_resize(self) -> Any:
        return self.block

    def attention_map(self, t: float, x: Tensor, interval: tuple[float, float] | None = None) -> Tensor:
        """The attention probabilities [B, heads, N, N] in float32, before dropout."""
        raise ValueError(f'{type(self).__name__} has no attention maps: windows, RoPE or a position bias are part of '
                         'its attention.')

    @classmethod
    def like(cls, blocks: Sequence[Any]) -> Self:
        """A field with the structure of some blocks of the base; its weights are still to be filled in."""
        raise NotImplementedError

    @staticmethod
    def values(block: Any) -> dict[str, Tensor]:
        """The values that one block of the base gives the parameters and buffers of such a field, by name."""
        raise NotImplementedError


class NativeField(Field):
    """The base model's own sub-layers, with all their parts (LayerScale, qk-norm, biases, RoPE, ...).

    This class takes pre-norm blocks (norm1, attn, ls1, norm2, mlp, ls2); subclasses take the other kinds.
    """
    about, fits_layers = "the base's own", True
    attention_prefixes: tuple[str, ...] = ('block.norm1', 'block.attn', 'block.ls1', 'block.gamma_1')
    block: Any

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.names = tuple(inspect.signature(type(block).forward).parameters)[2:]

    @classmethod
    def like(cls, blocks):
        block = copy_module(blocks[0], hooks=False)  # hooks belong to the layer they were registered on
        trainable = {name for each in blocks for name, p in each.named_parameters() if p.requires_grad}
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name in trainable)
        return cls(block)

    @staticmethod
    def values(block):
        return {f'block.{name}': tensor for name, tensor in (*block.named_parameters(), *block.named_buffers())}

    def attention(self, t: float, x: Tensor, context: Context) -> Tensor:
        return self.block.drop_path1(self.block.ls1(self.block.attn(self.block.norm1(x), **context.block_kwargs)))

    def mlp(self, t: float, x: Tensor, context: Context) -> Tensor:
        return self.block.drop_path2(self.block.ls2(self.block.mlp(self.block.norm2(x))))

    @property
    def has_attention_maps(self):
        # in other blocks, RoPE, a position bias or windows are part of attention
        plain = type(self).attention is NativeField.attention  # wrappers such as FSDP2 change the class
        return plain and type(self.block.attn) is Attention

    def attention_map(self, t, x, interval=None):
        if not self.has_attention_maps:
            return super().attention_map(t, x)
        attn = self.block.attn
        B, N, _ = x.shape
        q, k, _ = attn.qkv(self.block.norm1(x)).reshape(B, N, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return attention_probabilities(attn.q_norm(q), attn.k_norm(k), attn.scale)


def attention_probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return (q.float() * scale @ k.float().transpose(-2, -1)).softmax(dim=-1)
