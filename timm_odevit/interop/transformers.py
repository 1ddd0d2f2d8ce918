"""from_transformers: the image tower of a CLIP or SigLIP of transformers as timm's VisionTransformer."""
from typing import Any

import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import Tensor, nn

from .build_vit import build_vit, mlp_ratio, refusal, renamed

__all__ = ['HOLDERS', 'from_transformers', 'kind_of']

# classes of transformers, by name, because transformers is optional: those that hold a tower, and the towers
HOLDERS = ('CLIPModel', 'CLIPVisionModelWithProjection', 'SiglipModel')
TOWERS = {'CLIPVisionModel': 'vit_base_patch16_clip_224', 'SiglipVisionModel': 'vit_base_patch16_siglip_224'}
_NAMES = {
    'embeddings.class_embedding': 'cls_token', 'embeddings.patch_embedding': 'patch_embed.proj',
    'embeddings.position_embedding.weight': 'pos_embed', 'pre_layrnorm': 'norm_pre', 'post_layernorm': 'norm',
    'encoder.layers.': 'blocks.', 'layer_norm': 'norm', 'self_attn.out_proj': 'attn.proj', 'self_attn.': 'attn.',
    'head.probe': 'attn_pool.latent', 'head.attention.out_proj': 'attn_pool.proj', 'head.attention.': 'attn_pool.',
    'head.layernorm': 'attn_pool.norm', 'head.mlp.': 'attn_pool.mlp.'}
_ACTS = {'gelu': 'gelu', 'quick_gelu': 'quick_gelu', 'gelu_pytorch_tanh': 'gelu_tanh'}


@torch.enable_grad()
def from_transformers(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as a CLIP or SigLIP of transformers.

    It maps images [B, C, S, S] to the embedding [B, dim], not normalised: with the projection where the model has one
    (CLIPModel, CLIPVisionModelWithProjection), whose bias is 0 in timm; else the pooled output, `pooler_output`.
    Embeddings agree up to rounding, which is checked on a random image. Device, dtype, mode and requires_grad carry
    over. Parameters are copies: the model of transformers does not change. `put_tower_` puts the timm model, converted
    or not, into that model.

    A model does not record its preprocessing: CLIP's mean and standard deviation are assumed for CLIP, and 0.5 for
    SigLIP, both with bicubic resizing: of the shorter side and a crop of the centre for CLIP, of both sides for SigLIP.

    Args:
        model: CLIPModel, CLIPVisionModelWithProjection, CLIPVisionModel, SiglipModel or SiglipVisionModel (also used by
            a SigLIP 2 with a fixed image size); may be wrapped for compilation or distribution.

    Returns:
        A new timm VisionTransformer.

    Raises:
        TypeError: The model is none of these.
        ValueError: The tower has a part that timm's VisionTransformer lacks.

    Examples:
        >>> tower = from_transformers(clip)
        >>> embedding = tower(images)
    """
    outer: Any = unwrap_model(model)
    host = outer.vision_model if kind_of(outer) in HOLDERS else outer
    if kind_of(host) not in TOWERS:
        raise TypeError(
            f'from_transformers got a {type(host).__module__}.{type(host).__qualname__}: expected CLIPModel, '
            'SiglipModel or the vision model of one, such as transformers.CLIPModel.from_pretrained(...).')
    kind, cfg = kind_of(host), host.config
    clip, projection = kind == 'CLIPVisionModel', getattr(outer, 'visual_projection', None)
    if cfg.hidden_act not in _ACTS:
        raise refusal(host, f"its activation is '{cfg.hidden_act}'; supported: {', '.join(_ACTS)}")
    if not clip and not host.use_head:
        raise refusal(host, 'it has no pooling head (vision_use_head=False), so it has no embedding')
    state = renamed(host.state_dict(keep_vars=True), _NAMES)
    state['pos_embed'] = state['pos_embed'][None]
    if clip:
        state['cls_token'] = state['cls_token'].reshape(1, 1, -1)
    else:
        for key in ('weight', 'bias'):
            query, *others = state.pop(f'attn_pool.in_proj_{key}').chunk(3)
            state[f'attn_pool.q.{key}'], state[f'attn_pool.kv.{key}'] = query, torch.cat(others)
    for name in [name for name in state if '.q_proj.' in name]:
        three = [name.replace('.q_proj.', f'.{part}_proj.') for part in 'qkv']
        if all(other in state for other in three):  # otherwise timm has no place for those that are there
            state[name.replace('.q_proj.', '.qkv.')] = torch.cat([state.pop(other) for other in three])
    classes = 0
    if projection is not None:
        state['head.weight'], classes = projection.weight, projection.out_features
    mean, std = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD) if clip else (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD)

    def embedding(images: Tensor) -> list[Tensor]:
        pooled = host(images).pooler_output
        return [pooled if projection is None else projection(pooled)]
    return build_vit(
        host, TOWERS[kind], state, embedding,
        dict(input_size=(cfg.num_channels, cfg.image_size, cfg.image_size), num_classes=classes, mean=tuple(mean),
             std=tuple(std), interpolation='bicubic', crop_pct=1.0, crop_mode='center' if clip else 'squash'),
        without_bias=() if projection is None else ('head',),
        img_size=cfg.image_size, patch_size=cfg.patch_size, in_chans=cfg.num_channels, num_classes=classes,
        embed_dim=cfg.hidden_size, depth=cfg.num_hidden_layers, num_heads=cfg.num_attention_heads,
        mlp_ratio=mlp_ratio(cfg.intermediate_size, cfg.hidden_size), global_pool='token' if clip else 'map',
        act_layer=_ACTS[cfg.hidden_act], attn_drop_rate=cfg.attention_dropout)


def kind_of(model: Any) -> str:
    """The name of a class of transformers; empty for any other."""
    return type(model).__name__ if type(model).__module__.startswith('transformers.models.') else ''
