"""calibrate_: fit the shared blocks to the teacher in minutes, on images without labels."""
import copy
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from timm.utils import random_seed
from torch import Tensor, nn

from ..data.config import DataConfig
from ..data.read import read_data
from ..hooks import lent, random_states_kept, surely
from .config import CalibrationConfig
from .fit import count_updates
from .matching import check_converted_from
from .recipe import Recipe, Stage
from .resume import Plan
from .stages import run_stages

__all__ = ['calibrate_']

JUDGED = 3  # batches by which the start and the end are compared


def calibrate_(
        model: nn.Module,
        teacher: nn.Module,
        images: Tensor | Iterable[Any],
        *,
        progress: bool = True,
        config: CalibrationConfig | None = None,
        **settings: Any,
) -> list[dict[str, float]]:
    """Fit a converted model in place to the model that it was converted from, in minutes, on images without labels.

    First, each step learns on its own, from the teacher's state to the teacher's next state (StepwiseTask); then the
    unrolled steps learn the whole trajectory (TrajectoryDistillationTask), each in half of the time. Only the shared
    blocks learn. Of the weights before, between and after the parts, those that come nearest to the teacher's outputs
    on a few of the batches are kept; a warning says if they are the first. A copy is trained and its weights are
    assigned at the end, so that an interrupted or failed call leaves the model as it was. A student that already equals
    its teacher is left as it is, in no time.

    Args:
        model: Converted model.
        teacher: The model that it was converted from: a `copy.deepcopy` made before `convert_`.
        images: Images [N, C, H, W], normalised for the model; or a loader with a length that yields such batches, or
            (images, labels), whose labels are ignored.
        progress: Show a progress bar.
        config: Settings.
        **settings: Any of them, in place of `config`, such as minutes=10; see CalibrationConfig.

    Returns:
        The records of all epochs, as returned by `fit`, each with its stage.

    Raises:
        TypeError: The model is not converted, or a keyword is unknown.
        ValueError: Model and teacher do not match; or a setting or the images are invalid.
        FloatingPointError: The loss stopped being finite.

    Examples:
        >>> history = calibrate_(student, teacher, images, minutes=10)
    """
    config = CalibrationConfig.from_keywords(config, settings, 'calibrate_')
    check_converted_from(model, teacher)
    data = read_data(images, model, DataConfig(batch_size=config.batch_size), labels=False, held_out=0.)
    count_updates(data.train)
    recipe = _recipe(config)
    student, device = copy.deepcopy(model), next(model.parameters()).device
    with lent(teacher), random_states_kept(device):
        random_seed(recipe.seed)
        few = list(islice(data.train, JUDGED))
        history, state = run_stages(
            recipe, student, teacher, replace(data, val=few), few[0][0][:1], Plan(),
            minutes=None if config.epochs else config.minutes or 5., progress=progress)
    surely(lambda: model.load_state_dict(state))
    return history


def _recipe(config: CalibrationConfig) -> Recipe:
    """The packaged recipe, with the settings of a call."""
    recipe = Recipe.load('calibrate')

    def stage(i: int, lr: float | None) -> Stage:
        of = recipe.stages[i]
        fit = {**(of.fit or {}), 'amp': config.amp}
        if config.epochs is not None:
            fit = {**fit, 'minutes': None, 'epochs': config.epochs[i]}
        return replace(of, fit=fit) if lr is None else replace(of, fit={**fit, 'lr': lr}, scale_lr=False)
    stages = [stage(0, config.lr), stage(1, config.unrolled_lr)]
    used = [of for i, of in enumerate(stages) if config.epochs is None or config.epochs[i]]
    return replace(recipe, stages=tuple(used), seed=config.seed % 2 ** 31)
