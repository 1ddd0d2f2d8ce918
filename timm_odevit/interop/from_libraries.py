"""timm's VisionTransformer from those of other libraries: torchvision, open_clip and transformers."""
import math
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import Tensor, nn
from torchvision import models as tv

from ..hooks import evaluating, on_meta, watch_blocks
from ..settings import one_line

_SIZES = {192: 'tiny', 384: 'small', 768: 'base', 1024: 'large', 1280: 'huge'}  # timm's names of widths
# parts of the names of tensors, theirs and timm's
_TORCHVISION = {
    'class_token': 'cls_token', 'encoder.pos_embedding': 'pos_embed', 'encoder.ln': 'norm',
    'conv_proj': 'patch_embed.proj', 'ln_1': 'norm1', 'ln_2': 'norm2', 'self_attention.in_proj_': 'attn.qkv.',
    'self_attention.out_proj': 'attn.proj', 'mlp.0': 'mlp.fc1', 'mlp.3': 'mlp.fc2'}
_OPEN_CLIP = {
    'class_embedding': 'cls_token', 'positional_embedding': 'pos_embed', 'conv1': 'patch_embed.proj',
    'transformer.resblocks.': 'blocks.', 'ln_pre': 'norm_pre', 'ln_1': 'norm1', 'ln_2': 'norm2', 'in_proj_': 'qkv.',
    'out_proj': 'proj', 'mlp.c_fc': 'mlp.fc1', 'mlp.c_proj': 'mlp.fc2', '.ls_': '.ls'}
_TRANSFORMERS = {
    'embeddings.class_embedding': 'cls_token', 'embeddings.patch_embedding': 'patch_embed.proj',
    'embeddings.position_embedding.weight': 'pos_embed', 'pre_layrnorm': 'norm_pre', 'post_layernorm': 'norm',
    'encoder.layers.': 'blocks.', 'layer_norm': 'norm', 'self_attn.': 'attn.', 'out_proj': 'proj',
    'head.probe': 'attn_pool.latent', 'head.attention.': 'attn_pool.', 'head.layernorm': 'attn_pool.norm',
    'head.mlp.': 'attn_pool.mlp.'}
_OPEN_CLIP_ACTS = {"GELU(approximate='tanh')": 'gelu_tanh', 'QuickGELU()': 'quick_gelu'}
# classes of transformers, by name, because transformers is optional: those that hold a tower, and the towers
HOLDERS = ('CLIPModel', 'CLIPVisionModelWithProjection', 'SiglipModel')
_TOWERS = {'CLIPVisionModel': 'vit_base_patch16_clip_224', 'SiglipVisionModel': 'vit_base_patch16_siglip_224'}


@torch.enable_grad()
def from_torchvision(vit: nn.Module, *, weights: tv.WeightsEnum | None = None) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same as a torchvision one.

    Logits agree up to rounding, which is checked on a random image; dropouts have the rates of the first layer. Device,
    dtype, mode and requires_grad carry over; parameters are copies.

    Args:
        vit: torchvision VisionTransformer, from images [B, C, S, S] to logits [B, classes].
        weights: The torchvision weights that were loaded, for the preprocessing; None for those of IMAGENET1K_V1.

    Raises TypeError for anything else, ValueError for a part that timm lacks, such as a convolutional stem.

    Examples:
        >>> import torchvision
        >>> vit = from_torchvision(torchvision.models.vit_b_16())
        >>> done = convert_(vit)
    """
    host = unwrap_model(vit)
    if type(host) is not tv.VisionTransformer:  # a subclass may compute anything; timm has a namesake
        raise unexpected('from_torchvision', host, "torchvision's VisionTransformer, no subclass")
    if not isinstance(weights, (tv.WeightsEnum, type(None))):
        raise unexpected('from_torchvision', weights, 'weights such as torchvision.models.ViT_B_16_Weights.DEFAULT')
    conv, layers = host.conv_proj, dict(host.encoder.layers.named_children())
    heads = [(name, module) for name, module in host.heads.named_modules(prefix='heads')
             if not isinstance(module, (nn.Sequential, nn.Identity))]
    parts = ', '.join(type(module).__name__ for module in (conv, *(module for _, module in heads)))
    if parts not in ('Conv2d', 'Conv2d, Linear', 'Conv2d, Dropout, Linear'):
        raise _refusal(host, f'its stem and heads are {parts}; supported: Conv2d and nothing, Linear or Dropout, '
                             'Linear. Set vit.heads = torch.nn.Identity() to build the rest')
    names = {f'encoder.layers.{name}.': f'blocks.{i}.' for i, name in enumerate(layers)}
    if heads:
        names[heads[-1][0]] = 'head'
    first, preset = next(iter(layers.values())), (weights or tv.ViT_B_16_Weights.IMAGENET1K_V1).transforms()
    name = f'vit_{_SIZES.get(host.hidden_dim)}_patch{conv.kernel_size[0]}_224'

    def tokens_and_logits(images: Tensor) -> list[Tensor]:
        with watch_blocks([[host.encoder]]) as records:  # since a new model has a head of zeros
            logits = host(images)
        return [records[0][0][-1], logits]
    return _build(
        host, name if timm.is_model(name) else 'vit_base_patch16_224', _renamed(host, {**names, **_TORCHVISION}),
        tokens_and_logits,
        dict(mean=tuple(preset.mean), std=tuple(preset.std), interpolation=preset.interpolation.value,
             crop_pct=preset.crop_size[0] / preset.resize_size[0]),
        img_size=host.image_size, num_heads=first.self_attention.num_heads,
        drop_rate=heads[0][1].p if len(heads) > 1 else 0., pos_drop_rate=host.encoder.dropout.p,
        proj_drop_rate=first.dropout.p, attn_drop_rate=first.self_attention.dropout)


@torch.enable_grad()
def from_open_clip(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as an open_clip model.

    It maps images [B, C, H, W] to what `encode_image` returns, [B, dim], not normalised; its head is the projection.
    The rest, also what is raised, is as with `from_torchvision`. `put_tower_` puts the tower, converted or not, back.

    Args:
        model: open_clip model (CLIP, CustomTextCLIP), or the VisionTransformer that is its `visual`. Of a TimmModel,
            such as SigLIP's, use `model.visual.trunk`.

    Examples:
        >>> tower = from_open_clip(clip)
        >>> embedding = tower(images)
    """
    host = unwrap_model(model)
    host = unwrap_model(getattr(host, 'visual', host))
    if type_of(host) != 'open_clip.transformer.VisionTransformer':
        raise unexpected('from_open_clip', host, "open_clip's own VisionTransformer, or a model with one. Of a "
                                                 'TimmModel, use model.visual.trunk as it is')
    if host.proj is None or host.attn_pool is not None or host.pool_type not in ('tok', 'avg'):
        raise _refusal(host, 'it must have a projection (proj), and pool by its class token or the average')
    first, cfg, average = host.transformer.resblocks[0], getattr(host, 'preprocess_cfg', {}), host.pool_type == 'avg'
    state = _renamed(host, {**_OPEN_CLIP, 'ln_post': 'fc_norm' if average and host.final_ln_after_pool else 'norm'})
    state['head.weight'] = state.pop('proj').T
    return _build(
        host, 'vit_base_patch16_clip_224', state,
        lambda images: [host(images)[0] if host.output_tokens else host(images)],
        dict(mean=tuple(cfg.get('mean') or OPENAI_CLIP_MEAN), std=tuple(cfg.get('std') or OPENAI_CLIP_STD),
             interpolation=cfg.get('interpolation') or 'bicubic', crop_pct=1.0,
             crop_mode={'squash': 'squash', 'longest': 'border'}.get(cfg.get('resize_mode', ''), 'center')),
        img_size=tuple(host.image_size), num_heads=first.attn.num_heads, global_pool='avg' if average else 'token',
        act_layer=_OPEN_CLIP_ACTS.get(str(first.mlp.gelu), 'gelu'),
        patch_drop_rate=getattr(host.patch_dropout, 'prob', 0.), attn_drop_rate=getattr(first.attn, 'dropout', 0.))


@torch.enable_grad()
def from_transformers(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as a CLIP or SigLIP of transformers.

    It maps images [B, C, S, S] to the embedding [B, dim], not normalised: with the projection where the model has one;
    else the pooled output. The rest is as with `from_open_clip`, but the preprocessing is assumed to be that of the
    original CLIP, with a crop of the centre, or SigLIP, with both sides resized.

    Args:
        model: CLIPModel, CLIPVisionModelWithProjection, CLIPVisionModel, SiglipModel or SiglipVisionModel, also of
            SigLIP 2.

    Examples:
        >>> tower = from_transformers(clip)
        >>> embedding = tower(images)
    """
    outer = unwrap_model(model)
    host = outer.vision_model if kind_of(outer) in HOLDERS else outer
    kind = kind_of(host)
    if kind not in _TOWERS:
        raise unexpected('from_transformers', host, 'CLIPModel, SiglipModel or the vision model of one')
    cfg, clip, projection = host.config, kind == 'CLIPVisionModel', getattr(outer, 'visual_projection', None)
    if not clip and not host.use_head:
        raise _refusal(host, 'it has no pooling head (vision_use_head=False)')
    state = _renamed(host, _TRANSFORMERS)
    if not clip:
        for key in ('weight', 'bias'):
            query, *others = state.pop(f'attn_pool.in_proj_{key}').chunk(3)
            state[f'attn_pool.q.{key}'], state[f'attn_pool.kv.{key}'] = query, torch.cat(others)
    for name in [name for name in state if '.q_proj.' in name]:
        three = [name.replace('.q_proj.', f'.{part}_proj.') for part in 'qkv']
        if all(other in state for other in three):  # otherwise timm has no place for those that are there
            state[name.replace('.q_proj.', '.qkv.')] = torch.cat([state.pop(other) for other in three])
    if projection is not None:
        state['head.weight'] = projection.weight
    mean, std = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD) if clip else (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD)

    def embedding(images: Tensor) -> list[Tensor]:
        pooled = host(images).pooler_output
        return [pooled if projection is None else projection(pooled)]
    return _build(
        host, _TOWERS[kind], state, embedding,
        dict(mean=mean, std=std, interpolation='bicubic', crop_pct=1.0,
             crop_mode='center' if clip else 'squash'),
        img_size=cfg.image_size, num_heads=cfg.num_attention_heads, global_pool='token' if clip else 'map',
        act_layer={'gelu_pytorch_tanh': 'gelu_tanh'}.get(cfg.hidden_act, cfg.hidden_act),
        attn_drop_rate=cfg.attention_dropout)


def kind_of(model: Any) -> str:
    return type(model).__name__ if type(model).__module__.startswith('transformers.models.') else ''


def type_of(model: Any) -> str:
    return f'{type(model).__module__}.{type(model).__qualname__}'


def unexpected(caller: str, host: Any, expected: str) -> TypeError:
    return TypeError(f'{caller} got a {type_of(host)}; expected {expected}.')


def _refusal(host: nn.Module, reason: str) -> ValueError:
    return ValueError(f"Cannot build a timm model from this {type(host).__module__.split('.')[0]} "
                      f'{type(host).__name__}: {reason}.')


def _renamed(host: nn.Module, names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors of a model, with parts of their names replaced, one after the other."""
    state = {}
    for name, tensor in host.state_dict(keep_vars=True).items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        state[name] = tensor
    return state


def _build(
        host: nn.Module, name: str, state: dict[str, Tensor], outputs: Callable[[Tensor], list[Tensor]],
        preprocessing: dict[str, Any], **args: Any,
) -> VisionTransformer:
    """The timm model `name` with copies of a host's weights, compared with it on a random image unless it is on meta.

    `outputs` maps images to the host's logits or embedding, maybe after its tokens. A bias that timm alone has is 0.
    """
    for key in {'cls_token', 'pos_embed'} & set(state):
        state[key] = state[key].reshape(1, -1, state[key].shape[-1])
    (width, channels, *patch), dtype = (stem := state['patch_embed.proj.weight']).shape, stem.dtype
    hidden = len(state.get('blocks.0.mlp.fc1.weight', ()))
    ratio, classes = hidden / width, len(state.get('head.weight', ()))
    if int(width * ratio) != hidden:  # timm truncates the product
        ratio = math.nextafter(ratio, math.inf)
    size = (channels, *to_2tuple(args['img_size']))
    args.update(
        patch_size=patch[0] if patch[0] == patch[1] else tuple(patch), in_chans=channels, num_classes=classes,
        embed_dim=width, depth=len({key.split('.')[1] for key in state if key.startswith('blocks.')}), mlp_ratio=ratio,
        pre_norm='norm_pre.weight' in state, fc_norm='fc_norm.weight' in state,
        init_values=1e-5 if 'blocks.0.ls1.gamma' in state else None)  # any number: the values are copied
    with on_meta():  # draws no random numbers
        model: Any = timm.create_model(name, **args, pretrained_cfg=dict(
            preprocessing, input_size=size, num_classes=classes, fixed_input_size=True,
            first_conv='patch_embed.proj', classifier='head'))
    for key in model.state_dict():
        weight = state.get(f'{key.removesuffix("bias")}weight')
        if key.endswith('.bias') and key not in state and weight is not None:
            state[key] = 0 * weight.reshape(len(weight), -1)[:, 0]
    try:
        model.load_state_dict({key: tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
                               for key, tensor in state.items()}, assign=True)
    except RuntimeError as e:
        raise _refusal(host, one_line(e).rstrip('.')) from e
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(state[key].requires_grad)
    eps = next((module.eps for module in host.modules() if isinstance(module, nn.LayerNorm)), 1e-6)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps
    model.train(host.training)
    like = next(model.parameters())
    if not like.is_meta:
        images = torch.randn(1, *size, generator=torch.Generator().manual_seed(0), device='cpu').to(like)
        with evaluating(host), evaluating(model), torch.no_grad():
            theirs = outputs(images)
            ours = [model.forward_features(images), model(images)][-len(theirs):]
        rounding = 1e-4 if torch.finfo(like.dtype).bits > 16 else 0.1  # of a dozen blocks
        if not all(a.shape == b.shape and (a.float() - b.float()).norm() <= rounding * b.float().norm()
                   for a, b in zip(ours, theirs, strict=True)):
            raise _refusal(host, "its output for a random image differs from timm's: one of its layers is not as usual")
    return model
