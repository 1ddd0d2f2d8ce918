"""Timed passes of data sets through models, and their results: as a table, JSON, a plot, and in a notebook."""
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from ..data.batches import read_batches
from ..data.preprocessing import renormalisation
from ..files import markdown_table, to_json, write_text
from ..hooks import autocast, evaluating
from ..ode.blocks import count_parameters, find_ode_blocks, with_steps

__all__ = ['NO_CLASS', 'EmbeddingResult', 'Evaluation', 'Pass', 'Result', 'passes', 'views']

NO_CLASS = -1  # the class of an image whose outputs are not finite, which is never right


class Pass(NamedTuple):
    """What was computed of each image of one or two data sets by a 'teacher', 'student' or 'model'."""
    kind: str
    name: str
    columns: list[Tensor]  # [N, ...] on the CPU
    others: list[Tensor] | None
    about: dict[str, Any]  # what every result says


def passes(
        model: nn.Module, loader: Any, each: Callable[[Tensor, Any], tuple[Tensor, ...]], *,
        steps: int | Sequence[int] | None, teacher: nn.Module | None, others: Any = None, labels: bool = True,
        amp_dtype: torch.dtype | None = None, progress: bool = False,
) -> Iterator[Pass]:
    """Run data sets through the teacher, if any, and through a model with each number of steps.

    `each` computes tensors [B, ...] of the outputs in float32 and, if there are any, the labels of a batch.
    """
    runs: list[Any] = [('model' if teacher is None else 'student', *view, None) for view in views(model, steps)]
    if teacher is not None:
        runs.insert(0, ('teacher', 'teacher', teacher, renormalisation(model, teacher)))
    if len(runs) > 1 and (isinstance(loader, Iterator) or isinstance(others, Iterator)):
        raise ValueError('A generator gives its batches only once, but they are read for each number of steps and for '
                         'the teacher. Give a list of batches, or a DataLoader.')
    first = None
    for kind, name, view, normalisation in runs:
        options = labels, amp_dtype, name if progress else '', normalisation
        about, marks, columns = _run(view, loader, each, *options)
        first = marks if first is None else first
        if marks.shape != first.shape or not torch.allclose(marks, first, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError('The loader does not give the same images in the same order each time. Make it with '
                             'shuffle=False and without augmentation.')
        yield Pass(kind, name, columns, None if others is None else _run(view, others, each, *options)[2], about)


def views(model: nn.Module, steps: int | Sequence[int] | None) -> list[tuple[str, nn.Module]]:
    """A name and a view of the model for each of the step counts; the model itself for None."""
    blocks = find_ode_blocks(model)
    if steps is None:
        return [(f'{blocks[0].steps} steps' if len(blocks) == 1 else 'model', model)]
    return [(f'{count} steps', with_steps(model, count)) for count in dict.fromkeys(np.atleast_1d(steps).tolist())]


def _run(
        model: nn.Module, loader: Any, each: Callable[[Tensor, Any], tuple[Tensor, ...]], labels: bool,
        amp_dtype: torch.dtype | None, bar: str, normalisation: Callable[[Tensor], Tensor] | None,
) -> tuple[dict[str, Any], Tensor, list[Tensor]]:
    """What a result says of the pass, the mean of each image [N], which shuffling would change, and the columns."""
    stages, parameter = find_ode_blocks(model), next(model.parameters())
    device = parameter.device
    halts = len(stages) == 1 and stages[0].config.halting is not None
    varies = any(ode.config.adaptive or ode.config.halting for ode in stages)
    marks: list[Tensor] = []
    timed: list[tuple[int, float]] = []  # images and seconds of each batch
    taken: list[Tensor] = []  # steps of each image
    rows: list[Any] = []
    evaluations = 0.
    with evaluating(model), torch.inference_mode(), autocast(device, amp_dtype):
        for images, truth in read_batches(loader, labels, bar=bar):
            marks.append(images.float().flatten(1).mean(dim=1).cpu())
            images = images.to(device, parameter.dtype if amp_dtype is None else images.dtype)
            if normalisation is not None:
                images = normalisation(images)
            for ode in stages:
                ode.steps_taken = None  # and so it stays if the host runs the steps one by one
            _wait_for(device)
            start = time.perf_counter()
            outputs = model(images)
            _wait_for(device)
            timed.append((len(images), time.perf_counter() - start))
            evaluations += len(images) * sum(ode.evaluations for ode in stages)
            if halts:
                steps = stages[0].steps_taken
                taken.append(torch.full((len(images),), stages[0].steps) if steps is None else steps.cpu())
            rows.append(each(outputs.float(), None if truth is None else truth.to(device)))
    count = sum(map(len, marks))
    later, seconds = map(sum, zip(*(timed[1:] or timed), strict=True))  # the first batch is slower than the others
    about: dict[str, Any] = dict(steps=None, nfe=None, images=count, parameters=count_parameters(model),
                                 images_per_second=later / seconds)
    if stages:
        nfe = evaluations / count
        about.update(steps=sum(ode.steps for ode in stages), nfe=nfe if varies else round(nfe))
    if halts:
        shares = 100 * torch.cat(taken).bincount(minlength=stages[0].steps + 1)[1:] / count
        about['halted'] = tuple(shares.tolist())
    return about, torch.cat(marks), [torch.cat(column).cpu() for column in zip(*rows, strict=True)]


def _wait_for(device: torch.device) -> None:
    if device.type not in ('cpu', 'meta'):
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What every result says of one model at one step count.

    Attributes:
        model: 'teacher', 'student' or 'model'.
        steps, nfe: Number of solver steps, and mean field evaluations per image; None if it is not an ODE-ViT.
        parameters, images: Their numbers.
        images_per_second: Speed of the forward pass, roughly; `odevit benchmark` compares speeds.
        halted: Share of the images that took 1, 2, ... steps, in percent; None if no image can halt.
    """
    model: str
    steps: int | None
    nfe: float | None
    parameters: int
    images: int
    images_per_second: float
    halted: tuple[float, ...] | None = None

    COLUMNS: ClassVar[tuple[tuple[str, str, int], ...]] = ()  # attribute, heading in a table, decimal places

    def cells(self) -> list[str]:
        return [_text(getattr(self, name), digits) for name, _, digits in self.COLUMNS]


@dataclass(frozen=True, kw_only=True)
class Result(_Measured):
    """Results of one model at one step count; also has model, steps, nfe, parameters, images, images_per_second and
    halted. What needs a teacher is None without one.

    Attributes:
        top1, top5: Accuracy in percent (top-C with C < 5 classes).
        loss: Mean cross-entropy in nats per image; NaN if any logits are.
        agreement: Share of images whose top-1 class is the teacher's, in percent.
        kept: Share of the teacher's top-1 accuracy, in percent.
    """
    top1: float
    top5: float
    loss: float
    agreement: float | None
    kept: float | None

    SCORE: ClassVar[str] = 'top-1 accuracy, %'
    COLUMNS = (('top1', 'top-1 %', 2), ('top5', 'top-5 %', 2), ('loss', 'loss', 4), ('agreement', 'agreement %', 1),
               ('kept', 'kept %', 1))


@dataclass(frozen=True, kw_only=True)
class EmbeddingResult(_Measured):
    """Embeddings of one model at one step count; also has model, steps, ... and halted, as a Result has. What needs a
    teacher, labelled images or embeddings of classes is None without them.

    Attributes:
        cosine: Mean cosine between the embedding of an image and the teacher's.
        error: Squared error relative to the variance of the teacher's embeddings.
        neighbours: Share of the images whose nearest other image is the one that the teacher finds, in percent.
        knn: Top-1 accuracy of the nearest labelled images, in percent.
        probe: Top-1 accuracy of a linear classifier on the embeddings, in percent.
        zero_shot: Top-1 accuracy of the class embedding with the largest cosine, in percent.
    """
    cosine: float | None = None
    error: float | None = None
    neighbours: float | None = None
    knn: float | None = None
    probe: float | None = None
    zero_shot: float | None = None

    SCORE: ClassVar[str] = "cosine with the teacher's embedding"
    COLUMNS = (('cosine', 'cosine', 4), ('error', 'error', 4), ('neighbours', 'neighbours %', 1), ('knn', 'k-NN %', 2),
               ('probe', 'probe %', 2), ('zero_shot', 'zero-shot %', 2))


AnyResult = TypeVar('AnyResult', bound=Result | EmbeddingResult, default=Result)


@dataclass(frozen=True, repr=False)
class Evaluation(Generic[AnyResult]):
    """Results in the order in which they were measured: the teacher first, then one per step count.

    `data` says what the images are; `trained_at` are the step counts that the model was trained with.

    Examples:
        >>> found = evaluate(student, loader, steps=(6, 12, 24))
        >>> accuracy = {result.steps: result.top1 for result in found.results}
        >>> figure = found.plot('accuracy.png')
    """
    results: tuple[AnyResult, ...]
    data: str = ''
    trained_at: tuple[int, ...] = ()

    @property
    def caption(self) -> str:
        trained = f"; trained with K = {', '.join(map(str, self.trained_at))}" if self.trained_at else ''
        if any(r.steps in self.trained_at for r in self.results):
            trained += ', in bold'
        return f"{f'{self.data}: ' if self.data else ''}{self.results[0].images:,} images{trained}"

    def table(self) -> str:
        """The results as a Markdown table."""
        rows = [['model', 'steps', 'NFE', 'parameters', *(heading for _, heading, _ in self.results[0].COLUMNS)]]
        for r in self.results:
            steps = f'**{r.steps}**' if r.steps in self.trained_at else _text(r.steps)
            rows.append([r.model, steps, _text(r.nfe), f'{r.parameters:,}', *r.cells()])
        return markdown_table(rows)

    def to_json(self, path: str | Path | None = None) -> str:
        """The results as JSON, with null for what is not finite; also write them to `path` if given."""
        text = to_json([asdict(r) for r in self.results])
        if path is not None:
            write_text(Path(path), text)
        return text

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the accuracy or cosine against solver steps, beside the teacher's, and the speed.

        Returns a matplotlib Figure, and writes it to `path` if given.
        """
        from matplotlib.figure import Figure
        score, name = self.results[0].COLUMNS[0][0], self.results[0].SCORE
        students = sorted((r for r in self.results if r.steps is not None and r.model != 'teacher'),
                          key=lambda r: r.steps or 0)
        if not students or getattr(students[0], score) is None:
            raise ValueError(f'There is no {name} of an ODE-ViT to plot. Evaluate one with steps=(1, 2, 4, ...), and '
                             'embeddings with teacher=.')
        figure = Figure(figsize=(6, 4), layout='constrained')
        axes = figure.subplots()
        counts: list[Any] = [r.steps for r in students]
        scores = [getattr(r, score) for r in students]
        line, = axes.plot(counts, scores, marker='o', markerfacecolor='white', label='ODE-ViT')
        if trained := [point for point in zip(counts, scores, strict=True) if point[0] in self.trained_at]:
            axes.plot(*zip(*trained, strict=True), 'o', color=line.get_color(), label='K used in training')
        if self.results[0].model == 'teacher':
            axes.axhline(getattr(self.results[0], score), color='gray', linestyle='--', label='teacher')
        axes.set(xlabel='solver steps K', ylabel=name, xscale='log', ylim=(0, None), title=self.data)
        axes.set_xticks(counts, [str(k) for k in counts])
        axes.minorticks_off()
        axes.legend(loc='lower right')
        speed = axes.twinx()
        speed.plot(counts, [r.images_per_second for r in students], ':', color='gray')
        speed.set(ylabel='images/s (dotted)', ylim=(0, None))
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __repr__(self) -> str:
        scores = [f"{r.model if r.steps is None else f'K = {r.steps}'} {r.cells()[0]}" for r in self.results]
        return f"Evaluation({self.results[0].COLUMNS[0][1]}: {', '.join(scores)}; {self.caption})"

    def __str__(self) -> str:
        stops = [f'steps taken with at most {r.steps or len(r.halted)}: ' + ', '.join(
            f'{step} by {share:.1f} %' for step, share in enumerate(r.halted, start=1) if share)
            for r in self.results if r.halted is not None]
        return '\n'.join([self.caption, '', self.table(), *stops])

    def _repr_markdown_(self) -> str:  # in a notebook
        return str(self)


def _text(value: float | None, digits: int = 1) -> str:
    if value is None:
        return '-'
    return str(value) if isinstance(value, int) else f'{value:.{digits}f}'
