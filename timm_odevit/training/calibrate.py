"""calibrate_: fit the shared blocks to the teacher in minutes, on images without labels."""
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterable, List, Optional, Tuple, Union

import torch
from timm.task import TrainingTask
from timm.utils import random_seed
from torch import Tensor, nn

from ..convert.measure import check_images
from ..distributed import alone_in, over_processes
from ..evaluation.passes import AMP_DTYPES
from ..hooks import evaluating, surely
from ..ode.blocks import find_ode_blocks
from ..settings import takes
from .budget import EPOCHS, Stream, updates_in
from .config import CalibrationConfig
from .first_batch import fitting, undisturbed
from .fit import fit
from .hashes import made_of
from .loaders import set_epoch
from .resume import check_calibration, planned
from .stepwise_task import StepwiseTask, check_converted_from
from .trajectory_task import TrajectoryDistillationTask

__all__ = ['calibrate_']

HIGHEST_LR = (3e-3, 1e-3)  # of the two parts
TRIED = 3  # batches
EXACT = 1e-6  # a loss that is rounding


@takes(CalibrationConfig)
def calibrate_(
        model: nn.Module,
        teacher: nn.Module,
        images: Union[Tensor, Iterable[Any]],
        *,
        out: Optional[Union[str, Path]] = None,
        resume: bool = False,
        progress: bool = True,
        config: CalibrationConfig,
) -> List[Dict[str, float]]:
    """Fit a converted model in place to the model that it was converted from, in minutes, on images without labels.

    First, each step learns on its own, from the teacher's state to the teacher's next state (StepwiseTask); then the
    unrolled steps learn the whole trajectory (TrajectoryDistillationTask), each in half of the time. Only the shared
    blocks learn. At the end, even after an interruption, the modes and requires_grad of both models are restored; the
    learned weights stay. A student that is exact has nothing to learn, and takes no time.

    Args:
        model: Converted model.
        teacher: The model that it was converted from: a `copy.deepcopy` made before `convert_`.
        images: Images [N, C, H, W], normalised for the model; or a loader with a length that yields such batches, or
            (images, labels), whose labels are ignored.
        out: Folder for checkpoints ('stepwise/' and 'unrolled/'), so that an interrupted call can be resumed.
        resume: Resume from `out`, with the same student as converted, teacher, images and settings.
        progress: Show a progress bar.
        config: Settings; or pass any of them as keywords, such as minutes=10; see CalibrationConfig.

    Returns:
        The records of all epochs, as returned by `fit`. With minutes, an epoch is a tenth of a part.

    Raises:
        TypeError: The model is not converted.
        ValueError: Model and teacher do not match; or a setting, the images or the folder is invalid, or the folder was
            made with another student, teacher or images.
        FloatingPointError: The loss stopped being finite.
        OSError: Another process uses the folder.
    """
    check_converted_from(model, teacher)
    loader = _Batches(images, config.batch_size)
    folders = [None if out is None else Path(out) / name for name in ('stepwise', 'unrolled')]
    check_calibration(folders, config.minutes, config.epochs, resume)
    own = {id(p) for ode in find_ode_blocks(model) for p in ode.shared.parameters()}
    flags = [(p, p.requires_grad) for m in (model, teacher) for p in m.parameters()]
    modes = [(module, module.training) for m in (model, teacher) for module in m.modules()]
    tasks: List[Callable[[nn.Module], TrainingTask]] = [
        lambda student: StepwiseTask(student, teacher, verbose=False),
        lambda student: TrajectoryDistillationTask(student, teacher, kd_weight=0., verbose=False)]
    history: List[Dict[str, float]] = []

    def put_back() -> None:
        for p, flag in flags:
            p.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode

    def options(share: float) -> List[Dict[str, Any]]:
        lrs = [highest * share if lr is None else lr
               for lr, highest in zip((config.lr, config.unrolled_lr), HIGHEST_LR, strict=True)]
        common: Dict[str, Any] = dict(amp=config.amp, seed=config.seed, weight_decay=0.)
        return [{**common, 'lr': lrs[0]}, {**common, 'lr': lrs[1], 'opt': 'muon'}]

    def plan() -> Dict[str, Any]:
        measured = None in (config.lr, config.unrolled_lr) and (config.epochs is None or config.epochs[0] > 0)
        share = min(1., 3. * _error_of_a_step(model, tasks[0](model), loader, config)) if measured else 1.
        updates = None
        if config.minutes is not None and share > EXACT:
            updates = updates_in(config.minutes, model, loader, tasks, (0.5, 0.5), options(share))
        return {'minutes': config.minutes, 'updates': updates, 'share': share}
    with alone_in(None if out is None else Path(out)):
        try:
            made = [make(model) for make, count in zip(tasks, config.epochs or (0, 0), strict=True) if count]
            for p, flag in flags:
                p.requires_grad_(flag and id(p) in own)
            noted = planned(out, plan, lambda: made_of(model, teacher, images))
            if noted['share'] < EXACT:
                return history
            if config.epochs is not None:
                parts: List[Tuple[Any, int]] = [(loader, count) for count in config.epochs]
            else:
                device = next(model.parameters()).device
                parts = [(Stream(loader, max(1, count // EPOCHS), config.seed, device), min(count, EPOCHS))
                         for count in noted['updates']]
            for make, folder, (batches, count), chosen in zip(
                    tasks, folders, parts, options(noted['share']), strict=True):
                if count:
                    task = made.pop(0) if made else make(model)
                    history += fit(task, batches, epochs=count, out=folder, resume=resume, progress=progress, **chosen)
        finally:
            surely(put_back)
    return history


@torch.no_grad()
def _error_of_a_step(model: nn.Module, task: TrainingTask, loader: Any, config: CalibrationConfig) -> float:
    """StepwiseTask's loss on a few batches: how much there is to learn, 0 for nothing, 1 for everything."""
    device, dtype = torch.device(task.device), AMP_DTYPES[config.amp]
    errors = []
    with undisturbed(loader, device), evaluating(model):
        random_seed(config.seed * 10_007 % 2 ** 31)
        for images, labels in islice(loader, TRIED):
            cast: ContextManager[Any] = nullcontext() if dtype is None else torch.autocast(device.type, dtype)
            with fitting('train_loader', images, labels, task), cast:
                errors.append(over_processes(task(images.to(device))['loss']))
    return torch.stack(errors).mean().item() if errors else 1.


class _Batches:
    """Batches (images, dummy labels) from a tensor or a loader."""

    def __init__(self, images: Union[Tensor, Iterable[Any]], batch_size: int) -> None:
        self.source: Any = images
        if isinstance(images, Tensor):
            check_images(images)
            self.batch_size = min(batch_size, len(images))
        elif not hasattr(images, '__len__') or not hasattr(images, '__iter__') or hasattr(images, 'dtype'):
            raise ValueError(
                f'images must be a tensor [N, C, H, W], or a loader with a length; got {type(images).__name__}.')

    def set_epoch(self, epoch: int) -> None:
        """Pass it on."""
        set_epoch(self.source, epoch)

    def __len__(self) -> int:
        return len(self.source) // self.batch_size if isinstance(self.source, Tensor) else len(self.source)

    def __iter__(self):
        if isinstance(self.source, Tensor):
            order = torch.randperm(len(self.source))
            batches = (self.source[order[i * self.batch_size:(i + 1) * self.batch_size]] for i in range(len(self)))
        else:
            batches = (batch[0] if isinstance(batch, (list, tuple)) else batch for batch in self.source)
        for batch in batches:
            check_images(batch)
            yield batch, torch.zeros(len(batch), dtype=torch.long)
