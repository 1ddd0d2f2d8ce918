"""timm's VisionTransformer from those of other libraries: torchvision, open_clip and transformers."""
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from timm.utils import unwrap_model
from torch import Tensor, nn
from torchvision import models as tv

from ..hooks import evaluating, on_meta, watch_blocks
from ..settings import one_line

__all__ = ['HOLDERS', 'from_open_clip', 'from_torchvision', 'from_transformers', 'kind_of', 'type_of']

# (width, patch size): what timm calls it; every size is passed as a keyword, so the name only has to be of the kind
_PLAIN = {(192, 16): 'tiny', (384, 16): 'small', (384, 32): 'small', (768, 16): 'base', (768, 32): 'base',
          (1024, 16): 'large', (1024, 32): 'large', (1280, 14): 'huge'}
# the names of tensors, theirs and timm's; torchvision before 0.14 has linear_1 and linear_2
_TORCHVISION = {
    'class_token': 'cls_token', 'encoder.pos_embedding': 'pos_embed', 'encoder.ln': 'norm',
    'conv_proj': 'patch_embed.proj', 'ln_1': 'norm1', 'ln_2': 'norm2', 'self_attention.in_proj_': 'attn.qkv.',
    'self_attention.out_proj': 'attn.proj', 'mlp.0': 'mlp.fc1', 'mlp.3': 'mlp.fc2', 'mlp.linear_': 'mlp.fc'}
_TRANSFORMERS = {
    'embeddings.class_embedding': 'cls_token', 'embeddings.patch_embedding': 'patch_embed.proj',
    'embeddings.position_embedding.weight': 'pos_embed', 'pre_layrnorm': 'norm_pre', 'post_layernorm': 'norm',
    'encoder.layers.': 'blocks.', 'layer_norm': 'norm', 'self_attn.out_proj': 'attn.proj', 'self_attn.': 'attn.',
    'head.probe': 'attn_pool.latent', 'head.attention.out_proj': 'attn_pool.proj', 'head.attention.': 'attn_pool.',
    'head.layernorm': 'attn_pool.norm', 'head.mlp.': 'attn_pool.mlp.'}
_OPEN_CLIP_ACTS = {"GELU(approximate='tanh')": 'gelu_tanh', 'QuickGELU()': 'quick_gelu'}
# classes of transformers, by name, because transformers is optional: those that hold a tower, and the towers
HOLDERS = ('CLIPModel', 'CLIPVisionModelWithProjection', 'SiglipModel')
_TOWERS = {'CLIPVisionModel': 'vit_base_patch16_clip_224', 'SiglipVisionModel': 'vit_base_patch16_siglip_224'}


@torch.enable_grad()
def from_torchvision(vit: nn.Module, *, weights: tv.WeightsEnum | None = None) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same as a torchvision one.

    Logits agree up to rounding, which is checked on a random image; dropouts have the rates of the first layer. Device,
    dtype, mode and requires_grad carry over; parameters are copies. `save_pretrained` refuses an eps other than 1e-6.

    Args:
        vit: torchvision VisionTransformer, from images [B, C, S, S] to logits [B, classes].
        weights: The torchvision weights that were loaded, whose preprocessing goes into the pretrained_cfg; None stands
            for ViT_B_16_Weights.IMAGENET1K_V1.

    Raises TypeError for anything else, and ValueError for a part that timm's VisionTransformer lacks, such as a
    convolutional stem, a pre-logits layer (representation_size) or an adapter.

    Examples:
        >>> import torchvision
        >>> vit = from_torchvision(torchvision.models.vit_b_16())
        >>> done = convert_(vit)
    """
    host: Any = unwrap_model(vit)
    if type(host) is not tv.VisionTransformer:  # a subclass may compute anything; timm has a namesake
        raise _unexpected('from_torchvision', host, "torchvision's VisionTransformer, no subclass")
    conv, layers, width = host.conv_proj, dict(host.encoder.layers.named_children()), host.hidden_dim
    heads = [(name, module) for name, module in host.heads.named_modules(prefix='heads')
             if not isinstance(module, (nn.Sequential, nn.Identity))]
    parts = [type(module).__name__ for module in (conv, *(module for _, module in heads))]
    if parts not in (['Conv2d'], ['Conv2d', 'Linear'], ['Conv2d', 'Dropout', 'Linear']):
        raise _refusal(host, f"its stem and heads are {', '.join(parts)}; supported: Conv2d and nothing, Linear or "
                             'Dropout, Linear. Set vit.heads = torch.nn.Identity() to build the rest')
    names = {f'encoder.layers.{name}.': f'blocks.{i}.' for i, name in enumerate(layers)}
    if heads:
        names[heads[-1][0]] = 'head'
    classes, first = heads[-1][1].out_features if heads else 0, next(iter(layers.values()))
    preset = (weights or tv.ViT_B_16_Weights.IMAGENET1K_V1).transforms()
    nearest = min(_PLAIN, key=lambda size: (abs(math.log(size[0] / width)), abs(size[1] - conv.kernel_size[0])))

    def tokens_and_logits(images: Tensor) -> list[Tensor]:
        with watch_blocks([[host.encoder]]) as records:  # since a new model has a head of zeros
            logits = host(images)
        return [records[0][0][-1], logits]
    return _build(
        host, f'vit_{_PLAIN[nearest]}_patch{nearest[1]}_224', _renamed(host, {**names, **_TORCHVISION}),
        tokens_and_logits,
        dict(mean=tuple(preset.mean), std=tuple(preset.std), interpolation=preset.interpolation.value,
             crop_pct=preset.crop_size[0] / preset.resize_size[0]),
        img_size=host.image_size, patch_size=conv.kernel_size[0], in_chans=conv.in_channels, num_classes=classes,
        embed_dim=width, depth=len(layers), num_heads=first.self_attention.num_heads, mlp_hidden=host.mlp_dim,
        drop_rate=heads[0][1].p if len(heads) > 1 else 0., pos_drop_rate=host.encoder.dropout.p,
        proj_drop_rate=first.dropout.p, attn_drop_rate=first.self_attention.dropout)


@torch.enable_grad()
def from_open_clip(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as an open_clip model.

    It maps images [B, C, H, W] to what `encode_image` returns, [B, dim], not normalised; its head is the projection.
    The rest is as with `from_torchvision`; the recorded preprocessing carries over, too. `put_tower_` puts the tower,
    converted or not, back.

    Args:
        model: open_clip model (CLIP, CustomTextCLIP), or the VisionTransformer that is its `visual`. A tower that is
            timm's already (a TimmModel, such as SigLIP's) needs none of this: use `model.visual.trunk`.

    Raises TypeError for anything else, and ValueError for a part that timm's VisionTransformer lacks, such as
    attentional pooling or normalised queries.

    Examples:
        >>> tower = from_open_clip(clip)
        >>> embedding = tower(images)
    """
    host: Any = unwrap_model(model)
    host = unwrap_model(getattr(host, 'visual', host))
    if type_of(host) != 'open_clip.transformer.VisionTransformer':
        raise _unexpected('from_open_clip', host, "open_clip's own VisionTransformer, or a model with one. A TimmModel "
                                                  'needs no conversion: use model.visual.trunk as it is')
    if host.proj is None or host.attn_pool is not None or host.pool_type not in ('tok', 'avg'):
        raise _refusal(host, 'it must have a projection (proj), and pool by its class token or the average of patches')
    first, width, cfg = host.transformer.resblocks[0], host.transformer.width, getattr(host, 'preprocess_cfg', {})
    pooling = 'avg' if host.pool_type == 'avg' else 'token'
    after_pool = pooling == 'avg' and host.final_ln_after_pool
    state = _renamed(host, {'ls_1': 'ls1', 'ls_2': 'ls2', **({'ln_post': 'fc_norm'} if after_pool else {})})
    return _build(
        host, 'vit_base_patch16_clip_224', {f'visual.{name}': tensor for name, tensor in state.items()},
        lambda images: [host(images)[0] if host.output_tokens else host(images)],
        dict(mean=tuple(cfg.get('mean') or OPENAI_CLIP_MEAN), std=tuple(cfg.get('std') or OPENAI_CLIP_STD),
             interpolation=cfg.get('interpolation') or 'bicubic', crop_pct=1.0,
             crop_mode={'squash': 'squash', 'longest': 'border'}.get(cfg.get('resize_mode', ''), 'center')),
        img_size=tuple(host.image_size), patch_size=tuple(host.patch_size), in_chans=host.conv1.in_channels,
        num_classes=host.proj.shape[1], embed_dim=width, depth=len(host.transformer.resblocks),
        num_heads=first.attn.num_heads, mlp_hidden=first.mlp.c_fc.out_features, global_pool=pooling,
        fc_norm=after_pool, pre_norm=not isinstance(host.ln_pre, nn.Identity),
        act_layer=_OPEN_CLIP_ACTS.get(str(first.mlp.gelu), 'gelu'),
        init_values=None if isinstance(first.ls_1, nn.Identity) else 1e-5,  # any number; the values are copied
        patch_drop_rate=getattr(host.patch_dropout, 'prob', 0.), attn_drop_rate=getattr(first.attn, 'dropout', 0.))


@torch.enable_grad()
def from_transformers(model: nn.Module) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same image embedding as a CLIP or SigLIP of transformers.

    It maps images [B, C, S, S] to the embedding [B, dim], not normalised: with the projection where the model has one;
    else the pooled output. The rest is as with `from_torchvision`. `put_tower_` puts the tower, converted or not, back.
    The preprocessing, which a model does not record, is assumed: CLIP's mean and standard deviation and a crop of the
    centre for CLIP; 0.5 and both sides resized for SigLIP.

    Args:
        model: CLIPModel, CLIPVisionModelWithProjection, CLIPVisionModel, SiglipModel or SiglipVisionModel (also of
            SigLIP 2 with a fixed image size).

    Raises TypeError for anything else, and ValueError for a part that timm's VisionTransformer lacks.

    Examples:
        >>> tower = from_transformers(clip)
        >>> embedding = tower(images)
    """
    outer: Any = unwrap_model(model)
    host = outer.vision_model if kind_of(outer) in HOLDERS else outer
    kind = kind_of(host)
    if kind not in _TOWERS:
        raise _unexpected('from_transformers', host, 'CLIPModel, SiglipModel or the vision model of one')
    cfg, clip, projection = host.config, kind == 'CLIPVisionModel', getattr(outer, 'visual_projection', None)
    if not clip and not host.use_head:
        raise _refusal(host, 'it has no pooling head (vision_use_head=False), so it has no embedding')
    state = _renamed(host, _TRANSFORMERS)
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
    return _build(
        host, _TOWERS[kind], state, embedding,
        dict(mean=tuple(mean), std=tuple(std), interpolation='bicubic', crop_pct=1.0,
             crop_mode='center' if clip else 'squash'),
        img_size=cfg.image_size, patch_size=cfg.patch_size, in_chans=cfg.num_channels, num_classes=classes,
        embed_dim=cfg.hidden_size, depth=cfg.num_hidden_layers, num_heads=cfg.num_attention_heads,
        mlp_hidden=cfg.intermediate_size, global_pool='token' if clip else 'map',
        act_layer={'gelu_pytorch_tanh': 'gelu_tanh'}.get(cfg.hidden_act, cfg.hidden_act),
        attn_drop_rate=cfg.attention_dropout)


def kind_of(model: Any) -> str:
    """The name of a class of transformers; '' for any other."""
    return type(model).__name__ if type(model).__module__.startswith('transformers.models.') else ''


def type_of(model: Any) -> str:
    """A model's class with its module."""
    return f'{type(model).__module__}.{type(model).__qualname__}'


def _unexpected(caller: str, host: Any, expected: str) -> TypeError:
    return TypeError(f'{caller} got a {type_of(host)}; expected {expected}.')


def _refusal(host: nn.Module, reason: str) -> ValueError:
    return ValueError(f"Cannot build a timm model from this {type(host).__module__.split('.')[0]} "
                      f'{type(host).__name__}: {reason}.')


def _renamed(host: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a model, with some parts of their names replaced, one after the other."""
    state = {}
    for name, tensor in host.state_dict(keep_vars=True).items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        state[name] = tensor
    return state


def _build(
        host: nn.Module,
        name: str,
        state: Mapping[str, Tensor],
        outputs: Callable[[Tensor], Sequence[Tensor]],
        preprocessing: Mapping[str, Any],
        *,
        mlp_hidden: int,
        **args: Any,
) -> VisionTransformer:
    """The timm model `name` with copies of a host's weights, compared with it on a random image unless it is on meta.

    `outputs` maps images to the host's logits or embedding, maybe after its tokens. A bias that timm alone has is 0.
    """
    size, ratio = (args['in_chans'], *to_2tuple(args['img_size'])), mlp_hidden / args['embed_dim']
    if int(args['embed_dim'] * ratio) != mlp_hidden:  # timm truncates the product
        ratio = math.nextafter(ratio, math.inf)
    with on_meta():  # timm's random initialisation takes no time there and draws no random numbers
        model: Any = timm.create_model(name, mlp_ratio=ratio, **args, pretrained_cfg=dict(
            preprocessing, input_size=size, num_classes=args['num_classes'], fixed_input_size=True,
            first_conv='patch_embed.proj', classifier='head'))
    made = {'head.bias', 'patch_embed.proj.bias'} - set(state)  # which timm makes in float32, without a gradient
    state = {key: tensor for key, tensor in checkpoint_filter_fn(dict(state), model).items() if key not in made}
    for key in model.state_dict():
        weight = state.get(f'{key.removesuffix("bias")}weight')
        if key.endswith('.bias') and key not in state and weight is not None:
            state[key] = 0 * weight.reshape(len(weight), -1)[:, 0]
    try:
        model.load_state_dict({key: tensor.detach().clone(memory_format=torch.contiguous_format)
                               for key, tensor in state.items()}, assign=True)
    except RuntimeError as e:
        raise _refusal(host, one_line(e).rstrip('.')) from e
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(state[key].requires_grad)
    eps = [module.eps for module in host.modules() if isinstance(module, nn.LayerNorm)]
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) and eps:
            module.eps = eps[0]
    model.train(host.training)
    like = next(model.parameters())
    if not like.is_meta:
        images = torch.randn(1, *size, generator=torch.Generator().manual_seed(0)).to(like)
        with evaluating(host), evaluating(model), torch.no_grad():
            theirs = outputs(images)
            ours = [model.forward_features(images), model(images)][-len(theirs):]
        rounding = 1e-4 if torch.finfo(like.dtype).bits > 16 else 0.1  # of a dozen blocks
        if not all(a.shape == b.shape and (a.float() - b.float()).norm() <= rounding * b.float().norm()
                   for a, b in zip(ours, theirs, strict=True)):
            raise _refusal(host, "its output for a random image differs from timm's: one of its layers is not as "
                                 'usual, such as the activation, the attention or the pooling')
    return model
