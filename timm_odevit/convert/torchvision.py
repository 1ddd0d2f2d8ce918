"""Models from other libraries: a torchvision VisionTransformer as a timm one."""
import copy
import math
from typing import Any, Dict, Optional, Tuple

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchvision import models as tv
from torchvision.models.vision_transformer import Encoder, EncoderBlock

from ..hooks import on_meta
from ..settings import checks_keywords

__all__ = ['from_torchvision']

# (width, patch size) -> timm name; every size is passed as a keyword, so the name only has to be of the same kind
_NAMES = {
    (192, 16): 'vit_tiny_patch16_224',
    (384, 16): 'vit_small_patch16_224',
    (384, 32): 'vit_small_patch32_224',
    (768, 16): 'vit_base_patch16_224',
    (768, 32): 'vit_base_patch32_224',
    (1024, 16): 'vit_large_patch16_224',
    (1024, 32): 'vit_large_patch32_224',
    (1280, 14): 'vit_huge_patch14_224',
}
_WEIGHTS = (
    tv.ViT_B_16_Weights, tv.ViT_B_32_Weights, tv.ViT_L_16_Weights, tv.ViT_L_32_Weights, tv.ViT_H_14_Weights)
# what timm records about its own weights, which does not apply to these
_NO_SOURCE = dict(
    url='', file=None, hf_hub_id=None, hf_hub_filename=None, source=None, tag=None, custom_load=False, label_names=None,
    label_descriptions=None, license=None, description=None, origin_url=None, paper_name=None, paper_ids=None,
    notes=None)


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
    _check(host, weights)
    head_drop, head = _read_heads(host)
    first, conv = host.encoder.layers[0], host.conv_proj
    args = dict(
        img_size=host.image_size,
        patch_size=conv.kernel_size[0],
        in_chans=conv.in_channels,
        num_classes=head.out_features if head is not None else 0,
        embed_dim=host.hidden_dim,
        depth=len(host.encoder.layers),
        num_heads=first.self_attention.num_heads,
        mlp_ratio=_ratio(host.mlp_dim, host.hidden_dim),
        drop_rate=head_drop.p if head_drop is not None else 0.,
        pos_drop_rate=host.encoder.dropout.p,
        proj_drop_rate=first.dropout.p,
        attn_drop_rate=first.self_attention.dropout,
    )
    name = _nearest(host.hidden_dim, args['patch_size'])
    overlay = dict(_NO_SOURCE, num_classes=args['num_classes'], **_preprocessing(host, weights))
    # on the meta device timm's random initialisation takes no time and draws no random numbers
    with on_meta():
        model: Any = timm.create_model(name, pretrained_cfg_overlay=overlay, **args)

    modules = _pair(host)
    modules.update({key: m for key, m in (('head_drop', head_drop), ('head', head)) if m is not None})
    model.train(host.training)  # then module by module, as a frozen part may be in eval mode
    for name, theirs in modules.items():
        _carry_settings(name, model.get_submodule(name), theirs)
    pairs = {'cls_token': host.class_token, 'pos_embed': host.encoder.pos_embedding}
    for name, theirs in modules.items():
        if next(theirs.children(), None) is None:
            pairs.update({f'{name}.{key}': p for key, p in theirs.named_parameters(recurse=False)})
    _copy_parameters(model, host, pairs)
    return model


def _check(host: Any, weights: Any) -> None:
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
        raise _refusal(
            f'it has a convolutional stem of {len(host.conv_proj)} modules. Only a single patch convolution is '
            'supported, which torchvision builds with conv_stem_configs=None')
    if type(host.conv_proj) is not nn.Conv2d:
        raise _refusal(f'its conv_proj is a {type(host.conv_proj).__name__}, not a Conv2d')
    if type(host.encoder) is not Encoder or len(host.encoder.layers) == 0:
        raise _refusal('its encoder is not an Encoder with at least one layer')
    for i, layer in enumerate(host.encoder.layers):
        if type(layer) is not EncoderBlock:
            raise _refusal(f'its encoder layer {i} is a {type(layer).__name__}, not an EncoderBlock')
        attention, mlp = layer.self_attention, layer.mlp
        if type(attention) is not nn.MultiheadAttention or attention.add_zero_attn or not attention.batch_first:
            raise _refusal(
                f'its encoder layer {i} has a {type(attention).__name__} unlike the MultiheadAttention that '
                'torchvision builds')
        if type(mlp).forward is not nn.Sequential.forward or len(mlp) != 5:
            raise _refusal(
                f'its encoder layer {i} has a {type(mlp).__name__} unlike the MLPBlock that torchvision builds')
        heads = host.encoder.layers[0].self_attention.num_heads
        if attention.num_heads != heads:
            raise _refusal(f'its encoder layer {i} has {attention.num_heads} heads, layer 0 has {heads}')


def _read_heads(host: Any) -> Tuple[Any, Any]:
    """Dropout and linear layer of the heads; None for one that is absent."""
    if hasattr(host.heads, 'pre_logits'):
        raise _refusal(
            f'it has a pre-logits layer (representation_size={host.representation_size}), which timm does not have. '
            'Set vit.heads = torch.nn.Identity() to convert everything but the heads')
    heads = list(host.heads) if type(host.heads) is nn.Sequential else [host.heads]
    heads = [m for m in heads if type(m) is not nn.Identity]
    kinds = [type(m) for m in heads]
    if kinds not in ([], [nn.Linear], [nn.Dropout, nn.Linear]):
        raise _refusal(
            f"its heads are {', '.join(k.__name__ for k in kinds)}. Supported: Linear; Dropout, Linear; Identity")
    head_drop, head = (None, None, *heads)[-2:]
    return head_drop, head


def _nearest(width: int, patch_size: int) -> str:
    return _NAMES[min(_NAMES, key=lambda size: (abs(math.log(size[0] / width)), abs(size[1] - patch_size)))]


def _ratio(hidden: int, width: int) -> float:
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)  # timm truncates the product


def _preprocessing(host: Any, weights: Any) -> Dict[str, Any]:
    preset = (tv.ViT_B_16_Weights.IMAGENET1K_V1 if weights is None else weights).transforms()
    return dict(
        input_size=(host.conv_proj.in_channels, host.image_size, host.image_size),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=preset.interpolation.value,
        crop_pct=preset.crop_size[0] / preset.resize_size[0],
    )


def _pair(host: Any) -> Dict[str, nn.Module]:
    """The torchvision module for each timm name, except the heads."""
    pairs = {
        '': host,
        'patch_embed.proj': host.conv_proj,
        'pos_drop': host.encoder.dropout,
        'blocks': host.encoder.layers,
        'norm': host.encoder.ln,
    }
    for i, layer in enumerate(host.encoder.layers):
        attention = layer.self_attention
        # torchvision's attention is one module where timm has two: these stand in and hold its parameters
        qkv = nn.Linear(host.hidden_dim, 3 * host.hidden_dim, device='meta')
        qkv.weight, qkv.bias = attention.in_proj_weight, attention.in_proj_bias
        attn_drop = nn.Dropout(attention.dropout)
        # by position: older models have the names linear_1 and linear_2, newer ones 0 and 3
        fc1, act, drop1, fc2, drop2 = layer.mlp
        block = {
            '': layer,
            '.norm1': layer.ln_1,
            '.attn': attention,
            '.attn.qkv': qkv.train(attention.training),
            '.attn.attn_drop': attn_drop.train(attention.training),
            '.attn.proj': attention.out_proj,
            '.attn.proj_drop': layer.dropout,
            '.norm2': layer.ln_2,
            '.mlp': layer.mlp,
            '.mlp.fc1': fc1,
            '.mlp.act': act,
            '.mlp.drop1': drop1,
            '.mlp.fc2': fc2,
            '.mlp.drop2': drop2,
        }
        pairs.update({f'blocks.{i}{name}': module for name, module in block.items()})
    return pairs


def _carry_settings(name: str, ours: Any, theirs: Any) -> None:
    ours.training = theirs.training
    if next(ours.children(), None) is not None:
        return
    for key in ('p', 'eps'):  # rate of a dropout, eps of a norm
        if hasattr(ours, key) and hasattr(theirs, key):
            setattr(ours, key, getattr(theirs, key))
    kind = nn.Linear if type(theirs) is NonDynamicallyQuantizableLinear else type(theirs)
    if not isinstance(ours, kind) or ours.extra_repr() != theirs.extra_repr():
        raise _refusal(
            f'in place of {name}, which is {type(ours).__name__}({ours.extra_repr()}) in timm, it has '
            f'{type(theirs).__name__}({theirs.extra_repr()})')


def _copy_parameters(model: nn.Module, host: nn.Module, pairs: Dict[str, torch.Tensor]) -> None:
    placed = {id(tensor) for tensor in pairs.values()}
    for name, tensor in [*host.named_parameters(), *host.named_buffers()]:
        if id(tensor) not in placed:
            raise _refusal(f'timm has no place for {name}')
    ours = dict(model.named_parameters())
    for name in [*ours, *pairs]:
        a, b = (list(tensors[name].shape) if name in tensors else 'nothing' for tensors in (pairs, ours))
        if a != b:
            raise _refusal(f'in place of {name}, which is {b} in timm, it has {a}')
    copies: Dict[int, Any] = {}  # a parameter in two places stays one
    for name, tensor in pairs.items():
        owner, _, key = name.rpartition('.')
        setattr(model.get_submodule(owner), key, copy.deepcopy(tensor, copies))


def _refusal(reason: str) -> ValueError:
    return ValueError(f'Cannot build a timm model from this torchvision VisionTransformer: {reason}.')
