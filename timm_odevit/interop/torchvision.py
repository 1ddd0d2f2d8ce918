"""from_torchvision: a torchvision VisionTransformer as timm's."""
from typing import Any, Dict, Optional, Tuple

from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import nn
from torchvision import models as tv
from torchvision.models.vision_transformer import Encoder, EncoderBlock

from ..settings import checks_keywords
from .transplant import Transplant, mlp_ratio, nearest

__all__ = ['from_torchvision']

_WEIGHTS = (
    tv.ViT_B_16_Weights, tv.ViT_B_32_Weights, tv.ViT_L_16_Weights, tv.ViT_L_32_Weights, tv.ViT_H_14_Weights)

@checks_keywords
def from_torchvision(vit: nn.Module, *, weights: Optional[tv.WeightsEnum] = None) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same as a torchvision one.

    Logits agree up to rounding; in training, all dropouts have the same distributions. Device, dtype, mode and
    requires_grad carry over, for each module and parameter; a model on the meta device stays there. Parameters are
    copies: the torchvision model does not change. Hooks are not carried over.

    The result comes from `timm.create_model`, with the nearest registered name and every size as a keyword, so that
    `save_pretrained` can describe it. Only the eps of a norm has no such keyword: a value other than 1e-6 carries over,
    but `save_pretrained` refuses it.

    A model does not record its preprocessing: torchvision's IMAGENET1K_V1 weights need bilinear resizing and crops of
    7/8 (vit_l_16: 224/242), its SWAG weights bicubic resizing and crops of 1. Pass weights to put their preprocessing
    into the pretrained_cfg, where timm.data finds it. All of them use ImageNet's mean and standard deviation.

    Args:
        vit: torchvision VisionTransformer of any size; may be wrapped for compilation or distribution. Its heads are
            one linear layer, possibly after a dropout, or an identity. It maps images [B, C, S, S] to logits
            [B, classes].
        weights: The torchvision weights that were loaded, such as ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1, used
            only for their preprocessing; None stands for ViT_B_16_Weights.IMAGENET1K_V1.

    Returns:
        A new timm VisionTransformer.

    Raises:
        TypeError: The model is not a torchvision VisionTransformer, or weights are not those of one.
        ValueError: The model has a part that timm's VisionTransformer lacks, such as a convolutional stem, a pre-logits
            layer (representation_size) or an adapter; the message names it.
    """
    host: Any = unwrap_model(vit)
    parts = Transplant('torchvision VisionTransformer', host)
    _check(parts, host, weights)
    head_drop, head = _read_heads(parts, host)
    first, conv = host.encoder.layers[0], host.conv_proj
    classes = head.out_features if head is not None else 0
    parts.tensor('cls_token', host.class_token)
    parts.tensor('pos_embed', host.encoder.pos_embedding)
    for name, module in {
            '': host, 'patch_embed.proj': conv, 'pos_drop': host.encoder.dropout, 'blocks': host.encoder.layers,
            'norm': host.encoder.ln, 'head_drop': head_drop, 'head': head}.items():
        if module is not None:
            parts.module(name, module)
    for i, layer in enumerate(host.encoder.layers):
        _pair_block(parts, f'blocks.{i}', layer)
    return parts.build(
        nearest(host.hidden_dim, conv.kernel_size[0]),
        dict(num_classes=classes, **_preprocessing(host, weights)),
        img_size=host.image_size,
        patch_size=conv.kernel_size[0],
        in_chans=conv.in_channels,
        num_classes=classes,
        embed_dim=host.hidden_dim,
        depth=len(host.encoder.layers),
        num_heads=first.self_attention.num_heads,
        mlp_ratio=mlp_ratio(host.mlp_dim, host.hidden_dim),
        drop_rate=head_drop.p if head_drop is not None else 0.,
        pos_drop_rate=host.encoder.dropout.p,
        proj_drop_rate=first.dropout.p,
        attn_drop_rate=first.self_attention.dropout,
    )


def _check(parts: Transplant, host: Any, weights: Any) -> None:
    kind = type(host)
    # compare the class itself, since a subclass may compute anything; name it in full, since timm has a namesake
    if kind is not tv.VisionTransformer:
        raise TypeError(
            f'from_torchvision got a {kind.__module__}.{kind.__qualname__}: expected a torchvision VisionTransformer '
            '(no subclass), such as torchvision.models.vit_b_16(). A timm model can be used as it is.')
    if weights is not None and not isinstance(weights, _WEIGHTS):
        raise TypeError(
            f"weights must be None or a member of {', '.join(w.__name__ for w in _WEIGHTS)}, such as "
            f'torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1; got {weights!r}.')
    if type(host.conv_proj) is nn.Sequential:
        raise parts.refusal(
            f'it has a convolutional stem of {len(host.conv_proj)} modules. Only a single patch convolution is '
            'supported, which torchvision builds with conv_stem_configs=None')
    if type(host.conv_proj) is not nn.Conv2d:
        raise parts.refusal(f'its conv_proj is a {type(host.conv_proj).__name__}, not a Conv2d')
    if type(host.encoder) is not Encoder or len(host.encoder.layers) == 0:
        raise parts.refusal('its encoder is not an Encoder with at least one layer')
    for i, layer in enumerate(host.encoder.layers):
        if type(layer) is not EncoderBlock:
            raise parts.refusal(f'its encoder layer {i} is a {type(layer).__name__}, not an EncoderBlock')
        attention, mlp = layer.self_attention, layer.mlp
        if type(attention) is not nn.MultiheadAttention or attention.add_zero_attn or not attention.batch_first:
            raise parts.refusal(
                f'its encoder layer {i} has a {type(attention).__name__} unlike the MultiheadAttention that '
                'torchvision builds')
        if type(mlp).forward is not nn.Sequential.forward or len(mlp) != 5:
            raise parts.refusal(
                f'its encoder layer {i} has a {type(mlp).__name__} unlike the MLPBlock that torchvision builds')
        heads = host.encoder.layers[0].self_attention.num_heads
        if attention.num_heads != heads:
            raise parts.refusal(f'its encoder layer {i} has {attention.num_heads} heads, layer 0 has {heads}')


def _read_heads(parts: Transplant, host: Any) -> Tuple[Any, Any]:
    """Dropout and linear layer of the heads; None for one that is absent."""
    if hasattr(host.heads, 'pre_logits'):
        raise parts.refusal(
            f'it has a pre-logits layer (representation_size={host.representation_size}), which timm does not have. '
            'Set vit.heads = torch.nn.Identity() to convert everything but the heads')
    heads = list(host.heads) if type(host.heads) is nn.Sequential else [host.heads]
    heads = [m for m in heads if type(m) is not nn.Identity]
    kinds = [type(m) for m in heads]
    if kinds not in ([], [nn.Linear], [nn.Dropout, nn.Linear]):
        raise parts.refusal(
            f"its heads are {', '.join(k.__name__ for k in kinds)}. Supported: Linear; Dropout, Linear; Identity")
    head_drop, head = (None, None, *heads)[-2:]
    return head_drop, head


def _preprocessing(host: Any, weights: Any) -> Dict[str, Any]:
    preset = (tv.ViT_B_16_Weights.IMAGENET1K_V1 if weights is None else weights).transforms()
    return dict(
        input_size=(host.conv_proj.in_channels, host.image_size, host.image_size),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=preset.interpolation.value,
        crop_pct=preset.crop_size[0] / preset.resize_size[0],
    )


def _pair_block(parts: Transplant, name: str, layer: Any) -> None:
    attention = layer.self_attention
    # by position: older models have the names linear_1 and linear_2, newer ones 0 and 3
    fc1, act, drop1, fc2, drop2 = layer.mlp
    for key, module in {
            '': layer, '.norm1': layer.ln_1, '.attn': attention, '.attn.proj_drop': layer.dropout,
            '.attn.attn_drop': nn.Dropout(attention.dropout).train(attention.training), '.norm2': layer.ln_2,
            '.mlp': layer.mlp, '.mlp.fc1': fc1, '.mlp.act': act, '.mlp.drop1': drop1, '.mlp.fc2': fc2,
            '.mlp.drop2': drop2}.items():
        parts.module(f'{name}{key}', module)
    parts.attention(f'{name}.attn', attention)
