"""Features of an ODE-ViT at given times, for dense prediction."""
from itertools import pairwise
from typing import Any

from timm.models._features import FeatureGetterNet, FeatureInfo
from torch import Tensor, nn

from .ode.blocks import find_ode_blocks
from .settings import many, number

_WHAT = 'strictly increasing relative times, such as (0.25, 0.5, 1.0)'


class FeaturesAtTimes(FeatureGetterNet):
    """Maps [B, D, H, W] at relative times of the ODE, each at the end of the nearest step; the steps may change.

    `timm.create_model(..., features_only=True, out_times=(0.25, 0.5, 1.0))` makes one.
    """

    def __init__(self, model: nn.Module, out_times: tuple[float, ...], norm: bool = False, **kwargs: Any) -> None:
        if len(find_ode_blocks(model)) != 1:
            raise ValueError(f'out_times needs an ODE-ViT without stages; got a {type(model).__name__}.')
        times: tuple[float, ...] = many(number(0., 1., open='('), _WHAT)('out_times', out_times)
        if not times or any(a >= b for a, b in pairwise(times)):
            raise ValueError(f'out_times must be {_WHAT}; got {out_times!r}.')
        indices = _indices(model, times)
        super().__init__(model, out_indices=indices, norm=norm, prune=False)
        info: Any = model.feature_info
        self.feature_info = FeatureInfo([dict(row) for row in info], indices)  # a copy, which other steps do not change
        self.times = times

    def forward(self, x: Tensor) -> list[Tensor]:
        model: Any = self.model
        return model.forward_intermediates(
            x, indices=_indices(model, self.times), norm=self.norm, output_fmt='NCHW', intermediates_only=True)


def _indices(model: Any, times: tuple[float, ...]) -> tuple[int, ...]:
    """The steps that end nearest to some times, as indices of the blocks."""
    steps = model.blocks.steps
    ends = [max(1, round(t * steps)) for t in times]
    if len(set(ends)) < len(ends):
        raise ValueError(f'out_times={times}: two of them are nearest to the end of one of {steps} steps. Give times '
                         f'at least {1 / steps:.3g} apart.')
    return tuple(len(model.blocks.before) + end - 1 for end in ends)
