"""Which phases and rank fit into a number of parameters."""
from dataclasses import replace
from typing import Any, Optional, Sequence, Tuple, Union

from torch import nn

from .config import OdeConfig
from .convert import check_convertible, count_parameters
from .families import find_sites
from .init import owners
from .time_dependence import matrix_shape

__all__ = ['choose_size', 'predict_parameters']


def predict_parameters(model: nn.Module, config: OdeConfig) -> int:
    """Parameters that `convert_(model, config)` would leave, without converting; native fields, boundaries not measured."""
    total = count_parameters(model)
    for stage, site in enumerate(find_sites(model)):
        blocks = site.blocks
        first, last = config.blocks or (0, len(blocks) - 1)
        chosen = blocks[first:last + 1]
        owner = owners(config.resolve(len(chosen), stage), chosen, first)
        total -= sum(count_parameters(block) for block in chosen)
        for index in set(owner):
            members = [block for block, o in zip(chosen, owner, strict=True) if o == index]
            total += count_parameters(members[0])
            if config.time != 'autonomous':
                total += len(members) * _residual(members[0], config.rank)
    return total


def choose_size(model: nn.Module, target: Union[int, float], config: OdeConfig = OdeConfig()) -> OdeConfig:
    """The phases and the rank that use a number of parameters best.

    One shared block with residuals per layer of the largest rank that fits; where residuals would take more room than
    blocks of their own, as many phases as fit. (See the README for what this keeps of a model, against phases alone.)

    Args:
        model: Model that can be converted.
        target: Largest number of parameters of the converted model: a whole number, or a share of the model's, such
            as 0.25.
        config: All other settings; time, rank, phases and init are chosen.

    Returns:
        Settings for `convert_`.

    Raises:
        ValueError: The target is out of range; the message says what the smallest is.
    """
    check_convertible(model, replace(config, time='autonomous', rank=0, phases=1, boundaries='uniform', init='mean'))
    if config.field != 'native':
        raise ValueError("A size is chosen for field='native'. Give time, rank and phases for another field.")
    total = count_parameters(model)
    wanted = _target(target, total)
    plain = replace(config, time='autonomous', rank=0, phases=1, boundaries='uniform', init='mean')
    smallest = predict_parameters(model, plain)
    if wanted < smallest:
        raise ValueError(
            f'{wanted:,} parameters are too few: one shared block and all that is not a block take {smallest:,} of '
            f'{total:,} ({100 * smallest / total:.1f} %).')
    if wanted >= total:
        return replace(plain, phases=max(len(site.blocks) for site in find_sites(model)))
    best: Optional[Tuple[Any, OdeConfig]] = None
    layers = max(len(site.blocks) for site in find_sites(model))
    for phases in range(1, layers + 1):
        for candidate in _candidates(model, replace(plain, phases=phases), wanted):
            score = _score(candidate, layers)
            if best is None or score > best[0]:
                best = (score, candidate)
    assert best is not None  # the plain one fits
    return best[1]


def _residual(block: nn.Module, rank: int) -> int:
    size = 0
    for p in block.parameters():
        if p.ndim <= 1:
            size += p.numel()
        elif rank:
            rows, columns = matrix_shape(p)
            size += min(rank, rows, columns) * (rows + columns)
    return size


def _target(target: Union[int, float], total: int) -> int:
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not target > 0:
        raise ValueError(f'target must be a number of parameters, or a share of the model such as 0.25; got {target!r}.')
    return int(target * total) if isinstance(target, float) and target <= 1 else int(target)
