"""Choose phases and rank for a given number of parameters."""
import math
import re
from bisect import bisect_right
from dataclasses import replace
from numbers import Integral, Real

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
    replaced: list[str] = []
    total = 0
    for stage, site in enumerate(find_stages(model)):
        blocks = site.blocks
        first, last = config.converted_layers(len(blocks))
        chosen = blocks[first:last + 1]
        replaced += [f'{site.name}.blocks.{i}.'.lstrip('.') for i in range(first, last + 1)]
        assigned = assignment(config.resolve(len(chosen), stage), chosen, first)
        for index in set(assigned):
            members = [block for block, o in zip(chosen, assigned, strict=True) if o == index]
            total += count_parameters(members[0])
            if config.time != 'autonomous':
                total += len(members) * _residual(members[0], config.rank)
    everything = model.named_parameters(remove_duplicate=False)  # they may be tied, between blocks or with others
    kept = {p: p.numel() for name, p in everything if not name.startswith(tuple(replaced))}
    return total + sum(kept.values())


def choose_size(
        model: nn.Module,
        target: int | float | str,
        config: OdeConfig = DEFAULT,
        *,
        init: str = 'svd',
) -> OdeConfig:
    """Choose the phases and the rank that make the best use of a number of parameters.

    This gives one shared block, with residuals per layer of the largest rank that fits; hub/RESULTS.md shows how much
    accuracy each size keeps. A target of all the model's parameters gives one phase per layer, which is the model
    itself.

    Args:
        model: Model that can be converted.
        target: Largest size of the converted model: a number of parameters, such as 3_000_000 or '3M'; a share of the
            model's, such as 0.25 or '25%'; or what they take in the model's dtype, such as '10MB' or '500kB'.
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
    plain = replace(config, time='autonomous', rank=0, phases=1, init='mean')
    check_convertible(model, replace(plain, boundaries='uniform'))
    if config.boundaries != 'uniform':
        raise ValueError(f"choose_size chooses the phases, so boundaries must be 'uniform'; got {config.boundaries!r}. "
                         'Leave them out.')
    if config.field != 'native':
        raise ValueError("choose_size works only for field='native'. For another field, set time, rank and phases "
                         'yourself.')
    total = count_parameters(model)
    wanted = _target(target, total, model)
    smallest = predict_parameters(model, plain)
    if wanted < smallest:
        share = f" For a share of the model, give '{wanted}%'." if wanted <= 100 else ''
        raise ValueError(
            f'{wanted:,} parameters are too few: one shared block and everything outside the blocks take '
            f'{smallest:,} of {total:,} ({100 * smallest / total:.1f} %).{share}')
    first, last = config.converted_layers(max(len(site.blocks) for site in find_stages(model)))
    layers = last - first + 1
    exact = replace(plain, phases=layers)
    if predict_parameters(model, exact) <= wanted:
        return exact
    ranked = replace(plain, time='low_rank', rank=1, init=init)
    if predict_parameters(model, ranked) <= wanted:
        ranks = range(1, 2 ** 16)
        largest = bisect_right(ranks, wanted, key=lambda r: predict_parameters(model, replace(ranked, rank=r)))
        return replace(ranked, rank=largest)
    vectors = replace(plain, time='low_rank')
    return vectors if predict_parameters(model, vectors) <= wanted else plain


def _residual(block: nn.Module, rank: int) -> int:
    size = 0
    for p in block.parameters():
        if p.ndim <= 1:
            size += p.numel()
        elif rank:
            rows, columns = matrix_shape(p)
            size += min(rank, rows, columns) * (rows + columns)
    return size


def parse_size(text: str, bytes_each: float = 4.) -> int | float:
    """A size in words as a number of parameters or, of a share, as a float.

    Args:
        text: Such as '3M', '25%', '0.25' or '10MB'.
        bytes_each: Bytes that a parameter takes.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r'([0-9][0-9_.]*(?:e[0-9]+)?) ?(%|[kKMGB]|[kKMG]B)?', text.strip())
    try:
        value = float(found[1]) if found else 0.
    except ValueError:
        value = 0.
    unit = (found[2] or '') if found else ''
    share = unit == '%' or ('.' in text and not unit and value <= 1)
    value *= {'%': 1e-2, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'B': 1e9}.get(unit[:1], 1.)
    if len(unit) == 2:
        value /= bytes_each
    whole = '.' not in text or unit
    if not 0 < value < math.inf or (share and value > 1) or not (share or whole):
        raise ValueError(
            'expected a number of parameters, such as 3M, a share up to 100%, such as 25%, or bytes, such as 10MB; '
            f"got '{text}'")
    return value if share else int(value)


def _target(target: int | float | str, total: int, model: nn.Module) -> int:
    if isinstance(target, Integral) and not isinstance(target, bool):  # NumPy's numbers too
        target = int(target)
    elif isinstance(target, Real) and not isinstance(target, bool):
        target = float(target)
    elif isinstance(target, str):
        target = parse_size(target, next(model.parameters()).element_size())
    whole = isinstance(target, int) or (isinstance(target, float) and (target <= 1 or target.is_integer()))
    if isinstance(target, bool) or not whole or not 0 < target < math.inf:
        raise ValueError(
            f"target must be a number of parameters, a share of the model such as 0.25, or '10MB'; got {target!r}.")
    return int(target * total) if isinstance(target, float) and target <= 1 else int(target)
