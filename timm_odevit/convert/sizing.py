"""Choose phases and rank for a given number of parameters."""
import math
import re
from bisect import bisect_right
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from torch import nn

from ..ode.blocks import count_parameters
from ..ode.config import DEFAULT, OdeConfig
from ..ode.time_dependence import matrix_shape
from ..settings import one_of
from .block_kinds import find_stages
from .initialisation import assignment
from .refusals import check_convertible

__all__ = ['choose_size', 'parse_size', 'predict_parameters']


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
        if config.time != 'autonomous':
            total += sum(_residual(block, config.rank) for block in blocks)
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

    This gives one shared block, with residuals per layer of the largest rank that fits (hub/RESULTS.md shows how much
    accuracy each size keeps), or a phase per layer, if all the model's parameters fit.

    Args:
        model: Model that can be converted.
        target: Largest size of the converted model: a number of parameters, such as 3_000_000 or '3M'; a share of the
            model's, such as 0.25 or '25%'; or what they take in the model's dtype, such as '10MB'.
        config: All other settings; time, rank, phases, boundaries and init are chosen for you.
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
        raise ValueError("choose_size works only for field='native'. For another field, set time, rank and phases "
                         'yourself.')
    ranked = replace(config, time='low_rank', rank=1, phases=1, boundaries='uniform', init=init)
    plain = replace(ranked, time='autonomous', rank=0, init='mean')
    check_convertible(model, plain)

    def of_rank(rank: int) -> OdeConfig:
        return replace(ranked, rank=rank, init=init if rank else 'mean')
    total, smallest = count_parameters(model), predict_parameters(model, plain)
    wanted = _target(target, total, next(model.parameters()).element_size())
    if wanted < smallest:
        share = f" For a share of the model, give '{wanted}%'." if wanted <= 100 else ''
        raise ValueError(
            f'{wanted:,} parameters are too few: one shared block and everything outside the blocks take '
            f'{smallest:,} of {total:,} ({100 * smallest / total:.1f} %).{share}')
    layers = max(len(site.converted(config)) for site in find_stages(model))
    whole = replace(plain, phases=layers)
    if predict_parameters(model, whole) <= wanted:
        return whole
    ranks = bisect_right(range(2 ** 16), wanted, key=lambda rank: predict_parameters(model, of_rank(rank)))
    return of_rank(ranks - 1) if ranks else plain


def _residual(block: nn.Module, rank: int) -> int:
    matrices = [matrix_shape(p) for p in block.parameters() if p.ndim > 1]
    return (sum(p.numel() for p in block.parameters() if p.ndim <= 1)
            + sum(min(rank, *shape) * sum(shape) for shape in matrices))


def parse_size(text: str, bytes_each: float = 4.) -> int | float:
    """A size, such as '3M', '25%', '0.25' or '10MB', as a number of parameters or, of a share, as a float."""
    match = re.fullmatch(r'(\d+(?:_\d+)*(?:\.\d*)?(?:e\d+)?) ?(%|[kKMGB]|[kKMG]B)?', text.strip())
    number, unit = (match[1], match[2] or '') if match else ('0', '')
    share = unit == '%' or ('.' in number and not unit)
    value = float(number) * {'%': 1e-2, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'B': 1e9}.get(unit[:1], 1.)
    if len(unit) == 2:
        value /= bytes_each
    if not 0 < value < math.inf or (share and value > 1):
        raise ValueError(
            'expected a number of parameters, such as 3M, a share up to 100%, such as 25%, or bytes, such as 10MB; '
            f"got '{text}'")
    return value if share else int(value)


def _target(target: int | float | str, total: int, bytes_each: int) -> int:
    value: Any = parse_size(target, bytes_each) if isinstance(target, str) else target
    size: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 < size < math.inf or (size > 1 and size % 1):
        raise ValueError(
            f"target must be a number of parameters, a share of the model such as 0.25, or '10MB'; got {target!r}.")
    return int(size) if isinstance(value, Integral) or size > 1 else int(float(size) * total)
