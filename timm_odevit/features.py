"""Features of an ODE-ViT at given times, for dense prediction."""
from itertools import pairwise
from typing import Any

from timm.models._features import FeatureGetterNet, FeatureInfo
from torch import Tensor, nn

from .ode.blocks import find_ode_blocks
from .settings import many, number

__all__ = ['FeaturesAtTimes', 'check_times']


def check_times(times: Any) -> tuple[float, ...]:
    """Relative times in (0, 1], strictly increasing; ValueError for others."""
    what = 'strictly increasing relative times, such as (0.25, 0.5, 1.0)'
    checked: tuple[float, ...] = many(number(0., 1., open='('), what)('out_times', times)
    if not checked or any(a >= b for a, b in pairwise(checked)):
        raise ValueError(f'out_times must be {what}; got {times!r}.')
    return checked


class FeaturesAtTimes(FeatureGetterNet):
    """Maps [B, D, H, W] of the patch tokens at relative times of the ODE, whatever the number of steps.

    `timm.create_model(..., features_only=True, out_times=(0.25, 0.5, 1.0))` makes one. A time stands for the end of the
    nearest step; `model.model.blocks.steps` may change between calls, and `feature_info` with it.

    Raises:
        ValueError: The model has no single sequence of blocks, or two times lie at the end of one step.
    """
    times: tuple[float, ...]
    _first: FeatureInfo  # at the first number of steps

    def __init__(self, model: nn.Module, out_times: tuple[float, ...], norm: bool = False, **kwargs: Any) -> None:
        stages = len(find_ode_blocks(model))
        if stages != 1:
            needed, has = ('one sequence of blocks', f'has {stages} stages') if stages else ('an ODE-ViT', 'is not one')
            raise ValueError(f'out_times needs {needed}, but this {type(model).__name__} {has}. Give out_indices.')
        times = check_times(out_times)
        super().__init__(model, out_indices=_indices(model, times), norm=norm, prune=False)
        self.times = times

    @property
    def feature_info(self) -> FeatureInfo:
        """timm's description of the maps, at the present number of steps."""
        model: Any = self._modules.get('model')
        if model is None:  # while timm's constructor runs
            return self._first
        return FeatureInfo([dict(info) for info in model.feature_info], _indices(model, self.times))

    @feature_info.setter
    def feature_info(self, value: FeatureInfo) -> None:
        self._first = value

    def forward(self, x: Tensor) -> list[Tensor]:
        """Maps [B, D, H, W] of images [B, C, H, W], one per time."""
        model: Any = self.model
        return model.forward_intermediates(
            x, indices=_indices(model, self.times), norm=self.norm, output_fmt='NCHW', intermediates_only=True)


def _indices(model: Any, times: tuple[float, ...]) -> tuple[int, ...]:
    """The indices in the blocks of the steps that end nearest to some times."""
    steps = model.blocks.steps
    ends = [max(1, round(t * steps)) for t in times]
    if len(set(ends)) < len(ends):
        raise ValueError(f'out_times={times}: with {steps} steps, two of these times are nearest to the end of one '
                         f'step. Give times at least {1 / steps:.3g} apart, or more steps.')
    return tuple(len(model.blocks.before) + end - 1 for end in ends)
