"""The results of an evaluation: as a table, JSON, a plot, and in a notebook."""
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic

from typing_extensions import TypeVar

from ..files import markdown_table, to_json, write_text

__all__ = ['EmbeddingResult', 'Evaluation', 'Result']


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What every result says of one model at one step count.

    Attributes:
        model: 'teacher', 'student' or 'model'.
        steps: Number of solver steps; None for a model that is not an ODE-ViT.
        nfe: Field evaluations per image, their mean for an adaptive method or if images can halt; None if the model is
            not an ODE-ViT.
        parameters: Number of parameters.
        images: Number of images.
        images_per_second: Speed of the forward pass, without data loading and the first of several batches; each batch
            is timed once, so other programs disturb it. `odevit benchmark` compares speeds.
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
        """What a table shows in COLUMNS."""
        return [_text(getattr(self, name), digits) for name, _, digits in self.COLUMNS]


@dataclass(frozen=True, kw_only=True)
class Result(_Measured):
    """Results of one model at one step count; also has model, steps, nfe, parameters, images, images_per_second and
    halted.

    Attributes:
        top1: Top-1 accuracy in percent.
        top5: Top-5 accuracy in percent (top-C with C < 5 classes).
        loss: Mean cross-entropy in nats per image; NaN if any logits are (those images count as wrong).
        agreement: Share of images whose top-1 class is the teacher's, in percent; None without a teacher.
        kept: Share of the teacher's top-1 accuracy, in percent; None without a teacher.
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
    """Embeddings of one model at one step count; also has model, steps, ... and halted, as a Result has.

    Attributes:
        cosine: Mean cosine between the embedding of an image and the teacher's; None without a teacher.
        error: Squared error relative to the variance of the teacher's embeddings; None without a teacher.
        neighbours: Share of the images whose nearest other image is the one that the teacher finds, in percent; None
            without a teacher.
        knn: Top-1 accuracy of the nearest labelled images, in percent; None without labelled images.
        probe: Top-1 accuracy of a linear classifier on the embeddings, in percent; None without labelled images.
        zero_shot: Top-1 accuracy of the class embedding with the largest cosine, in percent; None without them.
    """
    cosine: float | None
    error: float | None
    neighbours: float | None
    knn: float | None
    probe: float | None
    zero_shot: float | None

    SCORE: ClassVar[str] = "cosine with the teacher's embedding"
    COLUMNS = (('cosine', 'cosine', 4), ('error', 'error', 4), ('neighbours', 'neighbours %', 1), ('knn', 'k-NN %', 2),
               ('probe', 'probe %', 2), ('zero_shot', 'zero-shot %', 2))


AnyResult = TypeVar('AnyResult', bound=Result | EmbeddingResult, default=Result)


@dataclass(frozen=True, repr=False)
class Evaluation(Generic[AnyResult]):
    """Results in the order in which they were measured: the teacher first, then one per step count.

    Attributes:
        results: The results, at least one.
        data: What the images are, in words.
        trained_at: Step counts that the model was trained with, if known.

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
        """A sentence on what was measured."""
        trained = f"; trained with K = {', '.join(map(str, self.trained_at))}" if self.trained_at else ''
        if any(r.steps in self.trained_at for r in self.results):
            trained += ', in bold'
        return f"{f'{self.data}: ' if self.data else ''}{self.results[0].images:,} images{trained}"

    def table(self) -> str:
        """Return the results as a Markdown table."""
        rows = [['model', 'steps', 'NFE', 'parameters', *(heading for _, heading, _ in self.results[0].COLUMNS)]]
        for r in self.results:
            steps = f'**{r.steps}**' if r.steps in self.trained_at else _text(r.steps)
            rows.append([r.model, steps, _text(r.nfe), f'{r.parameters:,}', *r.cells()])
        return markdown_table(rows)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the results as JSON, with null for what is not finite; also write them to `path` if given."""
        text = to_json([asdict(r) for r in self.results])
        if path is not None:
            write_text(Path(path), text)
        return text

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the accuracy, or the agreement of embeddings, against solver steps, and beside it the speed in images/s.

        The teacher is a horizontal line.

        Args:
            path: Image file to write; its extension sets the format. None writes nothing.

        Returns:
            A matplotlib Figure.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: No result has a step count.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError('Plots need matplotlib. Type: pip install matplotlib') from e
        score, name = self.results[0].COLUMNS[0][0], self.results[0].SCORE
        students = sorted((r for r in self.results if r.steps is not None and r.model != 'teacher'),
                          key=lambda r: r.steps or 0)
        if not students:
            raise ValueError('There is no result of an ODE-ViT to plot. Evaluate one with steps=(1, 2, 4, ...).')
        if getattr(students[0], score) is None:
            raise ValueError(f'These results have no {name}. Evaluate with teacher=.')
        figure = Figure(figsize=(6, 4), layout='constrained')
        axes = figure.subplots()
        counts = [r.steps for r in students]
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
