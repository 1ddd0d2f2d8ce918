"""The `odevit_*` models in timm's registry."""
import copy
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from torch import Tensor, nn

from .convert.block_kinds import find_stages, kinds
from .convert.conversion import convert_
from .hooks import on_meta
from .ode.config import PREFIX, OdeConfig
from .quantization import unpacked
from .saving.loading import CONFIG, WEIGHTS, check_args, check_size, weights_file
from .settings import one_line, shown

_PAPER = {'ode_field': 'lipschitz', 'ode_method': 'euler', 'ode_init': 'spectral'}
_TINY_32: Any = ('vit_tiny_patch16_224', dict(patch_size=4, img_size=32))
_DEIT_128: Any = ('deit_tiny_patch16_224', dict(img_size=128))

# name: base that supplies width, stem and head; arguments of the base; ode_* settings, or None for the base itself
_MODELS: dict[str, Any] = {
    **{f'odevit_{size}': (f'vit_{size}_patch16_224', {}, _PAPER) for size in ('tiny', 'small', 'base', 'large')},
    **{f'odevit_{size}_patch14_reg4': (f'vit_{size}_patch14_reg4_dinov2', dict(img_size=224), _PAPER)
       for size in ('small', 'base', 'large')},
    'odevit_tiny_patch4_32': (*_TINY_32, _PAPER),
    'odevit_tiny_native_patch4_32': (*_TINY_32, {'ode_init': 'spectral', 'ode_steps': 6, 'ode_T': 6.}),
    'odevit_tiny_patch16_128': (*_DEIT_128, {**_PAPER, 'ode_steps': 6}),
    'odevit_tiny_native_patch16_128': (*_DEIT_128, {'ode_steps': 6}),
    'odevit_tiny_native_three_patch16_128': (*_DEIT_128, {'ode_steps': 6, 'ode_phases': 3}),
    'deit_tiny_patch16_128': (*_DEIT_128, None),
}
# published models: the number of classes of each tag
_PUBLISHED = {
    'odevit_tiny_native_patch4_32': {'cifar100': 100},
    'odevit_tiny_patch16_128': {'deit_tiny_k6_cifar100': 100},
    'odevit_tiny_native_patch16_128': {
        'deit_tiny_cifar100': 100, 'deit_tiny_k6_cifar100': 100, 'deit_tiny_k6_cifar10': 10},
    'odevit_tiny_native_three_patch16_128': {
        'deit_tiny_cifar100': 100, 'deit_tiny_k6_cifar100': 100, 'deit_tiny_k12_cifar100': 100,
        'deit_tiny_k6_cifar10': 10},
    'deit_tiny_patch16_128': {'cifar100': 100},
}
_STEPS = {'deit_tiny_k12_cifar100': 12}  # of published models, where not their architecture's


def _cfg(name: str, classes: int | None = None) -> dict[str, Any]:
    """`classes` is given for a published one."""
    base, base_args, _ = _MODELS.get(name.partition('.')[0], ('vit_tiny_patch16_224', {}, None))
    source: Any = timm.get_pretrained_cfg(base)
    size = base_args.get('img_size', 224)
    cfg = dict(
        input_size=(3, size, size), num_classes=classes or 1000, crop_pct=0.9 if size == 224 else 1.0,
        interpolation='bicubic', fixed_input_size=True, mean=source.mean, std=source.std, first_conv='patch_embed.proj',
        classifier='head', license='apache-2.0', paper_ids='arXiv:2511.16501', paper_name='ODE-ViT')
    if classes:
        cfg['hf_hub_id'] = f'timm-odevit/{name}'  # where the weights are if they are not here
        here = Path(__file__).parent
        for folder in (here.parent / 'hub' / name, here / 'published' / name):  # in a checkout, in an installed package
            if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file():
                names = json.loads((folder / CONFIG).read_text()).get('label_names')
                cfg |= {'file': str(folder / WEIGHTS), 'label_names': names}
    return cfg


default_cfgs = generate_default_cfgs({
    **{name: _cfg(name) for name in ('odevit_converted', *_MODELS) if name not in _PUBLISHED},
    **{f'{name}.{tag}': _cfg(f'{name}.{tag}', classes)
       for name, tags in _PUBLISHED.items() for tag, classes in tags.items()}})


def _register(name: str, base: str, base_args: dict[str, Any], ode: dict[str, Any] | None) -> None:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        tag = resolve_pretrained_cfg(name, kwargs.get('pretrained_cfg')).tag
        own = {'ode_steps': _STEPS[tag]} if tag in _STEPS else {}
        return _create(name, base, pretrained, **{**(ode or {}), **base_args, **own, **kwargs})
    create.__name__ = create.__qualname__ = name
    globals()[name] = register_model(create)


for _name, _row in _MODELS.items():
    _register(_name, *_row)


@register_model
def odevit_converted(
        pretrained: bool = False, base: str = 'vit_tiny_patch16_224', base_args: dict[str, Any] | None = None,
        **kwargs: Any,
) -> nn.Module:
    """From the timm name of the base; takes the base's keywords and ode_*."""
    source: Any = None
    with suppress(AttributeError, RuntimeError):  # an unknown tag
        source = timm.is_model(base) and resolve_pretrained_cfg(base)
    if not source or base.startswith('odevit_'):
        raise ValueError(f'Unknown base {shown(base)}. Give the timm name of the original model.')
    if not kwargs.get('pretrained_cfg'):  # preprocessing is the base's
        keys = ('input_size', 'fixed_input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'crop_mode',
                'num_classes', 'first_conv', 'classifier')
        own = {key: value for key in keys if (value := getattr(source, key)) is not None}
        kwargs['pretrained_cfg_overlay'] = {
            **own, 'license': source.license, **(kwargs.get('pretrained_cfg_overlay') or {})}
    return _create('odevit_converted', base, pretrained, **{**(base_args or {}), **kwargs})


def _create(variant: str, base: str, pretrained: bool, /, **kwargs: Any) -> nn.Module:
    overlay = kwargs.get('pretrained_cfg_overlay') or {}
    if {'hf_hub_id', 'url'} & set(overlay):  # in place of the file of a published model
        kwargs['pretrained_cfg_overlay'] = overlay = {'file': None, **overlay}
    if file := _check_saved(variant, pretrained, kwargs):
        kwargs['pretrained_cfg_overlay'] = {**overlay, 'file': file, 'source': ''}
    levels, build = 3, partial(timm.create_model, base)  # levels of feature maps
    if _MODELS.get(variant, (base, {}, {}))[2] is not None:
        config = OdeConfig.from_args({k: kwargs.pop(k) for k in list(kwargs) if k.startswith(PREFIX)}, variant)
        build = partial(_build, variant, base, config)
        if base.startswith('swin'):
            levels = len(kwargs.get('depths', range(4)))
        elif isinstance(config.steps, int):
            levels = min(levels, config.steps + (config.blocks or (0,))[0])
    return build_model_with_cfg(
        build, variant, pretrained, feature_cfg=dict(out_indices=levels, feature_cls='getter'),
        pretrained_filter_fn=partial(_filter, base), **kwargs)


def _check_saved(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> str | None:
    """The file with the weights, if any; what a config.json describes is first built on the meta device."""
    cfg: Any = kwargs.get('pretrained_cfg')
    source, saved = cfg.get('source') if isinstance(cfg, dict) else '', kwargs.get('pretrained_model_args', {})
    where = source and cfg.get('file' if source == 'local-dir' else 'hf_hub_id')
    if where:
        check_args(where, cfg, saved)
    resolved = resolve_pretrained_cfg(variant, cfg, kwargs.get('pretrained_cfg_overlay')) if pretrained else None
    file = weights_file(resolved.to_dict(), kwargs.get('cache_dir')) if resolved else None
    if where:
        plain = {k: v for k, v in cfg.items() if k not in ('source', 'file', 'hf_hub_id')}
        try:
            with on_meta():
                check_size(timm.create_model(variant, pretrained_cfg=plain, **saved), file)
        except Exception as e:
            raise ValueError(f"{variant} cannot be built from the config.json of '{where}': {type(e).__name__}: "
                             f'{one_line(e)}') from e
    return file


def _filter(base: str, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Weights as they were before 4 bits, through the base's filter, which resizes position embeddings."""
    state = unpacked(state)
    if any('.shared.' in name for name in state.keys() - model.state_dict().keys()):
        raise ValueError('These weights are of other shared blocks. Leave out ode_field, ode_phases and ode_blocks, '
                         "and change a Swin's image size after loading, by set_input_size.")
    base = _MODELS.get(base.partition('.')[0], (base,))[0]
    base_filter = timm.model_entrypoint(base).__globals__.get('checkpoint_filter_fn')
    return base_filter(state, model) if base_filter else state


def _build(variant: str, base: str, config: OdeConfig, /, **kwargs: Any) -> nn.Module:
    """Of the base, only the first block of each kind is initialised; others that will be converted share it."""
    with on_meta():
        model: Any = timm.create_model(base, **{**kwargs, 'device': None})
    sites = find_stages(model)
    orders, inside = [kinds(site.blocks) for site in sites], tuple(site.prefix for site in sites)
    needed = [1 + max(map(order.index, order)) for order in orders]  # blocks, from the first, that include every kind
    fewer: Any
    for fewer in ({'depth': needed[0]}, {'depths': tuple(needed)}, {'num_blocks': needed[0]}, {}):
        try:
            few = timm.create_model(base, **{**kwargs, **fewer})
        except (AssertionError, TypeError, ValueError):  # of a base whose settings for each block fix its depth
            if not fewer:
                raise
        else:
            if [t.shape for t in _tensors(few, inside).values()] == [t.shape for t in _tensors(model, inside).values()]:
                break
    for ours, theirs, order in zip(sites, find_stages(few), orders, strict=True):
        converted = ours.converted(config)
        for i, (block, kind) in enumerate(zip(ours.blocks, order, strict=True)):
            first = theirs.host.blocks[order.index(kind)]
            _take_over(block, _tensors(first if i in converted else copy.deepcopy(first)))
    _take_over(model, _tensors(few, inside))
    convert_(model, config, keep_original=False)
    args = {k: v for k, v in kwargs.items() if k not in ('device', 'dtype')}
    model._model_args = {**({} if variant in _MODELS else {'base': base}), **args, **config.to_args()}
    return model


def _tensors(model: nn.Module, left_out: tuple[str, ...] = ()) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in tensors if not name.startswith(left_out)}


def _take_over(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition('.')
        setattr(model.get_submodule(owner), key, tensor)
