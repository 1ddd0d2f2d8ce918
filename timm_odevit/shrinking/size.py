"""The size of a student: the one that suits images and minutes, or the smallest that keeps a share."""
import copy
import time
from dataclasses import replace
from typing import Any

from torch import nn

from ..convert.conversion import Conversion, convert_
from ..convert.planning import check_convertible, choose_size, predict_parameters
from ..ode.blocks import count_parameters
from ..ode.config import DEFAULT, OdeConfig
from ..training.run import calibrate_
from .judge import BATCH, SAMPLE, Material, outputs_of, value_of

__all__ = ['SHARE', 'base_settings', 'converted', 'settings', 'smallest_size', 'suitable']

SHARE = 0.45  # of the minutes for each of the two students, at most
TRIALS = 4  # each halves the range that is left: 4 find the size to 5 % of the model's parameters
MANY, SEEN = 5_000, 100_000  # images, and images seen in training, from which a quarter of the parameters suits
UPDATE = 4.5  # times that a forward pass of the model takes for each image of an update


def settings(material: Material, size: Any, keep: float | None, minutes: float, progress: bool) -> OdeConfig:
    """Settings of a student of a size or, without one, that keeps a share or suits images and minutes."""
    base = base_settings(material.model)
    if keep is not None:
        return smallest_size(material, base, keep, minutes / 4, progress)
    return choose_size(material.model, suitable(material, minutes) if size is None else size, base, init='svd_data')


def base_settings(model: nn.Module) -> OdeConfig:
    """The default settings, with a method that suits the model's blocks; raises TypeError if none does."""
    try:
        check_convertible(model)
    except ValueError:  # they cannot be split into attention and MLP
        base = replace(DEFAULT, method='euler')
        check_convertible(model, base)
        return base
    return DEFAULT


def suitable(material: Material, minutes: float) -> float:
    """The share of the model's parameters that suits images and minutes: a quarter, or a half if they are few.

    From hub/lab/sizes.md: after 50,000 images, a quarter keeps 78 % and a half 91 %.
    """
    batch = material.learned.images[:BATCH]
    outputs_of(material.model, batch)
    started = time.perf_counter()
    outputs_of(material.model, batch)
    seen = 60. * SHARE * minutes / UPDATE * len(batch) / (time.perf_counter() - started)
    return 0.25 if material.data.count() >= MANY and seen >= SEEN else 0.5


def smallest_size(material: Material, base: OdeConfig, keep: float, minutes: float, progress: bool) -> OdeConfig:
    """A binary search over the number of parameters, between one shared block and the model itself.

    A student that does not keep the share as initialised, of what is measured of the model on the images that choose,
    is calibrated, each for a fourth of the minutes.

    Returns:
        Settings of the smallest that kept enough; of one phase per layer, which is the model itself, if none did.
    """
    model, choosing, measure = material.model, material.choosing, material.measure
    exact = best = choose_size(model, 1., base, init='svd_data')
    low, high = predict_parameters(model, replace(exact, phases=1)), count_parameters(model)
    wanted = keep * value_of(model, choosing, measure)
    tried: list[Any] = [exact]
    for _ in range(TRIALS):
        middle = (low + high) // 2
        config = choose_size(model, middle, base, init='svd_data')
        if config in tried:
            break  # nothing lies between
        tried.append(config)
        student, _ = converted(material, config)
        value = value_of(student, choosing, measure)
        if value < wanted:
            calibrate_(student, model, material.data.train, minutes=minutes / TRIALS, progress=progress)
            value = value_of(student, choosing, measure)
        if progress:
            print(f'{count_parameters(student):,} parameters: {value:.1f} % {measure}, {wanted:.1f} % wanted')
        if value >= wanted:
            best, high = config, count_parameters(student)
        else:
            low = middle
    return best


def converted(material: Material, config: OdeConfig) -> tuple[nn.Module, Conversion]:
    """A student, and what was done."""
    student = copy.deepcopy(material.model).requires_grad_(True)
    few = material.learned.images[:SAMPLE].to(next(student.parameters()).device)
    return student, convert_(student, config, images=few, keep_original=False)
