"""The `odevit_*` models in timm's registry: a table of them, and the functions that build them."""
import copy
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models.naflexvit import NaFlexVit
from torch import nn

from .convert.block_kinds import find_stages, kinds
from .convert.conversion import convert_
from .convert.initialisation import set_per_layer
from .convert.planning import check_convertible
from .features import FeaturesAtTimes, check_times
from .hooks import on_meta
from .ode.config import PREFIX, OdeConfig
from .ode.time_dependence import RESIDUALS
from .saving.loading import CONFIG, WEIGHTS, check_args, check_size, saved_in, weights_file
from .settings import one_line

__all__ = ['default_cfgs']  # register_model adds the entry points


def _cfg(base: str, base_args: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model with this base and these arguments of it: normalised as the base's images are."""
    cfg: Any = timm.get_pretrained_cfg(base)
    img_size = base_args.get('img_size', 224)
    return dict(
        input_size=(3, img_size, img_size), num_classes=1000, pool_size=None, crop_pct=0.9 if img_size == 224 else 1.0,
        interpolation='bicubic', fixed_input_size=True, mean=cfg.mean, std=cfg.std, first_conv='patch_embed.proj',
        classifier='head', license='apache-2.0', paper_ids='arXiv:2511.16501', paper_name='ODE-ViT')


_PAPER = {'ode_field': 'lipschitz', 'ode_method': 'euler', 'ode_init': 'spectral'}
_NATIVE = {'ode_field': 'native', 'ode_method': 'lie_trotter', 'ode_init': 'mean'}
_TINY_32: Any = ('vit_tiny_patch16_224', dict(depth=12, patch_size=4, img_size=32))
_DEIT_128: Any = ('deit_tiny_patch16_224', dict(depth=12, img_size=128))

# name: base that supplies width, stem and head; arguments of the base; ode_* settings, or None for the base itself
_MODELS: dict[str, Any] = {
    'odevit_tiny': ('vit_tiny_patch16_224', dict(depth=12), _PAPER),
    'odevit_tiny_patch4_32': (*_TINY_32, _PAPER),
    'odevit_small': ('vit_small_patch16_224', dict(depth=12), _PAPER),
    'odevit_base': ('vit_base_patch16_224', dict(depth=12), _PAPER),
    'odevit_large': ('vit_large_patch16_224', dict(depth=24), _PAPER),
    'odevit_small_patch14_reg4': ('vit_small_patch14_reg4_dinov2', dict(depth=12, img_size=224), _PAPER),
    'odevit_base_patch14_reg4': ('vit_base_patch14_reg4_dinov2', dict(depth=12, img_size=224), _PAPER),
    'odevit_large_patch14_reg4': ('vit_large_patch14_reg4_dinov2', dict(depth=24, img_size=224), _PAPER),
    'odevit_tiny_native_patch4_32': (*_TINY_32, {**_NATIVE, 'ode_init': 'spectral', 'ode_steps': 6, 'ode_T': 6.}),
    'odevit_tiny_patch16_128': (*_DEIT_128, {**_PAPER, 'ode_steps': 6, 'ode_T': 12.}),
    'odevit_tiny_native_patch16_128': (*_DEIT_128, {**_NATIVE, 'ode_steps': 6, 'ode_T': 12.}),
    'odevit_tiny_native_two_r11_patch16_128': (
        *_DEIT_128, {**_NATIVE, 'ode_time': 'low_rank', 'ode_rank': 11, 'ode_phases': 2, 'ode_init': 'svd_data'}),
    'deit_tiny_patch16_128': (*_DEIT_128, None),
}
# published models: the number of classes of each tag
_PUBLISHED = {
    'odevit_tiny_native_patch4_32': {'cifar100': 100},
    'odevit_tiny_patch16_128': {'deit_tiny_k6_cifar100': 100},
    'odevit_tiny_native_patch16_128': {
        'deit_tiny_cifar100': 100, 'deit_tiny_k6_cifar100': 100, 'deit_tiny_k6_cifar10': 10},
    'odevit_tiny_native_two_r11_patch16_128': {'deit_tiny_cifar100': 100, 'deit_tiny_cifar10': 10},
    'deit_tiny_patch16_128': {'cifar100': 100},
}


def _published_cfg(name: str, cfg: dict[str, Any], classes: int) -> dict[str, Any]:
    """The configuration of a published model; its weights are in this package or, if not there, on the Hub."""
    cfg = {**cfg, 'num_classes': classes, 'hf_hub_id': f'timm-odevit/{name}'}
    here = Path(__file__).parent
    for folder in (here / 'published', here.parent / 'hub'):  # in an installed package, in a checkout
        if (folder / name / WEIGHTS).is_file():
            cfg['file'] = str(folder / name / WEIGHTS)
            cfg['label_names'] = json.loads((folder / name / CONFIG).read_text()).get('label_names')
            break
    return cfg


default_cfgs = generate_default_cfgs({
    **{name: _cfg(*row[:2]) for name, row in _MODELS.items() if name not in _PUBLISHED},
    'odevit_converted': _cfg('vit_tiny_patch16_224', {}),
    **{f'{name}.{tag}': _published_cfg(f'{name}.{tag}', _cfg(*_MODELS[name][:2]), classes)
       for name, tags in _PUBLISHED.items() for tag, classes in tags.items()},
})


def _entry(name: str, base: str, base_args: dict[str, Any], ode: dict[str, Any] | None) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _create(name, base, pretrained, **{**(ode or {}), **base_args, **kwargs})
    create.__name__ = create.__qualname__ = name
    create.__doc__ = f'ODE-ViT (arXiv 2511.16501) with width, stem and head from {base}; takes its keywords and ode_*.'
    return create


for _name, _row in _MODELS.items():
    globals()[_name] = register_model(_entry(_name, *_row))


@register_model
def odevit_converted(
        pretrained: bool = False,
        base: str = 'vit_tiny_patch16_224',
        base_args: dict[str, Any] | None = None,
        **kwargs: Any,
) -> nn.Module:
    """Any converted model: `base` is the timm name of its base model; takes its keywords and ode_*."""
    cfg: Any = kwargs.get('pretrained_cfg')
    if saved_in(cfg):  # before the two sets of keywords are merged
        check_args(saved_in(cfg), cfg, {'base_args': base_args})
    source = None
    with suppress(RuntimeError):  # an unknown tag
        source = timm.get_pretrained_cfg(base) if isinstance(base, str) and timm.is_model(base) else None
    if source is None or base.startswith('odevit_'):
        raise ValueError(
            f"Unknown base '{str(base)[:100]}'. Give the timm name of the original model; see timm.list_models().")
    if not kwargs.get('pretrained_cfg'):
        # preprocessing is the base's, unless the caller or a saved config says otherwise
        keys = ('input_size', 'fixed_input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'crop_mode',
                'num_classes', 'first_conv', 'classifier')
        own = {key: getattr(source, key) for key in keys if getattr(source, key) is not None}
        kwargs['pretrained_cfg_overlay'] = {
            **own, 'license': source.license, **(kwargs.get('pretrained_cfg_overlay') or {})}
    return _create('odevit_converted', base, pretrained, **{**(base_args or {}), **kwargs})


def _create(variant: str, base: str, pretrained: bool, /, **kwargs: Any) -> nn.Module:
    """A model as timm's factory makes it."""
    overlay = kwargs.get('pretrained_cfg_overlay') or {}
    if {'hf_hub_id', 'url'} & set(overlay):  # in place of the file of a published model
        kwargs['pretrained_cfg_overlay'] = overlay = {'file': None, **overlay}
    if file := _check_saved(variant, pretrained, kwargs):
        kwargs['pretrained_cfg_overlay'] = {**overlay, 'file': file, 'source': ''}
    levels, build = 3, partial(timm.create_model, base)  # levels of feature maps
    if variant not in _MODELS or _MODELS[variant][2] is not None:
        config = OdeConfig.from_args({k: kwargs.pop(k) for k in list(kwargs) if k.startswith(PREFIX)}, variant)
        build = partial(_build, variant, base, config)
        if isinstance(config.steps, tuple):
            levels = len(config.steps)
        elif config.steps:
            levels = min(levels, config.steps + (config.blocks or (0,))[0])
    if 'out_times' in kwargs and 'out_indices' in kwargs:
        raise ValueError('out_times and out_indices both choose features. Give one of them.')
    features: dict[str, Any] = dict(out_indices=kwargs.pop('out_indices', levels), feature_cls='getter')
    if 'out_times' in kwargs:
        features = dict(out_times=check_times(kwargs.pop('out_times')), out_indices=(), feature_cls=FeaturesAtTimes)
        if not kwargs.get('features_only'):
            raise ValueError('out_times chooses features. Give features_only=True with it.')
    try:
        return build_model_with_cfg(
            build, variant, pretrained, feature_cfg=features, pretrained_filter_fn=partial(_filter, base), **kwargs)
    except RuntimeError as e:
        if not str(e).startswith('Error(s) in loading'):  # its message is a page of names and shapes
            raise
        raise RuntimeError(f'The weights do not fit {variant}: {one_line(e)}') from e


def _check_saved(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> str | None:
    """The file with the weights, if any; a model described by a config.json is first built without them."""
    cfg: Any = kwargs.get('pretrained_cfg')
    where, saved = saved_in(cfg), kwargs.get('pretrained_model_args', {})
    if where:
        check_args(where, cfg, saved)
    resolved = resolve_pretrained_cfg(variant, cfg, kwargs.get('pretrained_cfg_overlay')) if pretrained else None
    file = weights_file(resolved.to_dict(), kwargs.get('cache_dir')) if resolved else None
    if where:
        plain = {k: v for k, v in cfg.items() if k not in ('source', 'file', 'hf_hub_id')}
        try:
            with on_meta():
                check_size(timm.create_model(variant, pretrained_cfg=plain, **saved), file)
        except Exception as e:  # timm's models raise errors of all kinds for arguments they cannot take
            raise ValueError(f"{variant} cannot be built from the config.json of '{where}': {type(e).__name__}: "
                             f'{one_line(e)}') from e
    return file


def _filter(base: str, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Apply the base's checkpoint filter, which resizes position embeddings, to everything but the residuals."""
    own = {k: v for k, v in state.items() if '.shared.' in k and any(f'.{part}.' in k for part in RESIDUALS)}
    base_filter = getattr(import_module(timm.model_entrypoint(base).__module__), 'checkpoint_filter_fn', None)
    rest = {k: v for k, v in state.items() if k not in own}
    try:
        return {**(base_filter(rest, model) if base_filter else rest), **own}
    except Exception as e:  # the filter reads tensors before it compares their shapes
        raise ValueError(
            f'These are not the weights of a converted {base}: {type(e).__name__}: {one_line(e)}') from e


def _build(
        variant: str, base: str, config: OdeConfig, /, drop_path_rate: float = 0., **kwargs: Any) -> nn.Module:
    if drop_path_rate > 0.:  # not every base accepts this keyword
        kwargs['drop_path_rate'] = drop_path_rate
    model = _shallow(base, kwargs, config)
    # there is one block of each kind to take weights from, so nothing to choose or to factorise
    fresh = config if config.init == 'spectral' else replace(config, init='mean')
    done = convert_(model, fresh, keep_original=False)
    for blocks in done.blocks:
        blocks.config = replace(blocks.config, init=config.init)
    args = {k: v for k, v in kwargs.items() if k not in ('device', 'dtype', 'drop_path_rate')}
    model._model_args = {**({} if variant in _MODELS else {'base': base}), **args, **config.to_args()}
    return model


def _shallow(base: str, kwargs: dict[str, Any], config: OdeConfig) -> Any:
    """The base with tensors for only one block of each kind, which the others that will be converted share.

    It is built on the meta device to see its blocks, then with as few as it allows.
    """
    with on_meta():
        whole: Any = timm.create_model(base, **{**kwargs, 'device': None})
    check_convertible(whole, OdeConfig(method='euler'))
    sites = find_stages(whole)
    orders = [kinds(site.blocks) for site in sites]
    known = inspect.signature(type(whole).__init__).parameters
    key = 'depth' if isinstance(whole, NaFlexVit) else next(
        (k for k in ('depth', 'num_blocks', 'depths') if k in known), '')
    # how many blocks, counted from the first, include every kind
    needed = [max(order.index(kind) for kind in set(order)) + 1 for order in orders]
    model: Any = None
    if key:
        fewer = dict(kwargs, drop_path_rate=0.) if 'drop_path_rate' in kwargs else kwargs
        with suppress(AssertionError, TypeError, ValueError):  # of a base whose settings for each block fix its depth
            model = timm.create_model(base, **{**fewer, key: tuple(needed) if key == 'depths' else needed[0]})
    if model is None or _outside(model) != _outside(whole):
        model = timm.create_model(base, **kwargs)
    for ours, theirs, order in zip(find_stages(model), sites, orders, strict=True):
        few, layers = ours.host.blocks, []
        start, end = config.converted_layers(len(order))
        for i, (kind, whole_block) in enumerate(zip(order, theirs.blocks, strict=True)):
            first = few[order.index(kind)]
            shared = {id(t): t for t in (*first.parameters(), *first.buffers())} if start <= i <= end else {}
            layers.append(copy.deepcopy(first, shared))  # a new module that shares the tensors of the first one
            set_per_layer(layers[-1], [whole_block])
        if isinstance(getattr(theirs.host, 'depth', None), int):
            ours.host.depth = theirs.host.depth
        ours.host.blocks = nn.Sequential(*layers) if isinstance(few, nn.Sequential) else nn.ModuleList(layers)
    if isinstance(getattr(whole, 'feature_info', None), list):
        model.feature_info = whole.feature_info
    return model


def _outside(model: nn.Module) -> list[Any]:
    """Names and shapes of all tensors outside the blocks."""
    prefixes = tuple(f'{site.name}.blocks.'.lstrip('.') for site in find_stages(model))
    return [(name, tuple(t.shape)) for name, t in model.state_dict().items() if not name.startswith(prefixes)]
