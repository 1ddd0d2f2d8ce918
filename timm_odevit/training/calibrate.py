"""calibrate_: fit the shared blocks to the teacher in minutes, on images without labels."""
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import random_seed
from torch import Tensor, nn

from ..distributed import in_first_process, over_processes
from ..evaluation.accuracy import AMP_DTYPES
from ..evaluation.embeddings import evaluate_embeddings
from ..hooks import lent, surely
from ..ode.blocks import find_ode_blocks
from .config import CalibrationConfig
from .fit import count_updates, fit
from .loaders import Unlabelled
from .matching import check_converted_from
from .minutes import EPOCHS, Stream, loss_before, seconds_per_update, updates_in
from .monitor import loader_state_kept, must_fit
from .tasks import StepwiseTask, TrajectoryDistillationTask

__all__ = ['calibrate_']

HIGHEST_LR = (3e-3, 1e-3)  # of the two parts
TRIED = 3  # batches by which the learning rate is chosen and its end is judged
EXACT = 1e-6  # a loss that is rounding


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
        The records of all epochs, as returned by `fit`. With minutes, an epoch is a tenth of a part.

    Raises:
        TypeError: The model is not converted, or a keyword is unknown.
        ValueError: Model and teacher do not match; or a setting or the images are invalid.
        FloatingPointError: The loss stopped being finite.

    Examples:
        >>> history = calibrate_(student, teacher, images, minutes=10)
    """
    config = CalibrationConfig.from_keywords(config, settings, 'calibrate_')
    check_converted_from(model, teacher)
    loader = Unlabelled(images, config.batch_size)
    student = copy.deepcopy(model)
    learning = {id(p) for ode in find_ode_blocks(student) for p in ode.shared.parameters()}
    for p in student.parameters():
        p.requires_grad_(p.requires_grad and id(p) in learning)
    count_updates(loader)
    with lent(teacher):
        history = _train(student, teacher, loader, config, progress)
    surely(lambda: model.load_state_dict(student.state_dict()))
    return history


def _train(
        model: nn.Module, teacher: nn.Module, loader: Unlabelled, config: CalibrationConfig, progress: bool,
) -> list[dict[str, float]]:
    parts: list[Callable[[nn.Module], TrainingTask]] = [
        lambda student: StepwiseTask(student, teacher, verbose=False),
        lambda student: TrajectoryDistillationTask(student, teacher, kd_weight=0., verbose=False)]
    used = [True, True] if config.epochs is None else [epochs > 0 for epochs in config.epochs]
    tasks = [make(model) if use else None for make, use in zip(parts, used, strict=True)]  # before any is trained
    first = next(task for task in tasks if task is not None)
    with loader_state_kept(loader, torch.device(first.device)):
        random_seed(config.seed * 10_007 % 2 ** 31)
        few: list[Any] = list(islice(loader, TRIED))
    share = 1.
    if None in (config.lr, config.unrolled_lr):
        share = min(1., 3. * loss_before(first, few, config.amp))
    if share < EXACT:
        return []
    lrs = [highest * share if lr is None else lr
           for lr, highest in zip((config.lr, config.unrolled_lr), HIGHEST_LR, strict=True)]
    options: list[dict[str, Any]] = [
        {'opt': opt, 'lr': lr, 'amp': config.amp, 'seed': config.seed, 'weight_decay': 0.}
        for opt, lr in zip(('adamw', 'muon'), lrs, strict=True)]
    plan: list[tuple[Any, int]]  # batches of an epoch, and epochs, of each part
    if config.epochs is not None:
        plan = [(loader, epochs) for epochs in config.epochs]
    else:
        started = time.perf_counter()
        seconds = [seconds_per_update(model, loader, make, chosen) for make, chosen in zip(parts, options, strict=True)]
        left = in_first_process(lambda: (config.minutes or 0.) - (time.perf_counter() - started) / 60.)
        updates = [updates_in(left / 2, each) for each in seconds]
        plan = [(Stream(loader, max(1, each // EPOCHS), i * EPOCHS), min(each, EPOCHS))
                for i, each in enumerate(updates)]
    history = []
    errors, states = [_error(model, teacher, first, few, config)], [copy.deepcopy(model.state_dict())]
    for task, (batches, epochs), chosen in zip(tasks, plan, options, strict=True):
        if task is not None:
            history += fit(task, batches, epochs=epochs, progress=progress, **chosen)
            errors.append(_error(model, teacher, first, few, config))
            states.append(copy.deepcopy(model.state_dict()))
    best = max(range(len(errors)), key=lambda i: (-errors[i], i))
    if best == 0:
        warnings.warn(
            f"The calibration ended farther from the teacher's outputs than it started (squared error {errors[-1]:.3g} "
            f'of their variance, {errors[0]:.3g} before), so the model is as it was. Try a lower lr, or more time.',
            stacklevel=3)
    model.load_state_dict(states[best])
    return history


def _error(
        model: nn.Module, teacher: nn.Module, task: TrainingTask, few: list[Any], config: CalibrationConfig) -> float:
    """The squared error of the outputs on a few batches, relative to the variance of the teacher's."""
    if not few:
        return math.inf  # fit refuses this
    images, labels = few[0]
    with must_fit('train_loader', images, labels, task):
        found = evaluate_embeddings(model, few, teacher=teacher, amp_dtype=AMP_DTYPES[config.amp]).results[-1].error
    return over_processes(torch.tensor(math.inf if found is None else found, device=task.device)).item()
