"""Calibration: fit the shared blocks to the teacher's own states, step by step, in minutes and without labels."""
import json
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..blocks import find_ode_blocks
from ..families import find_sites
from ..patches import surely
from ..spans import Seen, check_images, watch_blocks
from .engine import HISTORY, LAST, alone_in, fit
from .losses import over_processes
from .task import Renormalised, TrainingPass, TrajectoryDistillationTask, check_apart, check_student

__all__ = ['StepwiseTask', 'calibrate_']


class StepwiseTask(TrainingTask):
    """Teach each solver step on its own: from the teacher's state at its start to the teacher's state at its end.

    Nothing is unrolled, so errors of one step are not passed on to the next, and no gradient travels through more than
    one step. Between two layers, the teacher's state is interpolated linearly in t. Works for every model that
    `convert_` takes.

    Args:
        student: Converted model.
        teacher: The model that it was converted from; frozen, in eval mode.
        device: Device of the task, that of the student by default.
        verbose: Log what timm logs.

    Raises:
        TypeError: The student is not an ODE-ViT.
        ValueError: Student and teacher do not fit, or share parameters.
    """

    def __init__(
            self,
            student: nn.Module,
            teacher: nn.Module,
            *,
            device: Optional[torch.device] = None,
            verbose: bool = True,
    ) -> None:
        _check_pair(student, teacher)
        super().__init__(device=device or next(student.parameters()).device, verbose=verbose)
        self.runs: List[List[Any]] = [site.blocks for site in find_sites(teacher)]
        for ode, blocks in zip(find_ode_blocks(student), self.runs, strict=True):
            kept = len(ode.before) + len(ode.after)
            if kept + ode.config.grid[1] != len(blocks):
                raise ValueError(
                    f'The student runs over {ode.config.grid[1]:g} units of time beside {kept} kept layers, and the '
                    f'teacher has {len(blocks)} layers: no step has a state to end at. Convert with T=None.')
        self.for_teacher = Renormalised(student, teacher, self.device)
        self.teacher = teacher.requires_grad_(False).eval()
        self.trainable_module: Any = _Steps(student)

    def forward(self, input: Tensor, target: Any = None) -> Dict[str, Tensor]:
        """Compute the loss of one batch.

        Args:
            input: Images [B, C, H, W], normalised for the student.
            target: A Recorded batch with the states of the teacher, or anything else, which is not used.

        Returns:
            'loss', the squared error of a step relative to the squared length of what the teacher does in that time,
            averaged over the steps (dimensionless, 1 for a step that stands still), and 'output', the teacher's.
        """
        recorded = hasattr(target, 'states')
        with torch.no_grad(), watch_blocks(self.runs) as seen:
            images = self.for_teacher(input[:1] if recorded else input)  # one shows what is handed to the blocks
            output = self.teacher(images)
        if recorded:
            output, seen = target.output, [(target.states, seen[0][1])]
        return {'loss': self.trainable_module(seen), 'output': output}

    def train(self, mode: bool = True) -> 'StepwiseTask':
        """Set the mode of the student; the teacher stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def prepare_distributed(self, device_ids: Optional[list] = None, **ddp_kwargs: Any) -> 'StepwiseTask':
        """Wrap the student, and not the frozen teacher, in DistributedDataParallel."""
        from torch.nn.parallel import DistributedDataParallel
        ddp_kwargs.setdefault('find_unused_parameters', True)  # all that is not a block
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def get_eval_model(self, module: Optional[nn.Module] = None, ema: bool = False) -> Optional[nn.Module]:
        """The student itself, without the wrapper of the training pass."""
        found: Any = unwrap_model(super().get_eval_model(module=module, ema=ema))
        return found.student if isinstance(found, TrainingPass) else found


class _Steps(TrainingPass):
    """All steps of a student, each from a given state."""

    def forward(self, seen: Sequence[Seen]) -> Tensor:
        losses = []
        again = torch.is_grad_enabled() and any(getattr(m, 'grad_checkpointing', False) for m in self.student.modules())
        for ode, (states, handed) in zip(find_ode_blocks(self.student), seen, strict=True):
            for step in ode.bound_steps:
                start, end = _at(states, step.t), _at(states, step.t + step.h)
                args, kwargs = handed[int(step.t + 1e-6)]  # a base may hand something else to each layer
                run = partial(checkpoint, step, use_reentrant=False) if again else step
                error = (run(start, *args, **kwargs) - end).float().square().mean()
                moved = over_processes((end - start).float().square().mean())
                losses.append(error / moved.clamp_min(1e-12))
        return torch.stack(losses).mean()


def _check_pair(student: Any, teacher: Any) -> None:
    check_student(student)
    if not isinstance(teacher, nn.Module):
        raise TypeError(f'The teacher must be a model; got {type(teacher).__name__}. Build it by timm.create_model.')
    if find_ode_blocks(teacher):
        raise TypeError('The teacher is converted itself. Give the model that the student was converted from.')
    check_apart(student, teacher)
    outside = [{name: tuple(p.shape) for name, p in m.named_parameters() if '.blocks.' not in f'.{name}'}
               for m in (student, teacher)]
    if type(student) is not type(teacher) or outside[0] != outside[1]:
        names = [name for name in {**outside[0], **outside[1]} if outside[0].get(name) != outside[1].get(name)]
        found = f': {names[0]} is {outside[0].get(names[0])} and {outside[1].get(names[0])}' if names else (
            f': a {type(student).__name__} and a {type(teacher).__name__}')
        raise ValueError(f'The student was not converted from this teacher{found}. Give the model that it was.')


def _at(states: Sequence[Tensor], t: float) -> Tensor:
    low = min(int(t + 1e-6), len(states) - 1)
    share = t - low
    return states[low] if share < 1e-6 else torch.lerp(states[low], states[low + 1], share)


def calibrate_(
        model: nn.Module,
        teacher: nn.Module,
        images: Union[Tensor, Iterable[Any]],
        *,
        epochs: Tuple[int, int] = (8, 2),
        batch_size: int = 16,
        lr: float = 3e-3,
        unrolled_lr: float = 3e-4,
        out: Optional[Union[str, Path]] = None,
        resume: bool = False,
        amp: Optional[str] = None,
        seed: int = 0,
        progress: bool = True,
) -> List[Dict[str, float]]:
    """Fit a converted model to the model that it was converted from, on a few hundred images without labels, in place.

    First every step on its own, from the teacher's state to the teacher's next state (StepwiseTask), then the whole
    trajectory and the logits, unrolled (TrajectoryDistillationTask). Only the shared blocks learn; the modes and
    requires_grad of both models are put back at the end, also when the call is interrupted, and what was learned stays.

    Args:
        model: Converted model.
        teacher: The model that it was converted from, kept by `copy.deepcopy` before `convert_`.
        images: Images [N, C, H, W], normalised for the model, or a loader with a length, of such batches or of
            (images, labels), of which the labels are not used.
        epochs: Epochs of the first and of the second part; the second must be 0 for a model without a sequence of
            tokens to follow as a whole (Swin, SAM, NaFlexViT, MLP-Mixer).
        batch_size: Images per update, if `images` is a tensor.
        lr: Peak learning rate of the first part, on a cosine schedule.
        unrolled_lr: Peak learning rate of the second part.
        out: Folder for checkpoints ('stepwise/' and 'unrolled/'), so that an interrupted call can go on.
        resume: Go on from `out`.
        amp: 'bfloat16', 'float16' or None.
        seed: Seed of the order of the images.
        progress: Show a progress bar.

    Returns:
        The records of all epochs, as `fit` gives them.

    Raises:
        TypeError: The model is not converted.
        ValueError: Model and teacher do not fit, or there is nothing to do.
        FloatingPointError: The loss stopped being finite.
        OSError: Another process uses the folder.
    """
    if not isinstance(epochs, (tuple, list)) or len(epochs) != 2 or not all(
            isinstance(n, int) and n >= 0 for n in epochs) or max(epochs) < 1:
        raise ValueError(f'epochs must be two whole numbers, of which one may be 0, such as (8, 2); got {epochs!r}.')
    _check_pair(model, teacher)
    loader = _Batches(images, batch_size)
    folders = [None if out is None else Path(out) / name for name in ('stepwise', 'unrolled')]
    _check_resume(folders, epochs, resume)
    own = {id(p) for ode in find_ode_blocks(model) for p in ode.shared.parameters()}
    flags = [(p, p.requires_grad) for m in (model, teacher) for p in m.parameters()]
    modes = [(module, module.training) for m in (model, teacher) for module in m.modules()]
    options: Dict[str, Any] = dict(amp=amp, resume=resume, seed=seed, progress=progress, weight_decay=0.)
    history: List[Dict[str, float]] = []

    def put_back() -> None:
        for p, flag in flags:
            p.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
    with alone_in(None if out is None else Path(out)):
        try:
            tasks: List[Optional[TrainingTask]] = [
                StepwiseTask(model, teacher, verbose=False) if epochs[0] else None,
                TrajectoryDistillationTask(model, teacher, verbose=False) if epochs[1] else None]
            for p, flag in flags:
                p.requires_grad_(flag and id(p) in own)
            for task, folder, count, peak in zip(tasks, folders, epochs, (lr, unrolled_lr), strict=True):
                if task is not None:
                    history += fit(task, loader, epochs=count, lr=peak, out=folder, **options)
        finally:
            surely(put_back)
    return history


def _check_resume(folders: Sequence[Optional[Path]], epochs: Sequence[int], resume: bool) -> None:
    first, second = folders
    if first is None or second is None:
        return
    if not resume and any((folder / LAST).exists() for folder in (first, second)):
        raise ValueError(f"'{first.parent}' holds a run already. Pass resume=True to go on with it, or another folder.")
    if (second / LAST).exists() and (first / HISTORY).exists() and len(
            json.loads((first / HISTORY).read_text())) < epochs[0]:
        raise ValueError(
            f"'{first.parent}' has already started unrolled training after fewer stepwise epochs. Calibrate into "
            'another folder.')


class _Batches:
    """Batches (images, labels that stand for nothing) of a tensor or of a loader."""

    def __init__(self, images: Union[Tensor, Iterable[Any]], batch_size: int) -> None:
        self.source: Any = images
        if isinstance(images, Tensor):
            check_images(images)
            if not isinstance(batch_size, int) or batch_size < 1:
                raise ValueError(f'batch_size must be a whole number of at least 1; got {batch_size!r}.')
            self.batch_size = min(batch_size, len(images))
        elif not hasattr(images, '__len__') or not hasattr(images, '__iter__') or hasattr(images, 'dtype'):
            raise ValueError(
                f'images must be a tensor [N, C, H, W], or a loader with a length; got {type(images).__name__}.')

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
