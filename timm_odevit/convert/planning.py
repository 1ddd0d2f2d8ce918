"""Before a conversion: whether it is refused and why, which models can be converted, and which settings fit a size."""
import math
import re
from dataclasses import replace
from numbers import Real
from typing import Any

import timm
import torch
from timm.utils import unwrap_model
from torch import nn

from ..hooks import on_meta
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.config import DEFAULT, OdeConfig
from ..ode.fields import FIELDS
from ..ode.methods import METHODS
from ..ode.solver import layout
from .block_kinds import FIELD_OF, Site, WholeField, cannot_convert, field_class, find_stages, kinds, takes_one_state
from .initialisation import assignment, borders


def check_convertible(model: nn.Module, config: OdeConfig | None = None, **settings: Any) -> None:
    """Raise the error that `convert_` with the same arguments would raise, but for those of tokens and halting.

    Examples:
        >>> check_convertible(vit, method='rk4', phases=2)    # raises nothing
    """
    check_all(model, OdeConfig.from_keywords(config, settings, 'check_convertible'))


def check_all(model: nn.Module, config: OdeConfig) -> list[Site]:
    """Where the blocks of a model are, if they can be converted so."""
    if unwrap_model(model) is not model:
        raise cannot_convert(model, 'convert it before you wrap it in torch.compile or DistributedDataParallel')
    if converted := find_ode_blocks(model):
        raise ValueError(f'This model is already converted ({converted[0].extra_repr()}). Call restore() on its '
                         'Conversion first, or give the original model.')
    if getattr(model, 'rope_is_mixed', False):
        raise cannot_convert(model, 'it generates its RoPE tables one block at a time')
    sites = find_stages(model)
    for site in sites:
        first, kind = site.blocks[0], type(site.blocks[0])
        if kind not in FIELD_OF and not takes_one_state(first):
            raise cannot_convert(model, f'a {kind.__name__} does not take one state tensor')
        if kind not in FIELD_OF and (count := len(set(kinds(site.blocks)))) > 1:
            raise cannot_convert(model, f'its blocks are of {count} kinds, which cannot share one block')
        for i, block in enumerate(site.blocks):
            if type(block) is not kind:
                raise cannot_convert(model, f'block {i} is a {type(block).__name__}, block 0 is a {kind.__name__}')
        for name, p in site.host.blocks.named_parameters():
            if not p.is_meta and not torch.isfinite(p).all():
                raise ValueError(f'{site.prefix}{name} contains NaN or infinite values. Load other weights.')
        for i, block in site.converted(config).items():
            for name, module in block.named_modules():
                if isinstance(vars(module).get('weight'), torch.Tensor):
                    raise ValueError(f'{site.prefix}{i}.{name} computes its weight in a hook, which would not be '
                                     'shared. Remove that, such as by torch.nn.utils.prune.remove.')
    chosen = [site.converted(config) for site in sites]
    count = sum(map(len, chosen))
    if count > 1 and sum(len(set(kinds(blocks.values()))) for blocks in chosen) == count:
        raise cannot_convert(
            model, f'each of its {count} blocks has different parameters or settings, so none can be shared')
    name = type(model).__name__
    if len(sites) > 1 and (config.blocks or config.T):
        wrong = f'blocks={config.blocks}' if config.blocks else f'T={config.T}'
        raise ValueError(f'{wrong} applies only to models with one sequence of blocks, but {name} has {len(sites)}.')
    if len(sites) == 1:
        if config.blocks and config.blocks[1] >= (depth := len(sites[0].blocks)):
            raise ValueError(f'blocks={config.blocks}: {name} has blocks 0 to {depth - 1}.')
        if config.phases > count:
            raise ValueError(f'phases={config.phases}: there are {count} layers. Allowed: 1 to {count}.')
    if isinstance(config.steps, tuple) and len(config.steps) != len(sites):
        raise ValueError(f'{name} has {len(sites)} sequences of blocks; got {len(config.steps)} step counts.')
    for stage, blocks in enumerate(chosen):
        layout(config.resolve(len(blocks), stage), borders(config, blocks), min(blocks))  # refuses too few
    for block in (block for blocks in chosen for block in blocks.values()):
        what = type(block).__name__
        if why := FIELDS[config.field].refused(block, config.init):
            raise ValueError(f"field='{config.field}' cannot replace a {what} of {name}: {why}. Use field='native'.")
        if not config.adaptive and METHODS[config.method].splits and field_class(block) is WholeField:
            unsplit = ', '.join(method for method in METHODS if not METHODS[method].splits)
            raise ValueError(f"'{config.method}' splits blocks into attention and MLP, but a {what} of {name} cannot "
                             f'be split. Use a method that does not split it ({unsplit}).')
    return sites


def count_in_words(count: int) -> str:
    return f"{count} shared block{'s' * (count > 1)}"


def list_convertible(filter: str | list[str] = '', *, refused: bool = False) -> dict[str, str]:
    """The timm models that `convert_` accepts, with the fields and the methods that suit each.

    Args:
        filter: Wildcard for model names, such as 'vit_small*', or several; all by default, which takes minutes.
        refused: Instead, list the models that `convert_` refuses, and why.

    Raises ValueError if no model of timm's has such a name.

    Examples:
        >>> for name, how in list_convertible('deit_tiny*').items():
        ...     print(name, how)
    """
    names = [name for name in timm.list_models(filter) if not name.startswith('odevit')]
    if not names:
        raise ValueError(f"No timm model matches '{filter}'. Give a wildcard without a tag, such as 'vit_small*'.")
    found = {}
    for name in names:
        try:
            with on_meta():
                model = timm.create_model(name)
        except Exception as e:  # of a third-party model that needs files, say
            accepted, text = False, f'Cannot be built from its name alone: {e}'
        else:
            accepted, text = convertibility(model)
        if accepted is not refused:
            found[name] = text
    return found


def convertibility(model: nn.Module) -> tuple[bool, str]:
    """Whether it is possible; with which field and methods, or why not."""
    configs = {field: OdeConfig(field=field, method='euler', init='spectral') for field in FIELDS}
    refusals = {}
    for name, config in {'split': DEFAULT, **configs}.items():
        try:
            check_all(model, config)
        except (TypeError, ValueError) as e:
            refusals[name] = str(e)
    if 'native' in refusals:
        return False, refusals['native']
    shared = count_in_words(sum(len(set(kinds(site.blocks))) for site in find_stages(model)))
    fields = ', '.join(field for field in configs if field not in refusals)
    return True, f"{fields}; {'unsplit' if 'split' in refusals else 'all'} methods; at least {shared}"


def predict_parameters(model: nn.Module, config: OdeConfig) -> int:
    """Those left after `convert_(model, config)`, for native fields."""
    replaced: tuple[str, ...] = ()
    total = 0
    for site in find_stages(model):
        blocks = site.converted(config)
        replaced += tuple(f'{site.prefix}{layer}.' for layer in blocks)
        shared = dict(zip(assignment(config, blocks), blocks.values(), strict=True))
        total += sum(map(count_parameters, shared.values()))
    everything = model.named_parameters(remove_duplicate=False)  # they may be tied, between blocks or with others
    return total + sum(p.numel() for p in {p for name, p in everything if not name.startswith(replaced)})


def choose_size(model: nn.Module, target: int | float | str, config: OdeConfig = DEFAULT) -> OdeConfig:
    """Choose the number of shared blocks, `phases`, as many as a size allows, and of steps, if config has none.

    Args:
        target: Largest size: a share of the blocks to convert, such as 0.25 or '25%'; a number of parameters, such as
            3_000_000 or '3M'; or what the parameters take in the model's dtype, such as '10MB'.
        config: All settings but phases. Without steps, K is half of the layers, or up to two for each shared block; all
            layers for a model with several sequences or kinds of blocks.

    Raises TypeError if the model cannot be converted, ValueError if the target is too small or the settings do not fit.

    Examples:
        >>> config = choose_size(vit, '25%')
        >>> print(convert_(vit, config))
    """
    config = OdeConfig.from_keywords(config, {}, 'choose_size')
    if config.field != 'native':
        raise ValueError("choose_size works only for field='native'. Set phases yourself.")
    check_convertible(model, replace(config, phases=1))
    size = parse_size(target, next(model.parameters()).element_size())
    parts = [site.converted(config) for site in find_stages(model)]
    layers, total = max(map(len, parts)), sum(map(len, parts))

    def taken(phases: int) -> int:
        """Parameters or, for a share, blocks that are kept."""
        each = replace(config, phases=phases)
        if isinstance(size, float):
            return sum(len(set(assignment(each, blocks))) for blocks in parts)
        return predict_parameters(model, each)
    most = min(layers if (k := config.resolve(len(blocks), i).steps_and_end[0]) >= len(blocks) else k
               for i, blocks in enumerate(parts))
    limit = size * total + 1e-9 if isinstance(size, float) else size
    phases = max((phases for phases in range(1, most + 1) if taken(phases) <= limit), default=0)
    if not phases:
        all_of = f'{total} blocks' if isinstance(size, float) else f'{count_parameters(model):,} parameters'
        raise ValueError(f"'{target}' of {all_of} is too little: phases=1 leaves {taken(1):,}. Write a share of the "
                         "blocks as '25%'.")
    return with_suitable_steps(model, replace(config, phases=phases))


def with_suitable_steps(model: nn.Module, config: OdeConfig) -> OdeConfig:
    first, *others = find_stages(model)
    if config.steps is not None or others or len(set(kinds(first.blocks))) > 1:
        return config
    return replace(config, steps=min(layers := len(first.converted(config)), max(layers // 2, 2 * config.phases)))


def parse_size(size: int | float | str, bytes_each: float = 4.) -> int | float:
    """A number of parameters, such as 3_000_000, '3M' or '10MB'; a float up to 1 for a share, such as '25%' or 0.25."""
    text = str(int(size) if isinstance(size, Real) and size > 1 and size % 1 == 0 else size)
    match = re.fullmatch(r'(\d+(?:_\d+)*(?:\.\d*)?(?:e\d+)?) ?(%|[kKMGB]|[kKMG]B)?', text.strip())
    number, unit = (match[1], match[2] or '') if match else ('0', '')
    share = unit == '%' or ('.' in number and 'e' not in number and not unit)
    value = float(number) * {'%': 1e-2, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'B': 1e9}.get(unit[:1], 1.)
    if len(unit) == 2:
        value /= bytes_each
    if not 0 < value < math.inf or (share and value > 1):
        raise ValueError('expected a number of parameters, such as 3M, a share up to 100%, such as 25%, or bytes, such '
                         f'as 10MB; got {size!r}')
    return value if share else int(value)
