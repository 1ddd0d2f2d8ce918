"""Before a conversion: whether it is refused and why, which models can be converted, and which settings fit a size."""
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from numbers import Real
from typing import Any

import timm
import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..hooks import check_images, on_meta
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.config import DEFAULT, OdeConfig
from ..ode.methods import METHODS
from ..ode.time_dependence import matrix_shape
from ..settings import one_of
from .block_kinds import FIELD_OF, Site, WholeField, cannot_convert, field_class, find_stages, kinds, takes_one_state
from .initialisation import assignment
from .merge import check_not_merged

__all__ = ['check_all', 'check_convertible', 'choose_size', 'convertibility', 'count_in_words', 'list_convertible',
           'parse_size', 'predict_parameters']


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
    sites = [] if find_ode_blocks(model) else find_stages(unwrap_model(model))
    if why := next(_of_the_model(model, sites, config), ''):
        raise cannot_convert(model, why)
    if why := next(_of_the_settings(model, sites, config, images), ''):
        raise ValueError(why)
    if images is not None and config.init == 'svd_data':
        check_images(images)
    return sites


def _of_the_model(model: nn.Module, sites: Sequence[Site], config: OdeConfig) -> Iterator[str]:
    """Why the blocks of a model cannot be steps of an ODE."""
    if unwrap_model(model) is not model:
        yield 'convert it before you wrap it in torch.compile or DistributedDataParallel'
    if getattr(model, 'rope_is_mixed', False):
        yield 'it generates its RoPE tables one block at a time'
    for site in sites:
        first, kind = site.blocks[0], type(site.blocks[0])
        if kind not in FIELD_OF:
            if not takes_one_state(first):
                yield f'a {kind.__name__} does not take one state tensor'
            if (count := len(set(kinds(site.blocks)))) > 1:
                yield f'its blocks are of {count} kinds, which cannot share one block'
        for i, block in enumerate(site.blocks):
            if type(block) is not kind:
                yield f'block {i} is a {type(block).__name__}, block 0 is a {kind.__name__}'
    chosen = [site.converted(config) for site in sites]
    count = sum(map(len, chosen))
    if count > 1 and sum(len(set(kinds(blocks))) for blocks in chosen) == count:
        yield f'each of its {count} blocks has different parameters or settings, so none can be shared'


def _of_the_settings(
        model: nn.Module, sites: Sequence[Site], config: OdeConfig, images: Tensor | None) -> Iterator[str]:
    """Why the values of a model's weights, or the settings, do not allow a conversion."""
    name = type(model).__name__
    if not sites:
        converted = find_ode_blocks(model)
        count, now = count_in_words(sum(len(ode.shared.phases) for ode in converted)), converted[0]
        yield (f'This model is already converted ({count}, {now.method}, {now.steps} steps). Call restore() on its '
               'Conversion first.')
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
    for setting in ('blocks', 'T') if len(sites) > 1 else ():
        value = getattr(config, setting)
        if value != getattr(DEFAULT, setting):
            yield (f'{setting}={value!r} applies only to models with one sequence of blocks, but {name} has '
                   f'{len(sites)} stages. Leave it out.')
    if isinstance(config.steps, tuple) and len(config.steps) != len(sites):
        yield f'{name} has {len(sites)} sequences of blocks; got {len(config.steps)} step counts.'
    for block in (block for site in sites for block in site.converted(config)):
        yield from _of_a_block(name, block, config)
    if config.init == 'svd_data' and images is None:
        yield ("init='svd_data' is measured on images. Pass a batch of them, normalised for the model: "
               'convert_(model, config, images=batch).')


def _of_a_block(name: str, block: nn.Module, config: OdeConfig) -> Iterator[str]:
    if config.field == 'lipschitz':
        plain: dict[str, Any] = {'attn': Attention}
        if config.init != 'spectral':  # then the field takes their weights
            plain.update(mlp=Mlp, norm1=nn.LayerNorm)
        for part, kind in ((block, Block), *((getattr(block, part, None), kind) for part, kind in plain.items())):
            if not isinstance(part, kind):
                yield (f"field='lipschitz' replaces plain pre-norm ViT blocks, but {name} has a "
                       f"{type(part).__name__}. Use field='native', or init='spectral' if it is an MLP or a norm.")
    elif not config.adaptive and METHODS[config.method].splits and field_class(block) is WholeField:
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


def predict_parameters(model: nn.Module, config: OdeConfig) -> int:
    """Parameters left after `convert_(model, config)`, for native fields."""
    replaced: tuple[str, ...] = ()
    total = 0
    for site in find_stages(model):
        first, last = config.converted_layers(len(site.blocks))
        replaced += tuple(f'{site.name}.blocks.{i}.'.lstrip('.') for i in range(first, last + 1))
        blocks = site.converted(config)
        assigned = assignment(config, blocks, first)
        total += sum(count_parameters(blocks[assigned.index(index)]) for index in set(assigned))
        for p in (p for block in blocks for p in block.parameters() if config.time != 'autonomous'):
            total += p.numel() if p.ndim <= 1 else min(config.rank, *matrix_shape(p)) * sum(matrix_shape(p))
    everything = model.named_parameters(remove_duplicate=False)  # they may be tied, between blocks or with others
    return total + sum(p.numel() for p in {p for name, p in everything if not name.startswith(replaced)})


def choose_size(
        model: nn.Module,
        target: int | float | str,
        config: OdeConfig = DEFAULT,
        *,
        init: str = 'svd',
) -> OdeConfig:
    """Choose the phases and the rank that make the best use of a number of parameters.

    This gives one shared block, with residuals per layer of the largest rank that fits, or a phase per layer, if all
    the model's parameters fit.

    Args:
        model: Model that can be converted.
        target: Largest size of the converted model: a number of parameters, such as 3_000_000 or '3M'; a share of the
            model's, such as 0.25 or '25%'; or what they take in the model's dtype, such as '10MB'.
        config: All other settings; time, rank, phases and init are chosen for you.
        init: How residuals are filled: 'svd', or 'svd_data', which keeps more but needs images to convert.

    Returns:
        Settings for `convert_`.

    Raises:
        TypeError: The model has no blocks that can be converted.
        ValueError: The target is out of range (the message names the smallest one), or the settings do not fit.

    Examples:
        >>> config = choose_size(vit, '50%')
        >>> print(convert_(vit, config))
    """
    one_of(('svd', 'svd_data'))('init', init)
    if config.field != 'native':
        raise ValueError("choose_size works only for field='native'. Set time, rank and phases yourself.")
    ranked = replace(config, time='low_rank', rank=1, phases=1, init=init)
    plain = replace(ranked, time='autonomous', rank=0, init='mean')
    check_convertible(model, plain)

    def of_rank(rank: int) -> OdeConfig:
        return replace(ranked, rank=rank, init=init if rank else 'mean')
    total, smallest = count_parameters(model), predict_parameters(model, plain)
    size = parse_size(target, next(model.parameters()).element_size())
    wanted = int(size * total) if isinstance(size, float) else size
    if wanted < smallest:
        share = f" For a share of the model, give '{wanted}%'." if wanted <= 100 else ''
        raise ValueError(
            f'{wanted:,} parameters are too few: one shared block and everything outside the blocks take '
            f'{smallest:,} of {total:,} ({100 * smallest / total:.1f} %).{share}')
    whole = replace(plain, phases=max(len(site.converted(config)) for site in find_stages(model)))
    if predict_parameters(model, whole) <= wanted:
        return whole
    ranks = bisect_right(range(2 ** 16), wanted, key=lambda rank: predict_parameters(model, of_rank(rank)))
    return of_rank(ranks - 1) if ranks else plain


def parse_size(size: int | float | str, bytes_each: float = 4.) -> int | float:
    """A number of parameters, such as 3_000_000, '3M' or '10MB'; a float up to 1 for a share, such as '25%' or 0.25."""
    text = str(int(size) if isinstance(size, Real) and size > 1 and size % 1 == 0 else size)
    match = re.fullmatch(r'(\d+(?:_\d+)*(?:\.\d*)?(?:e\d+)?) ?(%|[kKMGB]|[kKMG]B)?', text.strip())
    number, unit = (match[1], match[2] or '') if match else ('0', '')
    share = unit == '%' or ('.' in number and not unit)
    value = float(number) * {'%': 1e-2, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'B': 1e9}.get(unit[:1], 1.)
    if len(unit) == 2:
        value /= bytes_each
    if not 0 < value < math.inf or (share and value > 1):
        raise ValueError('expected a number of parameters, such as 3M, a share up to 100%, such as 25%, or bytes, such '
                         f'as 10MB; got {size!r}')
    return value if share else int(value)
