"""The size of a student: the one that suits images and minutes, or the smallest that keeps a share."""
import copy
import time
from dataclasses import replace
from typing import Any

from torch import nn

from ..convert.conversion import convert_
from ..convert.refusals import check_convertible
from ..convert.sizing import choose_size, predict_parameters
from ..ode.blocks import count_parameters
from ..ode.config import DEFAULT, OdeConfig
from ..training.calibrate import calibrate_
from .judge import BATCH, SAMPLE, Images, outputs_of, value_of

__all__ = ['base_settings', 'smallest_size', 'suitable']

TRIALS = 4  # each halves the range that is left: 4 find the size to 5 % of the model's parameters
MANY, SEEN = 5_000, 100_000  # images, and images seen in training, from which a quarter of the parameters suits
UPDATE = 4.5  # times that a forward pass of the model takes for each image of an update


def base_settings(model: nn.Module) -> OdeConfig:
    """The default settings, with a method that suits the model's blocks."""
    try:
        check_convertible(model)
    except ValueError:  # they cannot be split into attention and MLP
        base = replace(DEFAULT, method='euler')
        check_convertible(model, base)
        return base
    return DEFAULT


def suitable(model: nn.Module, found: Images, minutes: float) -> float:
    """The share of the model's parameters that suits images and minutes of training: a quarter, or a half if few.

    From hub/lab/sizes.md: after 50,000 images, a quarter keeps 78 % and a half 91 %.
    """
    batch = found.learned.images[:BATCH]
    outputs_of(model, batch)
    started = time.perf_counter()
    outputs_of(model, batch)
    seen = 60. * minutes / UPDATE * len(batch) / (time.perf_counter() - started)
    return 0.25 if found.data.count() >= MANY and seen >= SEEN else 0.5


def smallest_size(
        model: nn.Module, found: Images, base: OdeConfig, keep: float, minutes: float, progress: bool,
) -> OdeConfig:
    """A binary search over the number of parameters, between one shared block and the model itself.

    A student that does not keep the share as initialised, of what is measured of the model on the images that choose,
    is calibrated, each for a fourth of the minutes.

    Returns:
        Settings of the smallest that kept enough; of one phase per layer, which is the model itself, if none did.
    """
    exact = best = choose_size(model, 1., base, init='svd_data')
    low, high = predict_parameters(model, replace(exact, phases=1)), count_parameters(model)
    wanted = keep * value_of(model, found.choosing, found.measure)
    few = found.learned.images[:SAMPLE].to(next(model.parameters()).device)
    tried: list[Any] = [exact]
    for _ in range(TRIALS):
        middle = (low + high) // 2
        config = choose_size(model, middle, base, init='svd_data')
        if config in tried:
            break  # nothing lies between
        tried.append(config)
        student = copy.deepcopy(model)
        convert_(student, config, images=few, keep_original=False)
        value = value_of(student, found.choosing, found.measure)
        if value < wanted:
            calibrate_(student, model, found.data.train, minutes=minutes / TRIALS, progress=progress)
            value = value_of(student, found.choosing, found.measure)
        if progress:
            print(f'{count_parameters(student):,} parameters: {value:.1f} % {found.measure}, {wanted:.1f} % wanted')
        if value >= wanted:
            best, high = config, count_parameters(student)
        else:
            low = middle
    return best
