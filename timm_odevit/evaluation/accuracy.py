"""Accuracy of a model, ODE-ViT or not, over several step counts."""
import time
import warnings
from contextlib import nullcontext
from typing import Any, Iterable, List, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ..convert.merge import MergedBlocks, check_not_merged
from ..data.preprocessing import renormalisation
from ..hooks import evaluating
from ..ode.blocks import OdeBlocks, count_parameters, find_ode_blocks
from ..ode.config import OdeConfig
from ..ode.methods import METHODS
from ..settings import checks_keywords
from .results import Evaluation, Result

__all__ = ['AMP_DTYPES', 'evaluate']

AMP_DTYPES = {None: None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}  # by the names that settings use
BATCH = 64  # images of a pair of tensors that run at once
NOTHING = -1  # the prediction for an image whose logits are NaN


@checks_keywords
def evaluate(
        model: nn.Module,
        loader: Iterable[Any],
        *,
        steps: Optional[Union[int, Sequence[int]]] = None,
        teacher: Optional[nn.Module] = None,
        amp_dtype: Optional[torch.dtype] = None,
        progress: bool = False,
        data: str = '',
        trained_at: Sequence[int] = (),
) -> Evaluation:
    """Measure accuracy per image, at several step counts, on the model's device.

    Afterwards, or when interrupted, the model's steps with their hooks and both models' modes are restored.

    Args:
        model: Model to measure, [B, C, H, W] to logits [B, classes].
        loader: Batches (images [B, C, H, W], labels [B]), in the same order each time; empty ones are skipped. Or one
            pair of tensors, images [N, C, H, W] and labels [N].
        steps: Step counts to measure; None for the model as it is. Only for an ODE-ViT.
        teacher: Model to compare with; measured first, on the same images, normalised for it.
        amp_dtype: Run under autocast in this dtype, such as torch.bfloat16.
        progress: Show a progress bar.
        data: What the images are, such as 'val/ of photos', for tables and plots.
        trained_at: Step counts that the model was trained with, to be marked in tables and plots.

    Returns:
        One Result for the teacher, if any, and one for each step count. If logits are NaN, a warning says for how many
        images; these count as wrong.

    Raises:
        ValueError: The model has no steps to set, the loader is empty or shuffled, or labels do not fit the classes.
    """
    blocks = find_ode_blocks(model)
    counts: List[Optional[int]]
    if steps is None:
        counts = [blocks[0].steps if len(blocks) == 1 else None]
    else:
        counts = [steps] if isinstance(steps, int) else list(steps)
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
    if isinstance(loader, (tuple, list)) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader):
        loader = list(zip(*(part.split(BATCH) for part in loader), strict=True))
    results: List[Result] = []
    reference = None
    if teacher is not None:
        scale, shift = renormalisation(model, teacher)
        found, reference = _measure(teacher, loader, amp_dtype, progress, 'teacher', scale, shift)
        results.append(Result(model='teacher', agreement=None, kept=100., **found))
    for count in counts:
        with blocks[0].at(count) if count is not None else nullcontext():
            name = 'model' if count is None else f'{count} steps'
            found, (labels, predicted) = _measure(model, loader, amp_dtype, progress, name)
        agreement = kept = None
        if reference is not None:
            if not torch.equal(labels, reference[0]):
                raise ValueError('The loader gives images in a different order each time. Make it with shuffle=False.')
            agreement = 100 * ((predicted == reference[1]) & (predicted != NOTHING)).double().mean().item()
            kept = 100 * found['top1'] / results[0].top1 if results[0].top1 else None
        results.append(Result(
            model='model' if teacher is None else 'student', agreement=agreement, kept=kept, **found))
    return Evaluation(tuple(results), data, tuple(trained_at))


def _measure(model: nn.Module, loader: Iterable[Any], amp_dtype, progress: bool, name: str, scale=None, shift=None):
    blocks, halting = find_ode_blocks(model), _halting(model)
    taken: List[Tensor] = []
    parameter = next(model.parameters())
    device = parameter.device
    autocast = torch.autocast(device.type, amp_dtype) if amp_dtype is not None else nullcontext()
    correct1 = correct5 = seconds = nfe = 0.
    loss = torch.zeros((), dtype=torch.float64)
    labels_seen: List[Tensor] = []
    predicted: List[Tensor] = []
    with evaluating(model), torch.inference_mode(), autocast:
        for images, labels in tqdm(loader, desc=name, leave=False, disable=not progress):
            if not len(labels):
                continue
            dtype = parameter.dtype if amp_dtype is None else images.dtype
            images, labels = images.to(device, dtype), labels.to(device)
            if scale is not None:
                images = images * scale.to(images) + shift.to(images)
            if halting is not None:
                halting.steps_taken = None
            if not labels_seen:
                model(images)  # the first pass is slower than the others, and is not timed
            _synchronize(device)
            start = time.perf_counter()
            logits = model(images)
            _synchronize(device)
            seconds += time.perf_counter() - start
            if int(labels.max()) >= logits.shape[1]:
                raise ValueError(
                    f'The data has label {int(labels.max())}, but the model has {logits.shape[1]} classes. '
                    'Create the model with the num_classes of the data.')
            logits = logits.float()
            nan = logits.isnan().any(dim=1, keepdim=True)  # topk takes NaN for the largest
            top = logits.topk(min(5, logits.shape[1])).indices.masked_fill(nan, NOTHING)
            hits = top.eq(labels[:, None])
            correct1 += hits[:, 0].sum().item()
            correct5 += hits.any(dim=1).sum().item()
            loss += F.cross_entropy(logits, labels, reduction='sum').double().cpu()
            if halting is None:
                nfe += len(labels) * sum(b.nfe for b in blocks)
            else:
                steps = halting.steps_taken  # None if the host runs them one by one, as with gradient checkpointing
                taken.append(torch.full((len(labels),), _settings(halting).grid[0]) if steps is None else steps.cpu())
            labels_seen.append(labels.cpu())
            predicted.append(top[:, 0].cpu())
    if not labels_seen:
        raise ValueError('The loader gave no images.')
    seen, first = torch.cat(labels_seen), torch.cat(predicted)
    n, without = len(seen), int((first == NOTHING).sum())
    if without:
        warnings.warn(f'{name}: the logits of {without} of {n} images are NaN. They count as wrong.', RuntimeWarning,
                      stacklevel=4)
    evaluations = halted = None
    if blocks:
        evaluations = nfe / n if blocks[0].config.adaptive else sum(b.nfe for b in blocks)
    if taken:
        counts = torch.cat(taken).bincount()
        halted = tuple((100 * counts / n).tolist()[1:])
        settings = _settings(halting)
        per_step = METHODS[settings.method].evaluations
        evaluations = per_step * torch.cat(taken).double().mean().item()
    found = dict(
        steps=sum(b.steps for b in blocks) if blocks else None, nfe=evaluations, parameters=count_parameters(model),
        images=n, top1=100 * correct1 / n, top5=100 * correct5 / n, loss=loss.item() / n,
        images_per_second=n / seconds, halted=halted)
    return found, (seen, first)


def _halting(model: nn.Module) -> Any:
    """The blocks of a model whose images may halt, or None."""
    found: List[Any] = [m for m in model.modules() if isinstance(m, (OdeBlocks, MergedBlocks))]
    return next((blocks for blocks in found if _settings(blocks).halting is not None), None)


def _settings(blocks: Any) -> OdeConfig:
    settings: OdeConfig = blocks.merged if isinstance(blocks, MergedBlocks) else blocks.config
    return settings


def _synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
