"""The images of a loader through a model, timed, at one or several step counts."""
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Integral
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..convert.merge import check_not_merged
from ..hooks import evaluating
from ..ode.blocks import count_parameters, find_ode_blocks
from ..ode.blocks import OdeBlocks as Halts

__all__ = [
    'AMP_DTYPES', 'NOTHING', 'Passes', 'check_labels', 'check_same_images', 'in_batches', 'step_counts', 'wait_for',
]

AMP_DTYPES = {None: None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}  # by the names that settings use
NOTHING = -1  # the class of an image whose outputs are not finite, which is never right
BATCH = 64  # images of a pair of tensors that run at once


def step_counts(
        model: nn.Module, steps: Optional[Union[int, Sequence[int]]],
) -> List[Tuple[str, Callable[[], AbstractContextManager]]]:
    """A name and a context for each of the step counts, in which the model has it; its own one for None.

    Raises:
        ValueError: There are no counts, or the model has no steps to set.
    """
    blocks = find_ode_blocks(model)
    if steps is None:
        return [(f'{blocks[0].steps} steps' if len(blocks) == 1 else 'model', nullcontext)]
    counts = [int(steps)] if isinstance(steps, (int, Integral)) else list(steps)
    if not counts:
        raise ValueError('steps is empty. Give step counts, such as steps=(1, 6, 12), or None.')
    check_not_merged(model)
    if not blocks:
        raise ValueError(
            f'steps={counts} needs an ODE-ViT; this {type(model).__name__} is not one. Call convert_ first.')
    if len(blocks) > 1:
        raise ValueError(
            f'steps={counts} is one number per run, but this {type(model).__name__} has {len(blocks)} stages. Set '
            'the steps of each stage on the model, and leave steps out.')
    return [(f'{count} steps', partial(blocks[0].at, count)) for count in counts]


def check_same_images(marks: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError unless several passes had the same images in the same order, by their marks."""
    first, *others = (torch.cat(list(each)) for each in marks)
    same = dict(rtol=1e-4, atol=1e-6, equal_nan=True)
    if any(other.shape != first.shape or not torch.allclose(other, first, **same) for other in others):  # type: ignore
        raise ValueError('The loader gives other images, or in another order, each time. Make it with shuffle=False '
                         'and without augmentation.')


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise ValueError unless all labels [B] are classes of the model."""
    if labels.is_floating_point():
        raise ValueError(f'Labels must be whole numbers; got {labels.dtype}.')
    for label in (int(labels.min()), int(labels.max())) if len(labels) else ():
        if not 0 <= label < classes:
            raise ValueError(f'The data has label {label}, but the model has {classes} classes. Create the model with '
                             'the num_classes of the data.')


def in_batches(loader: Any, passes: int = 1) -> Any:
    """A loader that is read several times, or the batches of a pair of tensors: images [N, C, H, W] and labels [N]."""
    if isinstance(loader, Iterator) and passes > 1:
        raise ValueError(f'loader is a {type(loader).__name__}, which gives its batches only once, but it is read for '
                         'each number of steps and for the teacher. Give a list of batches, or a DataLoader.')
    if isinstance(loader, Tensor):
        raise ValueError('Got images without labels. Give a pair (images, labels), or batches of such pairs; where '
                         'labels do not count, any will do.')
    if isinstance(loader, (tuple, list)) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader):
        return list(zip(*(part.split(BATCH) for part in loader), strict=True))
    return loader


class Passes:
    """The batches of a loader through a model in eval mode, on its device; empty batches are skipped.

    Args:
        model: Model, [B, C, H, W] to its outputs [B, ...].
        loader: Batches (images [B, C, H, W], labels [B]).
        amp_dtype: Run under autocast in this dtype; None for the model's own.
        progress: Show a progress bar.
        name: What it says.
        renormalised: Scale and shift of the images; None twice to leave them.
    """

    def __init__(
            self, model: nn.Module, loader: Iterable[Any], amp_dtype: Optional[torch.dtype], progress: bool, name: str,
            renormalised: Tuple[Optional[Tensor], Optional[Tensor]] = (None, None),
    ) -> None:
        self.model, self.loader, self.dtype = model, loader, amp_dtype
        self.progress, self.name, self.renormalised = progress, name, renormalised
        self.images, self.seconds, self.evaluations = 0, 0., 0.
        self.marks: List[Tensor] = []  # the mean of each image, by which a shuffled loader is noticed
        self.taken: List[Tensor] = []  # steps of each image, if one sequence of blocks can halt

    def run(self, each: Callable[[Tensor, Tensor], Any]) -> Dict[str, Any]:
        """Give the outputs in float32 [B, ...] and the labels [B] of each batch to `each`.

        Returns:
            Steps, evaluations, parameters, images, speed, and how many images halted when, as in a Result.

        Raises:
            ValueError: The loader gave no images.
        """
        model = self.model
        sequences: List[Any] = [module for module in model.modules() if isinstance(module, Halts)]
        parameter = next(model.parameters())
        device = parameter.device
        scale, shift = self.renormalised
        autocast = torch.autocast(device.type, self.dtype) if self.dtype is not None else nullcontext()
        with evaluating(model), torch.inference_mode(), autocast:
            for batch in tqdm(self.loader, desc=self.name, leave=False, disable=not self.progress):
                images, labels = _pair(batch)
                if not len(images):
                    continue
                self.marks.append(images.float().flatten(1).mean(dim=1).cpu())
                images = images.to(device, parameter.dtype if self.dtype is None else images.dtype)
                if scale is not None and shift is not None:
                    images = images * scale.to(images) + shift.to(images)
                for blocks in sequences:
                    blocks.steps_taken = None  # and so it stays if the host runs the steps one by one
                if not self.images:
                    model(images)  # the first pass is slower than the others, and is not timed
                wait_for(device)
                start = time.perf_counter()
                outputs = model(images)
                wait_for(device)
                self.seconds += time.perf_counter() - start
                self.images += len(images)
                self.evaluations += len(images) * sum(blocks.evaluations for blocks in sequences)
                if len(sequences) == 1 and sequences[0].config.halting is not None:
                    steps, most = sequences[0].steps_taken, sequences[0].config.grid[0]
                    self.taken.append(torch.full((len(images),), most) if steps is None else steps.cpu())
                each(outputs.float(), labels.to(device))
        if not self.images:
            raise ValueError('The loader gave no images.')
        evaluations: Optional[float] = None
        if sequences:
            evaluations = self.evaluations / self.images
            if not any(blocks.config.adaptive or blocks.config.halting for blocks in sequences):
                evaluations = round(evaluations)
        halted = None
        if self.taken:
            counts = torch.cat(self.taken).bincount(minlength=sequences[0].config.grid[0] + 1)
            halted = tuple((100 * counts / self.images).tolist()[1:])
        steps = find_ode_blocks(model)
        return dict(
            steps=sum(b.steps for b in steps) if steps else None, nfe=evaluations,
            parameters=count_parameters(model), images=self.images,
            images_per_second=self.images / self.seconds, halted=halted)


def _pair(batch: Any) -> Tuple[Tensor, Tensor]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        images, labels = batch
        if images.ndim == 4 and labels.shape == images.shape[:1]:
            return images, labels
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    found = ', '.join(f'{p.dtype} {list(p.shape)}' if isinstance(p, Tensor) else type(p).__name__ for p in parts)
    raise ValueError(f'Expected batches of images [B, C, H, W] and labels [B]; got {found}.')


def wait_for(device: Union[str, torch.device]) -> None:
    """Wait until a device has done what it was given."""
    if torch.device(device).type not in ('cpu', 'meta'):
        torch.accelerator.synchronize(device)
