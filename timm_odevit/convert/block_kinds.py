"""What can be converted in a timm model: where its blocks are, of what kind, and the field for each kind."""
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.models import beit, eva, vision_transformer, vision_transformer_relpos, vision_transformer_sam
from timm.models.cait import Cait
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr, SwinTransformerV2CrBlock
from timm.models.vision_transformer_sam import window_partition, window_unpartition
from timm.models.xcit import Xcit
from torch import Tensor, nn

from ..ode.config import OdeConfig
from ..ode.fields import NativeField

__all__ = [
    'PER_LAYER', 'Site', 'WholeField', 'cannot_convert', 'class_token_comes_later', 'field_class', 'find_stages',
    'kinds', 'prefix_tokens', 'takes_one_state',
]


class PostNormField(NativeField):
    """A block whose norms follow its sub-layers."""

    def attention(self, t, x, context):
        return self.block.drop_path1(self.block.norm1(self.block.attn(x, **context.block_kwargs)))

    def mlp(self, t, x, context):
        return self.block.drop_path2(self.block.norm2(self.block.mlp(x)))


class GammaField(NativeField):
    """A pre-norm block with LayerScale as plain parameters gamma_1 and gamma_2, or without it."""

    def attention(self, t, x, context):
        y = self.block.attn(self.block.norm1(x), **context.block_kwargs)
        return self.block.drop_path1(y if self.block.gamma_1 is None else self.block.gamma_1 * y)

    def mlp(self, t, x, context):
        y = self.block.mlp(self.block.norm2(x))
        return self.block.drop_path2(y if self.block.gamma_2 is None else self.block.gamma_2 * y)


class ParallelField(NativeField):
    """Several attentions side by side, then several MLPs side by side."""
    attention_prefixes = ('block.attns',)

    def attention(self, t, x, context):
        return torch.stack([
            a.drop_path(a.ls(a.attn(a.norm(x), **context.block_kwargs))) for a in self.block.attns]).sum(dim=0)

    def mlp(self, t, x, context):
        return torch.stack([ffn(x) for ffn in self.block.ffns]).sum(dim=0)


class SamField(NativeField):
    """SAM's block on a map of tokens [B, H, W, D], within windows or global."""

    def attention(self, t, x, context):
        block, (H, W) = self.block, x.shape[1:3]
        y = block.norm1(x)
        pad_hw = (H, W)
        if block.window_size > 0:
            y, pad_hw = window_partition(y, block.window_size)
        y = block.drop_path1(block.ls1(block.attn(y)))
        return window_unpartition(y, block.window_size, (H, W), pad_hw) if block.window_size > 0 else y


class ShiftedWindowField(NativeField):
    """Swin's block on a map of tokens [B, H, W, D]."""

    def attention(self, t, x, context):
        return self.block.drop_path1(self.block._attn(self.block.norm1(x)))

    def mlp(self, t, x, context):
        return self.block.drop_path2(self.block.mlp(self.block.norm2(x)))


class ShiftedPostNormField(PostNormField):
    """SwinV2's block on a map of tokens [B, H, W, D]: norms after the sub-layers."""

    def attention(self, t, x, context):
        return self.block.drop_path1(self.block.norm1(self.block._attn(x)))


class WholeField(NativeField):
    """psi(x) = block(x) - x: a block that is not split, for the unsplit methods only."""

    def attention(self, t, x, context):
        raise ValueError(f"A {type(self.block).__name__} cannot be split into attention and MLP. Use 'euler', say.")

    mlp = attention

    def both(self, t, x, context):
        return self.block(x, **context.block_kwargs) - x


# By class object, since several timm modules have a class called Block. Blocks not listed here are used whole.
FIELD_OF: dict[type[nn.Module], type[NativeField]] = {
    vision_transformer.Block: NativeField,
    vision_transformer.ResPostBlock: PostNormField,
    vision_transformer.ParallelThingsBlock: ParallelField,
    vision_transformer.ParallelScalingBlock: WholeField,
    vision_transformer.DiffParallelScalingBlock: WholeField,
    vision_transformer_relpos.RelPosBlock: NativeField,
    vision_transformer_relpos.ResPostRelPosBlock: PostNormField,
    vision_transformer_sam.Block: SamField,
    beit.Block: GammaField,
    eva.EvaBlock: GammaField,
    eva.EvaBlockPostNorm: PostNormField,
    SwinTransformerBlock: ShiftedWindowField,
    SwinTransformerV2Block: ShiftedPostNormField,
    SwinTransformerV2CrBlock: WholeField,
}
STAGES: dict[type[nn.Module], str] = {
    SwinTransformer: 'layers', SwinTransformerV2: 'layers', SwinTransformerV2Cr: 'stages'}
# constants that timm sets per layer, by depth; a shared block gets their mean over its layers
PER_LAYER = ('drop_prob', 'lambda_init')
_UNUSED = ('training', 'target_shift_size')  # settings that change nothing at this image size


class Site(NamedTuple):
    """A sequence of blocks in a model: `host.blocks`, and the host's name in the model ('' for the model itself)."""
    host: Any
    name: str

    @property
    def blocks(self) -> list[Any]:
        return list(self.host.blocks)

    def converted(self, config: OdeConfig) -> list[Any]:
        first, last = config.converted_layers(len(self.host.blocks))
        return self.blocks[first:last + 1]


def cannot_convert(model: nn.Module, why: str) -> TypeError:
    return TypeError(f'Cannot convert {type(model).__name__}: {why}. See timm_odevit.list_convertible().')


def find_stages(model: nn.Module) -> list[Site]:
    """Where the blocks of a model are: one sequence, or one per stage; TypeError for a model without."""
    for cls, name in STAGES.items():
        if isinstance(model, cls):
            return [Site(stage, f'{name}.{i}') for i, stage in enumerate(getattr(model, name))]
    for host, name in ((model, ''), (getattr(model, 'encoder', None), 'encoder')):  # of models of language and images
        blocks = getattr(host, 'blocks', None)
        if isinstance(blocks, (nn.Sequential, nn.ModuleList)) and len(blocks):
            return [Site(host, name)]
    raise cannot_convert(model, 'it has no sequence of transformer blocks')


def class_token_comes_later(model: Any) -> bool:
    """Whether a class token is added only after the blocks, in blocks of its own."""
    return isinstance(model, (Cait, Xcit))


def prefix_tokens(model: Any) -> int:
    """How many tokens, such as a class token, come before those of the patches in the blocks' states."""
    return 0 if class_token_comes_later(model) else int(getattr(model, 'num_prefix_tokens', 0))


def field_class(block: nn.Module) -> type[NativeField]:
    return FIELD_OF.get(type(block), WholeField)


def kinds(blocks: Sequence[nn.Module]) -> list[int]:
    """For each block, the index of its kind: blocks of one kind differ only in the values of their parameters."""
    order: dict[str, int] = {}
    return [order.setdefault(_signature(block), len(order)) for block in blocks]


def takes_one_state(block: nn.Module) -> bool:
    """Whether a block is called with one tensor, and perhaps with options."""
    parameters: list[Any] = list(inspect.signature(type(block).forward).parameters.values())
    state, *others = parameters[1:3] or [None]
    empty = inspect.Parameter.empty
    return (state is not None and state.kind is state.POSITIONAL_OR_KEYWORD and state.annotation in (empty, Tensor)
            and not any(other.default is empty and other.annotation is empty for other in others))


def _signature(block: nn.Module) -> str:
    """Type and settings of every module except dropout, and the shape of every tensor."""
    lines: list[Any] = []
    for name, module in block.named_modules():
        if 'drop' not in name.rsplit('.', 1)[-1]:
            settings = {k: v for k, v in vars(module).items() if type(v) in (bool, int, float, str, tuple, torch.Size)
                        and not k.startswith('_') and k not in (*_UNUSED, *PER_LAYER)}
            lines.append((name, type(module), module.extra_repr(), sorted(settings.items())))
    lines += [(name, tuple(p.shape)) for name, p in (*block.named_parameters(), *block.named_buffers())]
    return repr(lines)
