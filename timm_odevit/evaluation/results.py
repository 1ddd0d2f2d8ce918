"""Passes of data sets through models, and their results: as a table, as JSON, and in a notebook."""
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from ..data.batches import read_batches
from ..data.preprocessing import renormalisation
from ..files import cell, markdown_table, to_json
from ..hooks import AMP_DTYPES, autocast, evaluating
from ..ode.blocks import count_parameters, find_ode_blocks, with_steps
from ..settings import one_of

NO_CLASS = -1  # the class, never right, of outputs not finite


def passes(
        model: nn.Module, loader: Any, each: Callable[[Tensor, Any], tuple[Tensor, ...]], *,
        steps: int | Sequence[int] | None, teacher: nn.Module | None, others: Any = None, labels: bool = True,
        amp_dtype: Any, progress: bool,
) -> Iterator[tuple[dict[str, Any], str, list[Tensor], list[Tensor]]]:
    """Run one or two data sets through the teacher, if any, and through a model with each number of steps.

    `each` computes tensors [B, ...] of the outputs in float32 and, if there are any, the labels of a batch. Yields what
    every result says, a name, and these tensors [N, ...] of all images of the first and of the other data set.
    """
    if isinstance(amp_dtype, str):
        amp_dtype = AMP_DTYPES[one_of(('bfloat16', 'float16'))('amp_dtype', amp_dtype)]
    kind, blocks = 'model' if teacher is None else 'student', find_ode_blocks(model)
    name = f'{blocks[0].steps} steps' if len(blocks) == 1 else 'model'
    runs: list[Any] = [(kind, name, model, None)]
    if steps is not None:
        counts = dict.fromkeys(steps if isinstance(steps, Iterable) else [steps])
        if not counts:
            raise ValueError('steps is empty. Give some, or None.')
        runs = [(kind, f'{count} steps', with_steps(model, count), None) for count in counts]
    if teacher is not None:
        runs.insert(0, ('teacher', 'teacher', teacher, renormalisation(model, teacher)))
    options = runs, each, labels, amp_dtype, progress
    found, more = _run(loader, *options), [[]] * len(runs) if others is None else _run(others, *options)
    for (kind, name, view, _), (evaluations, columns), other in zip(runs, found, more, strict=True):
        stages, images = find_ode_blocks(view), len(columns[0])
        about: dict[str, Any] = dict(model=kind, steps=None, nfe=None, images=images, parameters=count_parameters(view))
        if stages:
            nfe = evaluations / images
            about.update(steps=sum(ode.steps for ode in stages), nfe=(int(nfe) if nfe == int(nfe) else nfe) or None)
        yield about, name, columns, other and other[1]


def _run(loader: Any, runs: Any, each: Any, labels: bool, amp_dtype: Any, progress: bool) -> list[Any]:
    """Of each run, evaluations and columns; every batch is read once."""
    rows: list[Any] = [[] for _ in runs]
    evaluations = [0.] * len(runs)
    with ExitStack() as stack:
        for _, _, model, _ in runs:
            stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())  # inference mode would cast shared weights at every step
        for images, truth in read_batches(loader, labels, bar='evaluating' if progress else ''):
            for i, (_, _, model, normalisation) in enumerate(runs):
                parameter, stages = next(model.parameters()), find_ode_blocks(model)
                x = images.to(parameter.device, parameter.dtype if amp_dtype is None else images.dtype)
                for ode in stages:
                    ode._counts.__dict__.clear()  # and so they stay if the host runs the steps one by one
                with autocast(parameter.device, amp_dtype):
                    outputs = model(x if normalisation is None else normalisation(x))
                    evaluations[i] += len(x) * sum(ode.evaluations for ode in stages)
                    rows[i].append(each(outputs.float(), truth))
    return [(n, [torch.cat(column).cpu() for column in zip(*of, strict=True)])
            for n, of in zip(evaluations, rows, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Measured:
    model: str
    steps: int | None
    nfe: float | None
    parameters: int
    images: int


@dataclass(frozen=True, kw_only=True)
class Result(_Measured):
    """Of the classes of one model at one step count.

    Attributes:
        model: 'teacher', 'student' or 'model'.
        steps: Of all solvers; None if it is not an ODE-ViT.
        nfe: Mean field evaluations per image.
        top1: Accuracy in percent.
        top5: The same; top-C with C < 5 classes.
        loss: Mean cross-entropy in nats per image; NaN if any logits are.
        agreement: Share of images whose top-1 class is the teacher's, in percent.
        kept: Share of the teacher's top-1 accuracy, in percent.
    """
    top1: float
    top5: float
    loss: float
    agreement: float | None
    kept: float | None

    COLUMNS = (('top1', 'top-1 %', 2), ('top5', 'top-5 %', 2), ('loss', 'loss', 4), ('agreement', 'agreement %', 1),
               ('kept', 'kept %', 1))


@dataclass(frozen=True, kw_only=True)
class EmbeddingResult(_Measured):
    """Of the embeddings of one model at one step count, as in Result; None for what needs more than was given.

    Attributes:
        cosine: With the teacher's, mean.
        error: Squared, relative to the variance of the teacher's embeddings.
        neighbours: Share of images with the same nearest other image as the teacher's, in percent.
        knn: Top-1 accuracy of the nearest labelled images, in percent.
        probe: That of a linear classifier.
        zero_shot: That of the class embedding with the largest cosine.
    """
    cosine: float | None = None
    error: float | None = None
    neighbours: float | None = None
    knn: float | None = None
    probe: float | None = None
    zero_shot: float | None = None

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
    """
    results: tuple[AnyResult, ...]
    data: str = ''
    trained_at: tuple[int, ...] = ()

    def table(self) -> str:
        """In Markdown."""
        rows = [['model', 'steps', 'NFE', 'parameters', *(heading for _, heading, _ in self.results[0].COLUMNS)]]
        for r in self.results:
            steps = f'**{r.steps}**' if r.steps in self.trained_at else cell(r.steps)
            rows.append([r.model, steps, cell(r.nfe), f'{r.parameters:,}',
                         *(cell(getattr(r, name), digits) for name, _, digits in r.COLUMNS)])
        return markdown_table(rows)

    def to_json(self) -> str:
        """With null for what is not finite."""
        return to_json([vars(r) | {'data': self.data} for r in self.results])

    def __repr__(self) -> str:
        trained = f"; trained with K = {', '.join(map(str, self.trained_at))}" if self.trained_at else ''
        if any(r.steps in self.trained_at for r in self.results):
            trained += ', in bold'
        of = f'{self.data}: ' if self.data else ''
        return f'{of}{self.results[0].images:,} images{trained}\n\n{self.table()}'

    _repr_markdown_ = __repr__
