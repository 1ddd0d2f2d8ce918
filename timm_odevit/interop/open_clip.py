"""from_open_clip: the image tower of an open_clip model as timm's VisionTransformer."""
from typing import Any, Dict

import torch
from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import nn

from ..settings import checks_keywords
from .transplant import Transplant, mlp_ratio

__all__ = ['from_open_clip']

BASE = 'vit_base_patch16_clip_224'


@checks_keywords
def from_open_clip(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as an open_clip model.

    It maps images [B, C, H, W] to what `encode_image` returns, [B, dim], not normalised; its head is the projection,
    with a bias of 0 that open_clip does not have. Embeddings agree up to rounding. Device, dtype, mode and
    requires_grad carry over, and so does the preprocessing where open_clip records it. Parameters are copies: the
    open_clip model does not change. `put_tower_` puts the model, converted or not, into the open_clip model.

    A model whose tower is timm's already (a TimmModel, such as SigLIP's) needs none of this: use
    `model.visual.trunk`.

    Args:
        model: open_clip model (CLIP, CustomTextCLIP), or the VisionTransformer that is its `visual`; may be wrapped for
            compilation or distribution.

    Returns:
        A new timm VisionTransformer.

    Raises:
        TypeError: The model has no such tower.
        ValueError: The tower has a part that timm's VisionTransformer lacks, such as attentional pooling or normalised
            queries; the message names it.
    """
    host: Any = unwrap_model(model)
    host = unwrap_model(getattr(host, 'visual', host))
    kind = f'{type(host).__module__}.{type(host).__qualname__}'
    if kind == 'open_clip.timm_model.TimmModel':
        raise TypeError('The image tower of this open_clip model is a timm model: use model.visual.trunk as it is.')
    if kind != 'open_clip.transformer.VisionTransformer':
        raise TypeError(
            f"from_open_clip got a {type(model).__name__}, whose image tower is a {kind}: expected open_clip's own "
            "VisionTransformer, as in open_clip.create_model('ViT-B-16').")
    from open_clip import transformer as theirs  # optional, and there, since the model is from it
    alike: Dict[Any, Any] = {theirs.LayerNorm: nn.LayerNorm, theirs.LayerNormFp32: nn.LayerNorm}
    parts = Transplant('open_clip VisionTransformer', host, alike)
    parts.one_dtype()
    blocks = list(host.transformer.resblocks)
    for i, block in enumerate(blocks):
        if type(block) is not theirs.ResidualAttentionBlock:
            raise parts.refusal(f'its block {i} is a {type(block).__name__}, not a ResidualAttentionBlock')
        if [name for name, _ in block.mlp.named_children()] != ['c_fc', 'gelu', 'c_proj']:
            raise parts.refusal(f'the MLP of its block {i} has other parts than c_fc, gelu and c_proj')
    if host.attn_pool is not None or host.pool_type not in ('tok', 'avg'):
        pooling = 'attentional pooling' if host.attn_pool is not None else f"pool_type='{host.pool_type}'"
        raise parts.refusal(f'it has {pooling}. Supported: the class token, or the average of the patches')
    if host.proj is None:
        raise parts.refusal('it has no projection (proj is None), so it gives no embedding')
    acts = {nn.GELU: 'gelu', theirs.QuickGELU: 'quick_gelu'}
    kinds = {type(block.mlp.gelu) for block in blocks}
    shown = {str(block.mlp.gelu).removesuffix('()') for block in blocks}
    if len(kinds) != 1 or not kinds <= acts.keys() or not shown <= {"GELU(approximate='none')", 'QuickGELU'}:
        raise parts.refusal(f"its activations are {', '.join(sorted(shown))}; supported: one exact GELU, or QuickGELU")
    parts.same_in_each('num_heads', [block.attn.num_heads for block in blocks])
    parts.same_in_each('the dropout of the attention', [block.attn.dropout for block in blocks])

    first, average = blocks[0], host.pool_type == 'avg'
    width, classes = host.transformer.width, host.proj.shape[1]
    pre_norm = not isinstance(host.ln_pre, nn.Identity)
    after_pool = average and host.final_ln_after_pool
    parts.module('', host)
    parts.tensor('cls_token', host.class_embedding.reshape(1, 1, -1), host.class_embedding)
    parts.tensor('pos_embed', host.positional_embedding[None], host.positional_embedding)
    if pre_norm:
        parts.module('patch_embed.proj', host.conv1)
        parts.module('norm_pre', host.ln_pre)
    else:  # then timm's has a bias
        parts.tensor('patch_embed.proj.weight', host.conv1.weight)
        parts.tensor('patch_embed.proj.bias', torch.zeros_like(host.class_embedding), host.conv1.weight)
    parts.module('fc_norm' if after_pool else 'norm', host.ln_post)
    parts.tensor('head.weight', host.proj.t().contiguous(), host.proj)
    parts.tensor('head.bias', torch.zeros_like(host.proj[0]), host.proj)
    for i, block in enumerate(blocks):
        name = f'blocks.{i}'
        parts.module(name, block)
        parts.module(f'{name}.norm1', block.ln_1)
        parts.attention(f'{name}.attn', block.attn)
        parts.module(f'{name}.norm2', block.ln_2)
        parts.module(f'{name}.mlp.fc1', block.mlp.c_fc)
        parts.module(f'{name}.mlp.fc2', block.mlp.c_proj)
        for key in ('ls_1', 'ls_2'):
            if not isinstance(getattr(block, key), nn.Identity):
                parts.tensor(f"{name}.{key.replace('_', '')}.gamma", getattr(block, key).gamma)
    optional: Dict[str, Any] = {}
    if not isinstance(first.ls_1, nn.Identity):
        optional['init_values'] = 1e-5  # any number; the values are copied
    if not isinstance(host.patch_dropout, nn.Identity):
        optional['patch_drop_rate'] = host.patch_dropout.prob
    return parts.build(
        BASE,
        _preprocessing(host, classes),
        img_size=tuple(host.image_size),
        patch_size=tuple(host.patch_size),
        in_chans=host.conv1.in_channels,
        num_classes=classes,
        embed_dim=width,
        depth=len(blocks),
        num_heads=first.attn.num_heads,
        mlp_ratio=mlp_ratio(first.mlp.c_fc.out_features, width),
        global_pool='avg' if average else 'token',
        fc_norm=after_pool,
        pre_norm=pre_norm,
        act_layer=acts[kinds.pop()],
        attn_drop_rate=first.attn.dropout,
        **optional,
    )


def _preprocessing(host: Any, classes: int) -> Dict[str, Any]:
    cfg = getattr(host, 'preprocess_cfg', None) or {}
    return dict(
        input_size=(host.conv1.in_channels, *host.image_size),
        num_classes=classes,
        mean=tuple(cfg.get('mean') or OPENAI_CLIP_MEAN),
        std=tuple(cfg.get('std') or OPENAI_CLIP_STD),
        interpolation=cfg.get('interpolation') or 'bicubic',
        crop_pct=1.0,
        crop_mode={'squash': 'squash', 'longest': 'border'}.get(cfg.get('resize_mode', ''), 'center'),
    )
