"""timm's VisionTransformer from those of other libraries: torchvision, open_clip and transformers."""
import math
from typing import Any

import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import Tensor, nn
from torchvision import models as tv

from ..hooks import watch_blocks
from .build_vit import build_vit, mlp_ratio, refusal, renamed, type_of

__all__ = ['HOLDERS', 'from_open_clip', 'from_torchvision', 'from_transformers', 'kind_of']

# (width, patch size) -> timm name; every size is passed as a keyword, so the name only has to be of the same kind
_PLAIN = {
    (192, 16): 'vit_tiny_patch16_224', (384, 16): 'vit_small_patch16_224', (384, 32): 'vit_small_patch32_224',
    (768, 16): 'vit_base_patch16_224', (768, 32): 'vit_base_patch32_224', (1024, 16): 'vit_large_patch16_224',
    (1024, 32): 'vit_large_patch32_224', (1280, 14): 'vit_huge_patch14_224'}
_WEIGHTS = (
    tv.ViT_B_16_Weights, tv.ViT_B_32_Weights, tv.ViT_L_16_Weights, tv.ViT_L_32_Weights, tv.ViT_H_14_Weights)
_TORCHVISION = {  # models from before torchvision 0.14 have the names linear_1 and linear_2
    'class_token': 'cls_token', 'encoder.pos_embedding': 'pos_embed', 'encoder.ln': 'norm',
    'conv_proj': 'patch_embed.proj', 'ln_1': 'norm1', 'ln_2': 'norm2', 'self_attention.in_proj_': 'attn.qkv.',
    'self_attention.out_proj': 'attn.proj', 'mlp.0': 'mlp.fc1', 'mlp.3': 'mlp.fc2', 'mlp.linear_': 'mlp.fc'}

_OPEN_CLIP_ACTS = {"GELU(approximate='tanh')": 'gelu_tanh', 'QuickGELU()': 'quick_gelu'}

# classes of transformers, by name, because transformers is optional: those that hold a tower, and the towers
HOLDERS = ('CLIPModel', 'CLIPVisionModelWithProjection', 'SiglipModel')
_TOWERS = {'CLIPVisionModel': 'vit_base_patch16_clip_224', 'SiglipVisionModel': 'vit_base_patch16_siglip_224'}
_TRANSFORMERS = {
    'embeddings.class_embedding': 'cls_token', 'embeddings.patch_embedding': 'patch_embed.proj',
    'embeddings.position_embedding.weight': 'pos_embed', 'pre_layrnorm': 'norm_pre', 'post_layernorm': 'norm',
    'encoder.layers.': 'blocks.', 'layer_norm': 'norm', 'self_attn.out_proj': 'attn.proj', 'self_attn.': 'attn.',
    'head.probe': 'attn_pool.latent', 'head.attention.out_proj': 'attn_pool.proj', 'head.attention.': 'attn_pool.',
    'head.layernorm': 'attn_pool.norm', 'head.mlp.': 'attn_pool.mlp.'}


@torch.enable_grad()
def from_torchvision(vit: nn.Module, *, weights: tv.WeightsEnum | None = None) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same as a torchvision one.

    Logits agree up to rounding, which is checked on a random image; dropouts have the rates of the first layer. Device,
    dtype, mode and requires_grad carry over; parameters are copies. `save_pretrained` refuses an eps other than 1e-6.

    Args:
        vit: torchvision VisionTransformer, from images [B, C, S, S] to logits [B, classes]. Its heads are one linear
            layer, possibly after a dropout, or an identity.
        weights: The torchvision weights that were loaded, whose preprocessing goes into the pretrained_cfg; None stands
            for ViT_B_16_Weights.IMAGENET1K_V1.

    Returns:
        A new timm VisionTransformer.

    Raises:
        TypeError: The model is not a torchvision VisionTransformer, or weights are not those of one.
        ValueError: The model has a part that timm's VisionTransformer lacks, such as a convolutional stem, a pre-logits
            layer (representation_size) or an adapter.

    Examples:
        >>> import torchvision
        >>> vit = from_torchvision(torchvision.models.vit_b_16())
        >>> done = convert_(vit)
    """
    host: Any = unwrap_model(vit)
    if type(host) is not tv.VisionTransformer:  # a subclass may compute anything; timm has a namesake
        raise TypeError(
            f'from_torchvision got a {type_of(host)}: expected a torchvision VisionTransformer '
            '(no subclass), such as torchvision.models.vit_b_16().')
    if weights is not None and not isinstance(weights, _WEIGHTS):
        raise TypeError(
            f"weights must be None or a member of {', '.join(w.__name__ for w in _WEIGHTS)}, such as "
            f'torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1; got {weights!r}.')
    conv, layers, width = host.conv_proj, dict(host.encoder.layers.named_children()), host.hidden_dim
    if type(conv) is not nn.Conv2d:
        raise refusal(host, f'its conv_proj is a {type(conv).__name__}; only a single patch convolution is supported, '
                            'which torchvision builds with conv_stem_configs=None')
    heads = [(name, module) for name, module in host.heads.named_modules(prefix='heads')
             if not isinstance(module, (nn.Sequential, nn.Identity))]
    if [type(module) for _, module in heads] not in ([], [nn.Linear], [nn.Dropout, nn.Linear]):
        raise refusal(host, f"its heads are {', '.join(type(module).__name__ for _, module in heads)}; supported: "
                            'Linear; Dropout, Linear; Identity. Set vit.heads = torch.nn.Identity() to build the rest')
    names = {f'encoder.layers.{name}.': f'blocks.{i}.' for i, name in enumerate(layers)}
    if heads:
        names[heads[-1][0]] = 'head'
    classes, first = heads[-1][1].out_features if heads else 0, next(iter(layers.values()))
    preset = (tv.ViT_B_16_Weights.IMAGENET1K_V1 if weights is None else weights).transforms()
    nearest = min(_PLAIN, key=lambda size: (abs(math.log(size[0] / width)), abs(size[1] - conv.kernel_size[0])))

    def tokens_and_logits(images: Tensor) -> list[Tensor]:
        with watch_blocks([[host.encoder]]) as records:  # since a new model has a head of zeros
            logits = host(images)
        return [records[0][0][-1], logits]
    return build_vit(
        host, _PLAIN[nearest], renamed(host, {**names, **_TORCHVISION}), tokens_and_logits,
        dict(num_classes=classes, input_size=(conv.in_channels, host.image_size, host.image_size),
             mean=tuple(preset.mean), std=tuple(preset.std), interpolation=preset.interpolation.value,
             crop_pct=preset.crop_size[0] / preset.resize_size[0]),
        img_size=host.image_size, patch_size=conv.kernel_size[0], in_chans=conv.in_channels, num_classes=classes,
        embed_dim=width, depth=len(layers), num_heads=first.self_attention.num_heads,
        mlp_ratio=mlp_ratio(host.mlp_dim, width), drop_rate=heads[0][1].p if len(heads) > 1 else 0.,
        pos_drop_rate=host.encoder.dropout.p, proj_drop_rate=first.dropout.p,
        attn_drop_rate=first.self_attention.dropout)


@torch.enable_grad()
def from_open_clip(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as an open_clip model.

    It maps images [B, C, H, W] to what `encode_image` returns, [B, dim], not normalised; its head is the projection.
    What is checked, copied and carried over is as with `from_torchvision`, and the recorded preprocessing.
    `put_tower_` puts the tower, converted or not, back.

    Args:
        model: open_clip model (CLIP, CustomTextCLIP), or the VisionTransformer that is its `visual`. A tower that is
            timm's already (a TimmModel, such as SigLIP's) needs none of this: use `model.visual.trunk`.

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
    kind = type_of(host)
    if kind == 'open_clip.timm_model.TimmModel':
        raise TypeError('The image tower of this open_clip model is a timm model: use model.visual.trunk as it is.')
    if kind != 'open_clip.transformer.VisionTransformer':
        raise TypeError(
            f"from_open_clip got a {type(model).__name__}, whose image tower is a {kind}: expected open_clip's own "
            "VisionTransformer, as in open_clip.create_model('ViT-B-16').")
    if host.proj is None or host.attn_pool is not None or host.pool_type not in ('tok', 'avg'):
        raise refusal(host, 'it must have a projection (proj), and pool by its class token or by the average of the '
                            'patches, without attentional pooling')
    first, width, cfg = host.transformer.resblocks[0], host.transformer.width, getattr(host, 'preprocess_cfg', {})
    pooling = 'avg' if host.pool_type == 'avg' else 'token'
    after_pool = pooling == 'avg' and host.final_ln_after_pool
    optional: dict[str, Any] = {}
    if not isinstance(first.ls_1, nn.Identity):
        optional['init_values'] = 1e-5  # any number; the values are copied
    if not isinstance(host.patch_dropout, nn.Identity):
        optional['patch_drop_rate'] = host.patch_dropout.prob
    state = renamed(host, {'ls_1': 'ls1', 'ls_2': 'ls2', **({'ln_post': 'fc_norm'} if after_pool else {})})
    return build_vit(
        host, 'vit_base_patch16_clip_224', {f'visual.{name}': tensor for name, tensor in state.items()},
        lambda images: [host(images)[0] if host.output_tokens else host(images)],
        dict(input_size=(host.conv1.in_channels, *host.image_size), num_classes=host.proj.shape[1],
             mean=tuple(cfg.get('mean') or OPENAI_CLIP_MEAN), std=tuple(cfg.get('std') or OPENAI_CLIP_STD),
             interpolation=cfg.get('interpolation') or 'bicubic', crop_pct=1.0,
             crop_mode={'squash': 'squash', 'longest': 'border'}.get(cfg.get('resize_mode', ''), 'center')),
        img_size=tuple(host.image_size), patch_size=tuple(host.patch_size), in_chans=host.conv1.in_channels,
        num_classes=host.proj.shape[1], embed_dim=width, depth=len(host.transformer.resblocks),
        num_heads=first.attn.num_heads, mlp_ratio=mlp_ratio(first.mlp.c_fc.out_features, width), global_pool=pooling,
        fc_norm=after_pool, pre_norm=not isinstance(host.ln_pre, nn.Identity),
        act_layer=_OPEN_CLIP_ACTS.get(str(first.mlp.gelu), 'gelu'),
        attn_drop_rate=getattr(first.attn, 'dropout', 0.), **optional)


@torch.enable_grad()
def from_transformers(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as a CLIP or SigLIP of transformers.

    It maps images [B, C, S, S] to the embedding [B, dim], not normalised: with the projection where the model has one;
    else the pooled output. What is checked, copied and carried over is as with `from_torchvision`. `put_tower_` puts
    the tower, converted or not, back. The preprocessing, which a model does not record, is assumed: CLIP's mean and
    standard deviation and a crop of the centre for CLIP; 0.5 and both sides resized for SigLIP.

    Args:
        model: CLIPModel, CLIPVisionModelWithProjection, CLIPVisionModel, SiglipModel or SiglipVisionModel (also of
            SigLIP 2 with a fixed image size).

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
    kind = kind_of(host)
    if kind not in _TOWERS:
        raise TypeError(
            f'from_transformers got a {type_of(host)}: expected CLIPModel, SiglipModel or the vision model of one, '
            'such as transformers.CLIPModel.from_pretrained(...).')
    cfg, clip, projection = host.config, kind == 'CLIPVisionModel', getattr(outer, 'visual_projection', None)
    if not clip and not host.use_head:
        raise refusal(host, 'it has no pooling head (vision_use_head=False), so it has no embedding')
    state = renamed(host, _TRANSFORMERS)
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
        host, _TOWERS[kind], state, embedding,
        dict(input_size=(cfg.num_channels, cfg.image_size, cfg.image_size), num_classes=classes, mean=tuple(mean),
             std=tuple(std), interpolation='bicubic', crop_pct=1.0, crop_mode='center' if clip else 'squash'),
        img_size=cfg.image_size, patch_size=cfg.patch_size, in_chans=cfg.num_channels, num_classes=classes,
        embed_dim=cfg.hidden_size, depth=cfg.num_hidden_layers, num_heads=cfg.num_attention_heads,
        mlp_ratio=mlp_ratio(cfg.intermediate_size, cfg.hidden_size), global_pool='token' if clip else 'map',
        act_layer={'gelu_pytorch_tanh': 'gelu_tanh'}.get(cfg.hidden_act, cfg.hidden_act),
        attn_drop_rate=cfg.attention_dropout)


def kind_of(model: Any) -> str:
    """The name of a class of transformers; empty for any other."""
    return type(model).__name__ if type(model).__module__.startswith('transformers.models.') else ''
