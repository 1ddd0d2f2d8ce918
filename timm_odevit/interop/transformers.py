"""from_transformers: the image tower of a CLIP or SigLIP of transformers as timm's VisionTransformer."""
from typing import Any

import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import nn

from ..settings import checks_keywords
from .transplant import Transplant, mlp_ratio

__all__ = ['HOLDERS', 'from_transformers', 'kind_of']

# classes of transformers, by name, because transformers is optional: those that hold a tower, and the towers
HOLDERS = ('CLIPModel', 'CLIPVisionModelWithProjection', 'SiglipModel')
TOWERS = {'CLIPVisionModel': 'vit_base_patch16_clip_224', 'SiglipVisionModel': 'vit_base_patch16_siglip_224'}
_ACTS = {'gelu': 'gelu', 'quick_gelu': 'quick_gelu', 'gelu_pytorch_tanh': 'gelu_tanh'}


@checks_keywords
def from_transformers(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as a CLIP or SigLIP of transformers.

    It maps images [B, C, S, S] to the embedding [B, dim], not normalised: with the projection where the model has one
    (CLIPModel, CLIPVisionModelWithProjection), whose bias is 0 in timm; else the pooled output, `pooler_output`.
    Embeddings agree up to rounding. Device, dtype, mode and requires_grad carry over. Parameters are copies: the model
    of transformers does not change. `put_tower_` puts the timm model, converted or not, into that model.

    A model does not record its preprocessing: CLIP's mean and standard deviation are assumed for CLIP, and 0.5 for
    SigLIP, both with bicubic resizing: of the shorter side and a crop of the centre for CLIP, of both sides for SigLIP.

    Args:
        model: CLIPModel, CLIPVisionModelWithProjection, CLIPVisionModel, SiglipModel or SiglipVisionModel, which a
            SigLIP 2 of one size uses too; may be wrapped for compilation or distribution.

    Returns:
        A new timm VisionTransformer.

    Raises:
        TypeError: The model is none of these.
        ValueError: The tower has a part that timm's VisionTransformer lacks; the message names it.
    """
    outer: Any = unwrap_model(model)
    host = outer.vision_model if kind_of(outer) in HOLDERS else outer
    if kind_of(host) not in TOWERS:
        raise TypeError(
            f'from_transformers got a {type(host).__module__}.{type(host).__qualname__}: expected CLIPModel, '
            'SiglipModel or the vision model of one, such as transformers.CLIPModel.from_pretrained(...).')
    from transformers.activations import ACT2FN
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer  # there, since the model is from it
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
    kind = kind_of(host)
    clip = kind == 'CLIPVisionModel'
    parts = Transplant(kind, host)
    parts.one_dtype()
    cfg, embeddings, layers = host.config, host.embeddings, list(host.encoder.layers)
    for i, layer in enumerate(layers):
        if type(layer) is not (CLIPEncoderLayer if clip else SiglipEncoderLayer):
            raise parts.refusal(f'its layer {i} is a {type(layer).__name__}')
    if cfg.hidden_act not in _ACTS:
        raise parts.refusal(f"its activation is '{cfg.hidden_act}'; supported: {', '.join(_ACTS)}")
    parts.same_in_each('num_heads', [layer.self_attn.num_heads for layer in layers])
    parts.same_in_each('the dropout of the attention', [layer.self_attn.dropout for layer in layers])
    parts.same_in_each('the activation', [str(layer.mlp.activation_fn) for layer in layers])
    if str(layers[0].mlp.activation_fn) != str(ACT2FN[cfg.hidden_act]):
        raise parts.refusal(f"its activation is {layers[0].mlp.activation_fn}, not '{cfg.hidden_act}' as in its config")

    positions = embeddings.position_embedding.weight
    parts.module('', host)
    parts.module('patch_embed.proj', embeddings.patch_embedding)
    parts.tensor('pos_embed', positions[None], positions)
    parts.module('norm', host.post_layernorm)
    if clip:
        parts.tensor('cls_token', embeddings.class_embedding.reshape(1, 1, -1), embeddings.class_embedding)
        parts.module('norm_pre', host.pre_layrnorm)
    else:
        if not host.use_head:
            raise parts.refusal('it has no pooling head (vision_use_head=False), so it has no embedding')
        pool = host.head
        parts.tensor('attn_pool.latent', pool.probe)
        parts.attention('attn_pool', pool.attention, split=True)
        parts.module('attn_pool.norm', pool.layernorm)
        parts.module('attn_pool.mlp.fc1', pool.mlp.fc1)
        parts.module('attn_pool.mlp.fc2', pool.mlp.fc2)
    projection = getattr(outer, 'visual_projection', None)
    if projection is not None:
        weight = projection.weight
        parts.tensor('head.weight', weight)
        parts.tensor('head.bias', torch.zeros_like(weight[:, 0]), weight)
    for i, layer in enumerate(layers):
        name, attention = f'blocks.{i}', layer.self_attn
        parts.module(name, layer)
        parts.module(f'{name}.norm1', layer.layer_norm1)
        parts.joined(f'{name}.attn.qkv', [attention.q_proj, attention.k_proj, attention.v_proj])
        parts.module(f'{name}.attn.proj', attention.out_proj)
        parts.module(f'{name}.norm2', layer.layer_norm2)
        parts.module(f'{name}.mlp.fc1', layer.mlp.fc1)
        parts.module(f'{name}.mlp.fc2', layer.mlp.fc2)
    classes = 0 if projection is None else projection.out_features
    mean, std = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD) if clip else (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD)
    return parts.build(
        TOWERS[kind],
        dict(input_size=(cfg.num_channels, cfg.image_size, cfg.image_size), num_classes=classes, mean=tuple(mean),
             std=tuple(std), interpolation='bicubic', crop_pct=1.0, crop_mode='center' if clip else 'squash'),
        img_size=cfg.image_size,
        patch_size=cfg.patch_size,
        in_chans=cfg.num_channels,
        num_classes=classes,
        embed_dim=cfg.hidden_size,
        depth=len(layers),
        num_heads=layers[0].self_attn.num_heads,
        mlp_ratio=mlp_ratio(cfg.intermediate_size, cfg.hidden_size),
        global_pool='token' if clip else 'map',
        act_layer=_ACTS[cfg.hidden_act],
        attn_drop_rate=layers[0].self_attn.dropout,
    )


def kind_of(model: Any) -> str:
    """The name of a class of transformers; empty for any other."""
    return type(model).__name__ if type(model).__module__.startswith('transformers.models.') else ''
