"""Accuracy of a model, ODE-ViT or not, over several step counts."""
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterable, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ..convert.merge import check_not_merged
from ..data.preprocessing import renormalisation
from ..files import to_json, write_text
from ..hooks import evaluating
from ..ode.blocks import count_parameters, find_ode_blocks
from ..settings import checks_keywords

__all__ = ['AMP_DTYPES', 'Evaluation', 'Result', 'evaluate']

AMP_DTYPES = {None: None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}  # by the names that settings use
BATCH = 64  # images of a pair of tensors that run at once
NOTHING = -1  # the prediction for an image whose logits are NaN


@dataclass(frozen=True)
class Result:
    """Results of one model at one step count.

    Attributes:
        model: 'teacher', 'student' or 'model'.
        steps: Number of solver steps; None for a model that is not an ODE-ViT.
        nfe: Field evaluations per image, their mean for an adaptive method; None if the model is not an ODE-ViT.
        parameters: Number of parameters.
        images: Number of images.
        top1: Top-1 accuracy in percent.
        top5: Top-5 accuracy in percent (top-C with C < 5 classes).
        loss: Mean cross-entropy in nats per image; NaN if any logits are (those images count as wrong).
        agreement: Share of images whose top-1 class is the teacher's, in percent; None without a teacher.
        kept: Share of the teacher's top-1 accuracy, in percent; None without a teacher.
        images_per_second: Speed of the forward pass, without data loading.
    """
    model: str
    steps: Optional[int]
    nfe: Optional[float]
    parameters: int
    images: int
    top1: float
    top5: float
    loss: float
    agreement: Optional[float]
    kept: Optional[float]
    images_per_second: float


@dataclass(frozen=True)
class Evaluation:
    """Results in the order in which they were measured: the teacher first, then one per step count."""
    results: Tuple[Result, ...]

    def table(self) -> str:
        """Return the results as a Markdown table."""
        header = (
            'model', 'steps', 'NFE', 'parameters', 'top-1 %', 'top-5 %', 'loss', 'agreement %', 'kept %', 'images/s')
        rows: List[Tuple[str, ...]] = [header]
        for r in self.results:
            rows.append((
                r.model, _text(r.steps), _text(r.nfe), f'{r.parameters:,}', f'{r.top1:.2f}', f'{r.top5:.2f}',
                f'{r.loss:.4f}', _text(r.agreement), _text(r.kept), f'{r.images_per_second:.0f}'))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        rows.insert(1, tuple('-' * width for width in widths))
        return '\n'.join(
            f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows)

    def to_json(self, path: Optional[Union[str, Path]] = None) -> str:
        """Return the results as JSON, with null for what is not finite; also write them to `path` if given."""
        text = to_json([asdict(r) for r in self.results])
        if path is not None:
            write_text(Path(path), text)
        return text

    def __str__(self) -> str:
        return self.table()


@checks_keywords
def evaluate(
        model: nn.Module,
        loader: Iterable[Any],
        *,
        steps: Optional[Union[int, Sequence[int]]] = None,
        teacher: Optional[nn.Module] = None,
        amp_dtype: Optional[torch.dtype] = None,
        progress: bool = False,
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
    return Evaluation(tuple(results))


def _measure(model: nn.Module, loader: Iterable[Any], amp_dtype, progress: bool, name: str, scale=None, shift=None):
    blocks = find_ode_blocks(model)
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
            nfe += len(labels) * sum(b.nfe for b in blocks)
            labels_seen.append(labels.cpu())
            predicted.append(top[:, 0].cpu())
    if not labels_seen:
        raise ValueError('The loader gave no images.')
    seen, first = torch.cat(labels_seen), torch.cat(predicted)
    n, without = len(seen), int((first == NOTHING).sum())
    if without:
        warnings.warn(f'{name}: the logits of {without} of {n} images are NaN. They count as wrong.', RuntimeWarning,
                      stacklevel=4)
    evaluations = None
    if blocks:
        evaluations = nfe / n if blocks[0].config.adaptive else sum(b.nfe for b in blocks)
    found = dict(
        steps=sum(b.steps for b in blocks) if blocks else None, nfe=evaluations, parameters=count_parameters(model),
        images=n, top1=100 * correct1 / n, top5=100 * correct5 / n, loss=loss.item() / n,
        images_per_second=n / seconds)
    return found, (seen, first)


def _synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _text(value: Optional[float]) -> str:
    if value is None:
        return '-'
    return str(value) if isinstance(value, int) else f'{value:.1f}'
