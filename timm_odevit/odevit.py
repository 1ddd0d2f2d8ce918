"""The `odevit_*` models in timm's registry: data, and one way to build them all."""
from dataclasses import replace
from functools import cache, partial
from typing import Any, Dict, Optional

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import DropPath
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from .config import PREFIX, OdeConfig
from .convert import check_convertible, convert_

__all__ = ['default_cfgs']  # register_model adds the entry points


def _cfg(**kwargs: Any) -> Dict[str, Any]:
    return dict(
        input_size=(3, 224, 224), num_classes=1000, pool_size=None, crop_pct=0.9, interpolation='bicubic',
        fixed_input_size=True, mean=IMAGENET_INCEPTION_MEAN, std=IMAGENET_INCEPTION_STD,
        first_conv='patch_embed.proj', classifier='head', license='apache-2.0', paper_ids='arXiv:2511.16501',
        paper_name='ODE-ViT', **kwargs)


# name: (the base that lends width, stem and head; arguments of the base beside its own)
_MODELS: Dict[str, Any] = {
    'odevit_tiny': ('vit_tiny_patch16_224', dict(depth=12)),
    'odevit_tiny_patch4_32': ('vit_tiny_patch16_224', dict(depth=12, patch_size=4, img_size=32)),
    'odevit_small': ('vit_small_patch16_224', dict(depth=12)),
    'odevit_base': ('vit_base_patch16_224', dict(depth=12)),
    'odevit_large': ('vit_large_patch16_224', dict(depth=24)),
    'odevit_small_patch14_reg4': ('vit_small_patch14_reg4_dinov2', dict(depth=12, img_size=224)),
    'odevit_base_patch14_reg4': ('vit_base_patch14_reg4_dinov2', dict(depth=12, img_size=224)),
    'odevit_large_patch14_reg4': ('vit_large_patch14_reg4_dinov2', dict(depth=24, img_size=224)),
}
_PAPER = {'ode_field': 'lipschitz', 'ode_method': 'euler', 'ode_init': 'spectral'}

default_cfgs = generate_default_cfgs({
    name: {**_cfg(), **({'input_size': (3, 32, 32), 'crop_pct': 1.0} if name.endswith('_32') else {}),
           **({'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD} if name.endswith('_reg4') else {})}
    for name in (*_MODELS, 'odevit_converted')
})


def _entry(name: str, base: str, base_args: Dict[str, Any]):
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        model_args = {**_PAPER, **base_args, **kwargs}
        return _create_odevit(name, base, pretrained, **model_args)
    create.__name__ = create.__qualname__ = name
    create.__doc__ = f'ODE-ViT (arXiv 2511.16501) with width, stem and head of {base}; takes its keywords and ode_*.'
    return create


for _name, (_base, _base_args) in _MODELS.items():
    globals()[_name] = register_model(_entry(_name, _base, _base_args))


@register_model
def odevit_converted(
        pretrained: bool = False,
        base: str = 'vit_tiny_patch16_224',
        base_args: Optional[Dict[str, Any]] = None,
        **kwargs: Any,
) -> nn.Module:
    """Any converted model, as `save_pretrained` writes it.

    Args:
        pretrained: Load weights; a folder or a Hub repo supplies them.
        base: timm name of the base model.
        base_args: Keywords of the base model.
        **kwargs: More keywords of the base model, and the `ode_*` keywords of OdeConfig.
    """
    source = timm.get_pretrained_cfg(base)
    if source is None or base.startswith('odevit_'):
        raise ValueError(
            f"Unknown base '{base}'. Give the timm name of the model that was converted, see timm.list_models().")
    if not kwargs.get('pretrained_cfg'):
        # preprocessing is the base's, unless the caller or a saved config says otherwise
        keys = ('input_size', 'fixed_input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'first_conv',
                'classifier')
        overlay = {key: getattr(source, key) for key in keys if getattr(source, key) is not None}
        kwargs['pretrained_cfg_overlay'] = {**overlay, **(kwargs.get('pretrained_cfg_overlay') or {})}
    return _create_odevit('odevit_converted', base, pretrained, named=False, **{**(base_args or {}), **kwargs})


def _create_odevit(variant: str, base: str, pretrained: bool, named: bool = True, **kwargs: Any) -> nn.Module:
    config = OdeConfig.from_args({k: kwargs.pop(k) for k in list(kwargs) if k.startswith(PREFIX)}, variant)
    return build_model_with_cfg(
        partial(_build, base, config, named),
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop('out_indices', min(3, config.steps or 3)), feature_cls='getter'),
        **kwargs,
    )


def _build(
        base: str,
        config: OdeConfig,
        named: bool,
        depth: Optional[int] = None,
        drop_path_rate: float = 0.,
        **kwargs: Any,
) -> nn.Module:
    config = config.resolve(_depth(base) if depth is None else depth)
    model: Any = timm.create_model(base, depth=1, **kwargs)  # one block is all that an ODE-ViT needs of its base
    if drop_path_rate > 0.:
        rate = drop_path_rate / 2  # the mean of timm's linear schedule over depth, as converting a full base gives
        model.blocks[0].drop_path1, model.blocks[0].drop_path2 = DropPath(rate), DropPath(rate)
    first = replace(config, init='mean') if config.init.startswith('block:') else config  # it is the only one
    convert_(model, first, keep_original=False)
    model.blocks.config = config
    args = {k: v for k, v in kwargs.items() if k not in ('device', 'dtype')}
    model._model_args = {**({} if named else {'base': base}), **args, **config.to_args()}
    return model


@cache
def _depth(base: str) -> int:
    with torch.device('meta'):
        model: Any = timm.create_model(base)
    check_convertible(model)
    return len(model.blocks)
