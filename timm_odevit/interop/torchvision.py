"""from_torchvision: a torchvision VisionTransformer as timm's."""
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import Tensor, nn
from torchvision import models as tv

from ..hooks import hooked
from .build_vit import build_vit, mlp_ratio, nearest, refusal, renamed

__all__ = ['from_torchvision']

_WEIGHTS = (
    tv.ViT_B_16_Weights, tv.ViT_B_32_Weights, tv.ViT_L_16_Weights, tv.ViT_L_32_Weights, tv.ViT_H_14_Weights)
_NAMES = {'class_token': 'cls_token', 'encoder.pos_embedding': 'pos_embed', 'encoder.ln': 'norm',
          'conv_proj': 'patch_embed.proj'}
# of a layer; older models have the names linear_1 and linear_2
_NAMES_IN_LAYER = {'ln_1': 'norm1', 'ln_2': 'norm2', 'self_attention.in_proj_': 'attn.qkv.',
                   'self_attention.out_proj': 'attn.proj', 'mlp.0': 'mlp.fc1', 'mlp.3': 'mlp.fc2',
                   'mlp.linear_': 'mlp.fc'}


@torch.enable_grad()
def from_torchvision(vit: nn.Module, *, weights: tv.WeightsEnum | None = None) -> VisionTransformer:
    """Build a timm VisionTransformer that computes the same as a torchvision one.

    Logits agree up to rounding, which is checked on a random image; dropouts have the same rates, those of the first
    layer. Device, dtype, mode and requires_grad carry over; a model on the meta device stays there. Parameters are
    copies: the torchvision model does not change. Hooks are not carried over.

    The result comes from `timm.create_model`, with the nearest registered name and every size as a keyword, so that
    `save_pretrained` can describe it. Only the eps of its norms has no such keyword: a value other than 1e-6 carries
    over, but `save_pretrained` refuses it.

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
            layer (representation_size) or an adapter.

    Examples:
        >>> import torchvision
        >>> vit = from_torchvision(torchvision.models.vit_b_16())
        >>> done = convert_(vit)
    """
    host: Any = unwrap_model(vit)
    kind = type(host)
    if kind is not tv.VisionTransformer:  # a subclass may compute anything; timm has a namesake
        raise TypeError(
            f'from_torchvision got a {kind.__module__}.{kind.__qualname__}: expected a torchvision VisionTransformer '
            '(no subclass), such as torchvision.models.vit_b_16(). A timm model can be used as it is.')
    if weights is not None and not isinstance(weights, _WEIGHTS):
        raise TypeError(
            f"weights must be None or a member of {', '.join(w.__name__ for w in _WEIGHTS)}, such as "
            f'torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1; got {weights!r}.')
    conv, layers = host.conv_proj, list(host.encoder.layers)
    if type(conv) is not nn.Conv2d:
        raise refusal(host, f'its conv_proj is a {type(conv).__name__}; only a single patch convolution is supported, '
                            'which torchvision builds with conv_stem_configs=None')
    if not layers or type(layers[0]) is not tv.vision_transformer.EncoderBlock:
        raise refusal(host, 'its encoder does not start with an EncoderBlock')
    heads = [(name, module) for name, module in host.heads.named_modules(prefix='heads')
             if not isinstance(module, (nn.Sequential, nn.Identity))]
    if [type(module) for _, module in heads] not in ([], [nn.Linear], [nn.Dropout, nn.Linear]):
        raise refusal(host, f"its heads are {', '.join(type(module).__name__ for _, module in heads)}; supported: "
                            'Linear; Dropout, Linear; Identity. Set vit.heads = torch.nn.Identity() to build the rest')
    state = renamed({name: tensor for name, tensor in host.state_dict(keep_vars=True).items()
                     if not name.startswith('encoder.layers.')},
                    {**_NAMES, **({heads[-1][0]: 'head'} if heads else {})})
    for i, layer in enumerate(layers):
        named = {f'blocks.{i}.{name}': tensor for name, tensor in layer.state_dict(keep_vars=True).items()}
        state.update(renamed(named, _NAMES_IN_LAYER))
    classes, attention = heads[-1][1].out_features if heads else 0, layers[0].self_attention
    preset = (tv.ViT_B_16_Weights.IMAGENET1K_V1 if weights is None else weights).transforms()
    return build_vit(
        host, nearest(host.hidden_dim, conv.kernel_size[0]), state, lambda images: _tokens_and_logits(host, images),
        dict(num_classes=classes, input_size=(conv.in_channels, host.image_size, host.image_size),
             mean=tuple(preset.mean), std=tuple(preset.std), interpolation=preset.interpolation.value,
             crop_pct=preset.crop_size[0] / preset.resize_size[0]),
        img_size=host.image_size, patch_size=conv.kernel_size[0], in_chans=conv.in_channels, num_classes=classes,
        embed_dim=host.hidden_dim, depth=len(layers), num_heads=attention.num_heads,
        mlp_ratio=mlp_ratio(host.mlp_dim, host.hidden_dim), drop_rate=heads[0][1].p if len(heads) > 1 else 0.,
        pos_drop_rate=host.encoder.dropout.p, proj_drop_rate=layers[0].dropout.p, attn_drop_rate=attention.dropout)


def _tokens_and_logits(host: Any, images: Tensor) -> list[Tensor]:
    tokens: list[Tensor] = []  # since a new model has a head of zeros

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        tokens.append(output)
    with hooked((host.encoder, 'after', keep)):
        logits = host(images)
    return [*tokens, logits]
