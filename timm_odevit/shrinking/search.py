"""The smallest size that keeps a share of the model, by trying some."""
import copy
from dataclasses import replace
from typing import Any

from torch import nn

from ..convert.conversion import convert_
from ..convert.sizing import choose_size, predict_parameters
from ..ode.blocks import count_parameters
from ..ode.config import OdeConfig
from ..training.calibrate import calibrate_
from .images import SAMPLE, Images, value_of

__all__ = ['smallest_size']

TRIALS = 4  # each halves the range that is left: 4 find the size to 5 % of the model's parameters


def smallest_size(
        model: nn.Module, images: Images, base: OdeConfig, keep: float, minutes: float, progress: bool,
) -> OdeConfig:
    """A binary search over the number of parameters, between one shared block and the model itself.

    A student that does not keep enough as initialised is calibrated, each for a fourth of the minutes.

    Args:
        model: The model.
        images: Images; those that choose decide.
        base: All other settings.
        keep: Share of what is measured of the model, or of its agreement with itself, to keep.
        minutes: Minutes for all.
        progress: Print what was tried, and show progress bars.

    Returns:
        Settings of the smallest that kept enough; of one phase per layer, which is the model itself, if none did.
    """
    def kept(student: nn.Module) -> float:
        return value_of(student, images.choosing, images.measure)
    exact = best = choose_size(model, 1., base, init='svd_data')
    low, high, wanted = predict_parameters(model, replace(exact, phases=1)), count_parameters(model), keep * kept(model)
    tried: list[Any] = [exact]
    for _ in range(TRIALS):
        middle = (low + high) // 2
        config = choose_size(model, middle, base, init='svd_data')
        if config in tried:
            break  # nothing lies between
        tried.append(config)
        student = copy.deepcopy(model)
        pictures = images.learned.images[:SAMPLE].to(next(model.parameters()).device)
        convert_(student, config, images=pictures, keep_original=False)
        found = kept(student)
        if found < wanted:
            calibrate_(student, model, images.loader, minutes=minutes / TRIALS, progress=progress)
            found = kept(student)
        if progress:
            print(f'{count_parameters(student):,} parameters: {found:.1f} % {images.measure}, {wanted:.1f} % wanted')
        if found >= wanted:
            best, high = config, count_parameters(student)
        else:
            low = middle
    return best
