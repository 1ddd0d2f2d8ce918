"""Solver: the sequence of steps that a configuration asks for."""
from torch import nn

from .adaptive import AdaptiveStep
from .config import OdeConfig
from .fields import Field
from .methods import METHODS
from .tokens import TokenMerging

__all__ = ['Solver']


class Solver(nn.ModuleList):
    """The K steps of a resolved configuration on [t, t + T]; what a step does is in methods.py.

    Args:
        config: Method, steps and T, resolved.
        field: Vector field; a step holds the one that applies where it starts, an adaptive step the whole one.
        t: Time at which the first step starts.
        num_prefix_tokens: How many tokens come before those of the patches, which may be merged.
    """

    def __init__(self, config: OdeConfig, field: Field, t: float = 0., num_prefix_tokens: int = 0) -> None:
        steps, T = config.steps_and_end
        merging = TokenMerging(config.tokens, num_prefix_tokens, t, T) if config.tokens < 1 else None
        h, starts = T / steps, [t + i * (T / steps) for i in range(steps)]
        super().__init__(
            AdaptiveStep(field, start, h, config) if config.adaptive
            else METHODS[config.method](field, start, h, merging, config.averaged) for start in starts)
