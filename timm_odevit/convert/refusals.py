"""Which models and settings `convert_` accepts, and why it refuses the others."""
from collections.abc import Sequence
from functools import cache
from typing import Any

import timm
import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from ..hooks import on_meta
from ..ode.blocks import OdeBlocks, find_ode_blocks
from ..ode.config import DEFAULT, OdeConfig
from ..ode.methods import METHODS
from .block_kinds import HINT, Site, WholeField, check_blocks, field_class, find_stages, kinds
from .merge import check_not_merged
from .svd_data import check_images

__all__ = ['check_all', 'check_convertible', 'convertibility', 'count_in_words', 'list_convertible']


def check_convertible(
        model: nn.Module, config: OdeConfig | None = None, *, images: Tensor | None = None, **settings: Any) -> None:
    """Raise what `convert_` with the same arguments would raise, and change nothing.

    Raises:
        TypeError: The model has no blocks that can be converted.
        ValueError: The model is already converted, or the settings do not fit it.

    Examples:
        >>> check_convertible(vit, method='rk4', phases=2)    # raises nothing: this can be converted
    """
    check_all(model, OdeConfig.from_keywords(config, settings, 'check_convertible'), images)


def check_all(model: nn.Module, config: OdeConfig, images: Tensor | None) -> list[Site]:
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(
            f'Cannot convert {name}: expected a timm model, such as timm.create_model("vit_small_patch16_224").')
    check_not_merged(model)
    converted = find_ode_blocks(model)
    if converted:
        now = converted[0].config
        raise ValueError(
            f'This model is already converted ({count_in_words(converted)}, {now.method}, {now.steps} steps). '
            'Call restore() on its Conversion first.')
    for wrapper, inner in (('_orig_mod', 'torch.compile'), ('module', 'DistributedDataParallel')):
        if isinstance(getattr(model, wrapper, None), nn.Module):
            raise TypeError(f'Cannot convert {name}: convert the model before you wrap it in {inner}.')
    sites = find_stages(model)
    if getattr(model, 'rope_is_mixed', False):
        raise TypeError(f'Cannot convert {name}: it generates its RoPE tables one block at a time. {HINT}')
    for site in sites:
        check_blocks(model, site.blocks)
        for key, p in site.host.blocks.named_parameters():
            if not p.is_meta and not torch.isfinite(p).all():
                raise ValueError(
                    f'Cannot convert {name}: blocks.{key} contains NaN or infinite values. Load other weights.')
    if len(sites) == 1:
        _check_layers(name, sites[0].blocks, config)
    else:
        for setting, value in (('blocks', config.blocks is None), ('T', config.T is None),
                               ('boundaries', config.boundaries == 'uniform')):
            if not value:
                raise ValueError(
                    f'{setting}={getattr(config, setting)!r} applies only to models with one sequence of blocks, but '
                    f'{name} has {len(sites)} stages. Leave it out.')
    _check_structure(name, sites, config)
    if isinstance(config.steps, tuple) and len(config.steps) != len(sites):
        raise ValueError(f'{name} has {len(sites)} sequences of blocks; got {len(config.steps)} step counts.')
    if config.init == 'svd_data':
        _check_images(images, next(model.parameters()))
    return sites


def _check_images(images: Any, parameter: Tensor) -> None:
    if images is None:
        raise ValueError("init='svd_data' is measured on images. Pass a batch of them, normalised for the model: "
                         'convert_(model, config, images=batch).')
    check_images(images)
    if images.device != parameter.device or images.dtype != parameter.dtype:
        raise ValueError(
            f'images are {images.dtype} on {images.device}, the model is {parameter.dtype} on {parameter.device}. '
            'Call images.to(...) first.')
    if images.is_meta:
        raise ValueError("init='svd_data' is measured on images, but a model on the meta device computes nothing. Use "
                         "init='svd'.")


def _check_structure(name: str, sites: Sequence[Site], config: OdeConfig) -> None:
    """Check that the blocks can share weights, and that they suit the field and the method."""
    count, fields = 0, 0
    for site in sites:
        first, last = config.converted_layers(len(site.blocks))
        chosen = site.blocks[first:last + 1]
        count, fields = count + len(chosen), fields + len(set(kinds(chosen)))
        whole = sorted({type(b).__name__ for b in chosen if field_class(b) is WholeField})
        if config.field == 'lipschitz':
            _check_lipschitz(name, chosen, config)
        elif whole and config.method in METHODS and METHODS[config.method].splits:
            unsplit = [m for m in METHODS if not METHODS[m].splits]
            raise ValueError(
                f"'{config.method}' splits a block into attention and MLP, but a {whole[0]} of {name} cannot be "
                f"split. Use a method that does not split it ({', '.join(unsplit)}): OdeConfig(method='euler').")
    if fields == count > 1:
        shapes = {tuple((n, tuple(p.shape)) for n, p in b.named_parameters()) for s in sites for b in s.blocks}
        why = 'different parameters' if len(shapes) > 1 else 'different settings'
        raise TypeError(f'Cannot convert {name}: each of its {count} blocks has {why}, so none can be shared. {HINT}')


def _check_layers(name: str, blocks: Sequence[nn.Module], config: OdeConfig) -> None:
    """Check that the layers named in the settings exist."""
    first, last = config.converted_layers(len(blocks))
    if last >= len(blocks):
        raise ValueError(f'blocks={config.blocks}: {name} has blocks 0 to {len(blocks) - 1}.')
    layers = last - first + 1
    if config.phases > layers:
        raise ValueError(f'phases={config.phases}: there are {layers} layers. Allowed: 1 to {layers}.')
    if isinstance(config.boundaries, tuple) and not all(first < b <= last for b in config.boundaries):
        raise ValueError(
            f'boundaries={config.boundaries}: each must be a layer from {first + 1} to {last}, where a span can start.')


def _check_lipschitz(name: str, blocks: Sequence[Any], config: OdeConfig) -> None:
    for block in blocks:
        if type(block) is not Block or type(block.attn) is not Attention:
            kind = type(block).__name__ if type(block) is not Block else type(block.attn).__name__
            raise ValueError(
                f"field='lipschitz' replaces plain pre-norm ViT blocks, but {name} has a {kind}. Use field='native'.")
    if config.init == 'spectral':
        return
    mlp, norm = blocks[0].mlp, blocks[0].norm1
    if not hasattr(mlp, 'fc1') or mlp.fc1.out_features != mlp.fc2.in_features:
        raise ValueError(
            f"init '{config.init}' needs a base with a plain two-layer MLP for the lipschitz field; this one has a "
            f"{type(mlp).__name__}. Use init='spectral' or field='native'.")
    if getattr(norm, 'weight', None) is None or getattr(norm, 'bias', None) is None:
        raise ValueError(
            f"init '{config.init}' needs a base whose norms have weight and bias for the lipschitz field; this one "
            f"has a {type(norm).__name__}. Use init='spectral' or field='native'.")


def count_in_words(blocks: Sequence[OdeBlocks]) -> str:
    count = sum(len(b.shared.phases) for b in blocks)
    return f"{count} shared block{'s' if count > 1 else ''}"


def list_convertible(filter: str | list[str] = '', *, refused: bool = False) -> dict[str, str]:
    """The timm models that `convert_` accepts, found by building each on the meta device.

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
    found = {name: _convertible(name) for name in names}
    return {name: text for name, (ok, text) in found.items() if ok is not refused}


@cache
def _convertible(name: str) -> tuple[bool, str]:
    try:
        with on_meta():
            model = timm.create_model(name)
    except Exception as e:  # such as a third-party model that cannot be built without its files
        return False, f'Cannot be built from its name alone: {e}'
    return convertibility(model)


def convertibility(model: nn.Module) -> tuple[bool, str]:
    """Whether a model can be converted, and with which field and methods, or why not."""
    try:
        try:
            sites = check_all(model, DEFAULT, None)
            methods = 'all methods'
        except ValueError:
            sites = check_all(model, OdeConfig(method='euler'), None)
            methods = 'unsplit methods'
    except (TypeError, ValueError) as e:
        return False, str(e)
    shared = sum(len(set(kinds(site.blocks))) for site in sites)
    try:
        check_all(model, OdeConfig(field='lipschitz', method='euler', init='spectral'), None)
        fields = 'native, lipschitz'
    except ValueError:
        fields = 'native'
    return True, f"{fields}; {methods}; at least {shared} shared block{'s' if shared > 1 else ''}"
