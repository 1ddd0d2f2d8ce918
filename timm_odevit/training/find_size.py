"""find_size: the smallest student that keeps a share of its teacher after a short calibration."""
import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.conversion import convert_
from ..convert.sizing import choose_size, parse_size, predict_parameters
from ..convert.svd_data import check_images
from ..evaluation.accuracy import evaluate
from ..evaluation.embeddings import evaluate_embeddings
from ..ode.blocks import count_parameters
from ..ode.config import DEFAULT, OdeConfig
from ..settings import integer, number
from .calibrate import calibrate_
from .config import CalibrationConfig

BATCH = 64  # held-out images that run at once, and images for init svd_data

__all__ = ['SizeSearch', 'SizeTried', 'find_size']


@dataclass(frozen=True)
class SizeTried:
    """One size that a search tried.

    Attributes:
        config: Settings of the conversion.
        parameters: Parameters of the student.
        initialised: Agreement with the teacher, or mean cosine of the embeddings, before calibration, in percent.
        calibrated: The same after calibration; None if none was needed.
    """
    config: OdeConfig
    parameters: int
    initialised: float
    calibrated: float | None

    @property
    def kept(self) -> float:
        """The better of both."""
        return self.initialised if self.calibrated is None else max(self.initialised, self.calibrated)


@dataclass(frozen=True)
class SizeSearch:
    """What `find_size` found; print it for a table.

    Attributes:
        student: The smallest student that kept enough, calibrated if it did not as initialised; if none did, one phase
            per layer, which is the model itself unless other steps or another method were asked for.
        config: Its settings.
        keep: What was asked for, as a share.
        measure: What was kept: 'agreement' or 'cosine'.
        images: Number of images that it was measured on.
        total: Parameters of the teacher.
        tried: All sizes, in the order in which they were tried.
    """
    student: nn.Module
    config: OdeConfig
    keep: float
    measure: str
    images: int
    total: int
    tried: tuple[SizeTried, ...]

    def __str__(self) -> str:
        heads = ['parameters', 'of the teacher', 'phases', 'rank', f'{self.measure}, initialised', 'calibrated']
        lines = [f"| {' | '.join(heads)} |", '|' + ' --- |' * len(heads)]
        lines += [
            f'| {row.parameters:,} | {100 * row.parameters / self.total:.1f} % | {row.config.phases} | '
            f"{row.config.rank if row.config.time == 'low_rank' else '-'} | {row.initialised:.1f} % | "
            f"{'-' if row.calibrated is None else f'{row.calibrated:.1f} %'} |"
            for row in sorted(self.tried, key=lambda row: row.parameters)]
        parameters = count_parameters(self.student)
        what = 'agreement with the teacher' if self.measure == 'agreement' else "cosine with the teacher's embeddings"
        found = ('nothing smaller than the teacher' if parameters >= self.total else
                 f'{parameters:,} parameters, {100 * parameters / self.total:.1f} % of the teacher')
        return '\n'.join([*lines, f'{100 * self.keep:g} % {what} on {self.images:,} images held out: {found}'])


def find_size(
        model: nn.Module,
        images: Tensor | Iterable[Any],
        held_out: Tensor | Iterable[Any],
        *,
        keep: float | str = 0.95,
        trials: int = 4,
        ode: OdeConfig = DEFAULT,
        progress: bool = True,
        config: CalibrationConfig | None = None,
        **settings: Any,
) -> SizeSearch:
    """Search for the smallest student that keeps a share of the model, by trying one student of each size.

    A binary search over the number of parameters, between one shared block and the model itself. A student that does
    not keep enough as initialised is calibrated. What is kept is the share of the held-out images with the teacher's
    top-1 class or, without classes, the mean cosine between both embeddings; no labels are needed. Agreement is
    stricter than accuracy: of the teacher's accuracy on CIFAR-100, a published student with 27 % of the parameters has
    96.6 %, and the teacher's class for 82.2 % of the images.

    Args:
        model: Model that can be converted; it is left as it is.
        images: Images [N, C, H, W], normalised for the model, or a loader with a length, as for `calibrate_`.
        held_out: Other images [N, C, H, W], or batches of them, to measure on.
        keep: Share to keep, above 0 and below 1, such as 0.95 or '95%'.
        trials: Sizes to try; each halves the range that is left. 4 find the size to 5 % of the teacher's parameters.
        ode: All other settings of the student, as for `choose_size`.
        progress: Show the progress bars of the calibrations.
        config: Settings of each calibration.
        **settings: Any of them, in place of `config`, such as minutes=1, the time for one size; see CalibrationConfig.

    Returns:
        A SizeSearch, with the student.

    Raises:
        TypeError: The model cannot be converted, or a keyword is unknown.
        ValueError: A setting or the images are invalid.
        FloatingPointError: The loss stopped being finite.
    """
    config = CalibrationConfig.from_keywords(config, settings, 'find_size')
    share = number(0., 1., open='()')('keep', parse_size(keep) if isinstance(keep, str) else keep)
    trials = integer(1)('trials', trials)
    held = _batches(held_out)
    first: Any = images if isinstance(images, Tensor) else next(iter(images), None)
    first = first[0] if isinstance(first, (list, tuple)) else first
    check_images(first)
    some = first[:BATCH].to(next(model.parameters()).device)
    exact, student, best = choose_size(model, 1., ode), None, None
    low, high = predict_parameters(model, replace(exact, phases=1)), count_parameters(model)
    tried: list[SizeTried] = []
    for _ in range(trials):
        middle = (low + high) // 2
        chosen = choose_size(model, middle, ode, init='svd_data')
        if chosen == exact or any(chosen == row.config for row in tried):
            break  # nothing lies between
        made, initialised = _convert(model, chosen, some, held)
        calibrated = None
        if initialised < 100 * share:
            calibrate_(made, model, images, progress=progress, config=config)
            calibrated = _kept(made, model, held)
        tried.append(SizeTried(chosen, count_parameters(made), initialised, calibrated))
        if tried[-1].kept >= 100 * share:
            student, best, high = made, chosen, tried[-1].parameters
        else:
            low = middle
    if student is None or best is None:
        best, (student, kept) = exact, _convert(model, exact, some, held)
        tried.append(SizeTried(exact, count_parameters(student), kept, None))
    measure, total = 'agreement' if getattr(model, 'num_classes', 0) else 'cosine', count_parameters(model)
    return SizeSearch(student, best, share, measure, sum(len(x) for x, _ in held), total, tuple(tried))


def _convert(
        model: nn.Module, chosen: OdeConfig, images: Tensor, held: list[tuple[Tensor, Tensor]],
) -> tuple[nn.Module, float]:
    """A converted copy, and what it keeps, in percent."""
    student = copy.deepcopy(model)
    convert_(student, chosen, images=images, keep_original=False)
    return student, _kept(student, model, held)


def _kept(student: nn.Module, teacher: nn.Module, held: list[tuple[Tensor, Tensor]]) -> float:
    """Agreement of the classes, or mean cosine of the embeddings, in percent."""
    if getattr(teacher, 'num_classes', 0):
        kept = evaluate(student, held, teacher=teacher).results[-1].agreement
    else:
        cosine = evaluate_embeddings(student, held, teacher=teacher).results[-1].cosine
        kept = None if cosine is None else 100 * cosine
    return math.nan if kept is None else kept


def _batches(images: Any) -> list[tuple[Tensor, Tensor]]:
    """Batches of images, with labels that do not matter."""
    batches = images.split(BATCH) if isinstance(images, Tensor) else images
    found = [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in batches]
    for batch in found or [None]:
        check_images(batch)
    return [(batch, torch.zeros(len(batch), dtype=torch.long)) for batch in found]
