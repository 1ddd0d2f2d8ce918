"""from_open_clip: the image tower of an open_clip model as timm's VisionTransformer."""
from typing import Any

import torch
from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import nn

from .build_vit import build_vit, mlp_ratio, refusal, renamed

__all__ = ['from_open_clip']

BASE = 'vit_base_patch16_clip_224'
_ACTS = {"GELU(approximate='none')": 'gelu', "GELU(approximate='tanh')": 'gelu_tanh', 'QuickGELU()': 'quick_gelu'}


@torch.enable_grad()
def from_open_clip(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as an open_clip model.

    It maps images [B, C, H, W] to what `encode_image` returns, [B, dim], not normalised; its head is the projection,
    with a bias of 0 that open_clip does not have. Embeddings agree up to rounding, which is checked on a random image.
    Device, dtype, mode and requires_grad carry over, and so does the preprocessing where open_clip records it.
    Parameters are copies: the open_clip model does not change. `put_tower_` puts the model, converted or not, into the
    open_clip model.

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
            queries.

    Examples:
        >>> tower = from_open_clip(clip)
        >>> embedding = tower(images)
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
    first, width = host.transformer.resblocks[0], host.transformer.width
    if host.attn_pool is not None or host.pool_type not in ('tok', 'avg'):
        pooling = 'attentional pooling' if host.attn_pool is not None else f"pool_type='{host.pool_type}'"
        raise refusal(host, f'it has {pooling}. Supported: the class token, or the average of the patches')
    if host.proj is None:
        raise refusal(host, 'it has no projection (proj is None), so it gives no embedding')
    if type(first).__name__ != 'ResidualAttentionBlock':
        raise refusal(host, f'its blocks are of the kind {type(first).__name__}')
    if str(first.mlp.gelu) not in _ACTS:
        raise refusal(host, f"its activation is {first.mlp.gelu}; supported: {', '.join(_ACTS)}")
    average, after_pool = host.pool_type == 'avg', host.pool_type == 'avg' and host.final_ln_after_pool
    pre_norm = not isinstance(host.ln_pre, nn.Identity)
    optional: dict[str, Any] = {}
    if not isinstance(first.ls_1, nn.Identity):
        optional['init_values'] = 1e-5  # any number; the values are copied
    if not isinstance(host.patch_dropout, nn.Identity):
        optional['patch_drop_rate'] = host.patch_dropout.prob
    state = {f'visual.{name}': tensor for name, tensor in host.state_dict(keep_vars=True).items()}
    return build_vit(
        host, BASE, renamed(state, {'ls_1': 'ls1', 'ls_2': 'ls2', **({'ln_post': 'fc_norm'} if after_pool else {})}),
        lambda images: [host(images)[0] if host.output_tokens else host(images)], _preprocessing(host),
        without_bias=('head',) if pre_norm else ('head', 'patch_embed.proj'),
        img_size=tuple(host.image_size), patch_size=tuple(host.patch_size), in_chans=host.conv1.in_channels,
        num_classes=host.proj.shape[1], embed_dim=width, depth=len(host.transformer.resblocks),
        num_heads=first.attn.num_heads, mlp_ratio=mlp_ratio(first.mlp.c_fc.out_features, width),
        global_pool='avg' if average else 'token', fc_norm=after_pool, pre_norm=pre_norm,
        act_layer=_ACTS[str(first.mlp.gelu)], attn_drop_rate=first.attn.dropout, **optional)


def _preprocessing(host: Any) -> dict[str, Any]:
    cfg = getattr(host, 'preprocess_cfg', None) or {}
    return dict(
        input_size=(host.conv1.in_channels, *host.image_size),
        num_classes=host.proj.shape[1],
        mean=tuple(cfg.get('mean') or OPENAI_CLIP_MEAN),
        std=tuple(cfg.get('std') or OPENAI_CLIP_STD),
        interpolation=cfg.get('interpolation') or 'bicubic',
        crop_pct=1.0,
        crop_mode={'squash': 'squash', 'longest': 'border'}.get(cfg.get('resize_mode', ''), 'center'),
    )
