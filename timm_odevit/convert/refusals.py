"""Which models and settings `convert_` accepts, and why it refuses the others."""
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import timm
import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..hooks import check_images, on_meta
from ..ode.blocks import find_ode_blocks
from ..ode.config import DEFAULT, OdeConfig
from ..ode.methods import METHODS
from .block_kinds import FIELD_OF, Site, WholeField, cannot_convert, field_class, find_stages, kinds, takes_one_state
from .merge import check_not_merged

__all__ = ['check_all', 'check_convertible', 'convertibility', 'count_in_words', 'list_convertible']


def check_convertible(
        model: nn.Module, config: OdeConfig | None = None, *, images: Tensor | None = None, **settings: Any) -> None:
    """Raise the TypeError or ValueError that `convert_` with the same arguments would raise, and change nothing.

    Examples:
        >>> check_convertible(vit, method='rk4', phases=2)    # raises nothing: this can be converted
    """
    check_all(model, OdeConfig.from_keywords(config, settings, 'check_convertible'), images)


def check_all(model: nn.Module, config: OdeConfig, images: Tensor | None) -> list[Site]:
    """Where the blocks of a model are, if it and its blocks can be converted so."""
    check_not_merged(model)
    converted = find_ode_blocks(model)
    if converted:
        now, count = converted[0].config, count_in_words(sum(len(ode.shared.phases) for ode in converted))
        raise ValueError(f'This model is already converted ({count}, {now.method}, {now.steps} steps). '
                         'Call restore() on its Conversion first.')
    if unwrap_model(model) is not model:
        raise cannot_convert(model, 'convert it before you wrap it in torch.compile or DistributedDataParallel')
    sites = find_stages(model)
    if why := next(_of_the_model(model, sites, config), ''):
        raise cannot_convert(model, why)
    if why := next(_of_the_settings(type(model).__name__, sites, config), ''):
        raise ValueError(why)
    if config.init == 'svd_data':
        if images is None:
            raise ValueError("init='svd_data' is measured on images. Pass a batch of them, normalised for the model: "
                             'convert_(model, config, images=batch).')
        check_images(images)
    return sites


def _of_the_model(model: nn.Module, sites: Sequence[Site], config: OdeConfig) -> Iterator[str]:
    """Why the blocks of a model cannot be steps of an ODE."""
    if getattr(model, 'rope_is_mixed', False):
        yield 'it generates its RoPE tables one block at a time'
    for site in sites:
        first, kind = site.blocks[0], type(site.blocks[0])
        if kind not in FIELD_OF:
            if not takes_one_state(first):
                yield f'a {kind.__name__} does not take one state tensor'
            if len(set(kinds(site.blocks))) > 1:
                yield f'its blocks are of {len(set(kinds(site.blocks)))} kinds, which cannot share one block'
        for i, block in enumerate(site.blocks):
            if type(block) is not kind:
                yield f'block {i} is a {type(block).__name__}, block 0 is a {kind.__name__}'
    chosen = [site.converted(config) for site in sites]
    count = sum(map(len, chosen))
    if count > 1 and sum(len(set(kinds(blocks))) for blocks in chosen) == count:
        yield f'each of its {count} blocks has different parameters or settings, so none can be shared'


def _of_the_settings(name: str, sites: Sequence[Site], config: OdeConfig) -> Iterator[str]:
    """Why the values of a model's weights, or the settings, do not allow a conversion."""
    for key, p in ((key, p) for site in sites for key, p in site.host.blocks.named_parameters()):
        if not p.is_meta and not torch.isfinite(p).all():
            yield f'Cannot convert {name}: blocks.{key} contains NaN or infinite values. Load other weights.'
    if len(sites) == 1:
        depth = len(sites[0].blocks)
        first, last = config.converted_layers(depth)
        layers = last - first + 1
        if last >= depth:
            yield f'blocks={config.blocks}: {name} has blocks 0 to {depth - 1}.'
        if config.phases > layers:
            yield f'phases={config.phases}: there are {layers} layers. Allowed: 1 to {layers}.'
        if isinstance(config.boundaries, tuple) and not all(first < b <= last for b in config.boundaries):
            yield (f'boundaries={config.boundaries}: each must be a layer from {first + 1} to {last}, where a span can '
                   'start.')
    else:
        for setting, unset in (('blocks', None), ('T', None), ('boundaries', 'uniform')):
            value = getattr(config, setting)
            if value != unset:
                yield (f'{setting}={value!r} applies only to models with one sequence of blocks, but {name} has '
                       f'{len(sites)} stages. Leave it out.')
    if isinstance(config.steps, tuple) and len(config.steps) != len(sites):
        yield f'{name} has {len(sites)} sequences of blocks; got {len(config.steps)} step counts.'
    splits = not config.adaptive and METHODS[config.method].splits
    for block in (block for site in sites for block in site.converted(config)):
        if config.field == 'lipschitz':
            plain: dict[str, Any] = {'attn': Attention}
            if config.init != 'spectral':  # then the field takes their weights
                plain.update(mlp=Mlp, norm1=nn.LayerNorm)
            parts = [block, *(getattr(block, part, None) for part in plain)]
            for part, kind in zip(parts, (Block, *plain.values()), strict=True):
                if not isinstance(part, kind):
                    yield (f"field='lipschitz' replaces plain pre-norm ViT blocks, but {name} has a "
                           f"{type(part).__name__}. Use field='native', or init='spectral' if it is an MLP or a norm.")
        elif splits and field_class(block) is WholeField:
            unsplit = ', '.join(method for method in METHODS if not METHODS[method].splits)
            yield (f"'{config.method}' splits a block into attention and MLP, but a {type(block).__name__} of {name} "
                   f"cannot be split. Use a method that does not split it ({unsplit}): OdeConfig(method='euler').")


def count_in_words(count: int) -> str:
    return f"{count} shared block{'s' if count > 1 else ''}"


def list_convertible(filter: str | list[str] = '', *, refused: bool = False) -> dict[str, str]:
    """The timm models that `convert_` accepts.

    Args:
        filter: Wildcard for model names, such as 'vit_small*', or several; all by default, which takes two minutes.
        refused: Instead, list the models that `convert_` refuses.

    Returns:
        For each name, the fields and the methods that suit the model, or why it is refused.

    Raises:
        ValueError: No model of timm's has such a name.

    Examples:
        >>> for name, how in list_convertible('deit_tiny*').items():
        ...     print(name, how)
    """
    names = [name for name in timm.list_models(filter) if not name.startswith('odevit')]
    if not names:
        raise ValueError(f"No timm model matches '{filter}'. Give a wildcard without a tag, such as 'vit_small*'.")
    answers = {name: _convertible(name) for name in names}
    return {name: text for name, (ok, text) in answers.items() if ok is not refused}


@cache
def _convertible(name: str) -> tuple[bool, str]:
    try:
        with on_meta():
            model = timm.create_model(name)
    except Exception as e:  # such as a third-party model that cannot be built without its files
        return False, f'Cannot be built from its name alone: {e}'
    return convertibility(model)


def convertibility(model: nn.Module) -> tuple[bool, str]:
    """Whether a model can be converted; with which field and methods, or why not."""
    def refusal(config: OdeConfig) -> str:
        try:
            check_all(model, config, None)
        except (TypeError, ValueError) as e:
            return str(e)
        return ''
    split = refusal(DEFAULT)
    why = split and refusal(OdeConfig(method='euler'))
    if why:
        return False, why
    fields = 'native' if refusal(OdeConfig(field='lipschitz', method='euler', init='spectral')) else 'native, lipschitz'
    shared = sum(len(set(kinds(site.blocks))) for site in find_stages(model))
    return True, f"{fields}; {'unsplit' if split else 'all'} methods; at least {count_in_words(shared)}"
