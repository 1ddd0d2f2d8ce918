"""What can be converted in a timm model: where its blocks are, of what kind, and the field for each kind."""
import inspect
from collections.abc import Iterable, Sequence
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

from ..ode.blocks import find_ode_blocks
from ..ode.config import OdeConfig
from ..ode.fields import NativeField


class PostNormField(NativeField):
    """Norms follow the sub-layers."""

    def attention(self, t, x, context):
        attn = getattr(self.block, '_attn', self.block.attn)  # of Swin, with shifted windows
        return self.block.drop_path1(self.block.norm1(attn(x, **context.block_kwargs)))

    def mlp(self, t, x, context):
        return self.block.drop_path2(self.block.norm2(self.block.mlp(x)))


class GammaField(NativeField):
    """A pre-norm block whose LayerScale is two parameters, or absent."""

    def attention(self, t, x, context):
        attn, gamma = getattr(self.block, '_attn', self.block.attn), getattr(self.block, 'gamma_1', None)
        y = attn(self.block.norm1(x), **context.block_kwargs)
        return self.block.drop_path1(y if gamma is None else gamma * y)

    def mlp(self, t, x, context):
        y, gamma = self.block.mlp(self.block.norm2(x)), getattr(self.block, 'gamma_2', None)
        return self.block.drop_path2(y if gamma is None else gamma * y)


class ParallelField(NativeField):
    """Several attentions side by side, then several MLPs side by side."""

    def attention(self, t, x, context):
        return torch.stack([
            a.drop_path(a.ls(a.attn(a.norm(x), **context.block_kwargs))) for a in self.block.attns]).sum(dim=0)

    def mlp(self, t, x, context):
        return torch.stack([ffn(x) for ffn in self.block.ffns]).sum(dim=0)


class SamField(NativeField):
    """SAM's block on a map of tokens [B, H, W, D], within windows or global."""

    def attention(self, t, x, context):
        block, size, y = self.block, self.block.window_size, self.block.norm1(x)
        if size > 0:
            y, padded = window_partition(y, size)
        y = block.drop_path1(block.ls1(block.attn(y)))
        return window_unpartition(y, size, x.shape[1:3], padded) if size > 0 else y


class WholeField(NativeField):
    """psi(x) = block(x) - x, for the unsplit methods only."""

    def attention(self, t, x, context):
        raise ValueError(f"A {type(self.block).__name__} cannot be split into attention and MLP. Use 'euler'.")

    mlp = attention

    def both(self, t, x, context):
        return self.block(x, **context.block_kwargs) - x


# By class object, since several timm modules have a class called Block. Blocks not listed here are used whole.
FIELD_OF: dict[type[nn.Module], type[NativeField]] = {
    vision_transformer.Block: NativeField,
    vision_transformer.ResPostBlock: PostNormField,
    vision_transformer.ParallelThingsBlock: ParallelField,
    vision_transformer_relpos.RelPosBlock: NativeField,
    vision_transformer_relpos.ResPostRelPosBlock: PostNormField,
    vision_transformer_sam.Block: SamField,
    beit.Block: GammaField,
    eva.EvaBlock: GammaField,
    eva.EvaBlockPostNorm: PostNormField,
    SwinTransformerBlock: GammaField,
    SwinTransformerV2Block: PostNormField,
    SwinTransformerV2CrBlock: WholeField,
}
STAGES: dict[type[nn.Module], str] = {
    SwinTransformer: 'layers', SwinTransformerV2: 'layers', SwinTransformerV2Cr: 'stages'}
# constants that timm sets per layer, by depth; a shared block gets their mean over its layers
PER_LAYER = ('drop_prob', 'lambda_init')
# settings that do not change what an eval-mode model computes at its image size
_RUNTIME = ('distilled_training', 'fused_attn', 'grad_checkpointing', 'target_shift_size', 'training')


class Site(NamedTuple):
    """A sequence of blocks in a model, `host.blocks`; `prefix` comes before their indices in names of parameters."""
    host: Any
    prefix: str

    @property
    def blocks(self) -> list[Any]:
        return list(self.host.blocks)

    def converted(self, config: OdeConfig) -> dict[int, Any]:
        first, last = config.blocks or (0, len(self.blocks) - 1)
        return {i: block for i, block in enumerate(self.blocks) if first <= i <= last}


def cannot_convert(model: nn.Module, why: str) -> TypeError:
    return TypeError(f'Cannot convert {type(model).__name__}: {why}. See timm_odevit.list_convertible().')


def find_stages(model: nn.Module) -> list[Site]:
    """Where the blocks of a model are: one sequence, or one per stage; TypeError for a model without."""
    for cls, name in STAGES.items():
        if isinstance(model, cls):
            return [Site(stage, f'{name}.{i}.blocks.') for i, stage in enumerate(getattr(model, name))]
    # `encoder` is in models of language and images
    for host, prefix in ((model, 'blocks.'), (getattr(model, 'encoder', None), 'encoder.blocks.')):
        blocks = getattr(host, '_modules', {}).get('blocks')  # not of what it wraps
        if isinstance(blocks, (nn.Sequential, nn.ModuleList)) and len(blocks):
            return [Site(host, prefix)]
    raise cannot_convert(model, 'it has no sequence of transformer blocks')


def own_blocks(model: nn.Module) -> list[Any]:
    """The blocks of a model; of an ODE-ViT, the shared ones, and those kept. TypeError as above."""
    return [block for ode in find_ode_blocks(model) for block in (*ode.before, *ode.shared.phases, *ode.after)] or [
        block for site in find_stages(model) for block in site.blocks]


def class_token_comes_later(model: Any) -> bool:
    return isinstance(model, (Cait, Xcit))


def prefix_tokens(model: Any) -> int:
    """How many tokens come before those of the patches in the blocks' states."""
    return 0 if class_token_comes_later(model) else getattr(model, 'num_prefix_tokens', 0)


def has_class_token(model: Any) -> bool:
    """Whether the first of these is a class token; NaFlexViTs hold it in `embeds`."""
    return prefix_tokens(model) > 0 and getattr(getattr(model, 'embeds', model), 'cls_token', None) is not None


def field_class(block: nn.Module) -> type[NativeField]:
    return FIELD_OF.get(type(block), WholeField)


def kinds(blocks: Iterable[nn.Module]) -> list[int]:
    """For each block, the index of its kind: blocks of one kind differ only in the values of their parameters."""
    order: dict[tuple[str, ...], int] = {}
    return [order.setdefault(tuple(structure(block, PER_LAYER)), len(order)) for block in blocks]


def takes_one_state(block: nn.Module) -> bool:
    """Whether a block is called with one tensor, and perhaps with options."""
    state, *others = [*inspect.signature(type(block).forward).parameters.values()][1:3]
    return state.kind is state.POSITIONAL_OR_KEYWORD and state.annotation in (state.empty, Tensor) and not any(
        other.default is other.empty and other.annotation is other.empty for other in others)


def structure(model: nn.Module, ignored: Sequence[str] = ()) -> list[str]:
    """Type and settings of every module except dropout, in order; shapes of tensors, by name."""
    lines = []
    for name, module in model.named_modules():
        if 'drop' not in name.rsplit('.', 1)[-1] and not isinstance(module, nn.ModuleList):
            lines.append(f'{name}: {type(module).__name__}({module.extra_repr()})')
            lines += [f'{name}.{k}'.strip('.') + f' = {v:{".6g" * isinstance(v, float)}}'
                      for k, v in sorted(vars(module).items())
                      if type(v) in (bool, int, float, str, tuple, torch.Size) and not k.startswith('_')
                      and k not in (*_RUNTIME, *ignored) and 'drop' not in k]
    return lines + [f'{name}: {list(tensor.shape)}' for name, tensor in sorted(model.state_dict().items())]
