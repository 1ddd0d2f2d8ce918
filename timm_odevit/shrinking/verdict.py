"""The verdict: a table of what was compared, what it recommends, and both as a page."""
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..files import markdown_table
from ..reporting.page import page
from .candidates import Row

__all__ = ['Verdict', 'dominated']


@dataclass(frozen=True)
class Verdict:
    """What `shrink` found; print it for a table.

    Attributes:
        rows: What was measured of each candidate, the original first.
        measure: 'accuracy', 'agreement' or 'cosine', in percent.
        keep: Share of the original's value that is to be kept, between 0 and 1.
        images: Number of images on which the rows were measured.
        about: What was done, in sentences.
        outlook: What more minutes or images would change, in sentences.
        machine: What the times depend on.

    Examples:
        >>> verdict = shrink(vit, 'photos', 'small', size='50%')
        >>> best = verdict.smallest
        >>> print(verdict.recommendation, best.name, best.file, best.mb, best.value)
    """
    rows: tuple[Row, ...]
    measure: str
    keep: float
    images: int
    about: tuple[str, ...]
    outlook: tuple[str, ...]
    machine: str

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts and lists, ready for JSON."""
        rows = [{**asdict(row), 'dominated_by': by} for row, by in zip(self.rows, dominated(self.rows), strict=True)]
        return {**asdict(self), 'rows': rows, 'recommendation': self.recommendation}

    @property
    def good(self) -> list[Row]:
        """The rows with a file that keep enough; at least the original."""
        return [row for row in self.rows if row.mb is not None and row.value >= self.keep * self.rows[0].value]

    @property
    def smallest(self) -> Row:
        """The row of `good` with the smallest file, of those that no other row beats in everything."""
        return min(self._unbeaten, key=_size)

    @property
    def fastest(self) -> Row:
        """The row that takes the least time for a batch of 32, of the same rows."""
        return min(self._unbeaten, key=_time)

    @property
    def _unbeaten(self) -> list[Row]:
        beaten = [row for row, by in zip(self.rows, dominated(self.rows), strict=True) if by]
        return [row for row in self.good if row not in beaten] or self.good

    @property
    def recommendation(self) -> str:
        """What to use, in a sentence or two."""
        first, small, fast, share = self.rows[0], self.smallest, self.fastest, f'{100 * self.keep:g} %'
        own = min((row for row in self.good if row.kind == 'original'), key=_size)

        def words(row: Row) -> str:
            other = first if row == own else own
            size, time = _size(row) / _size(other), _time(row) / _time(other)
            return (f'{row.name} ({row.mb:.2f} MB, {row.value:.1f} % {self.measure}; {size:.2f} of the size and '
                    f'{time:.2f} of the time, for a batch, of {other.name})')
        if small.kind == 'original' or _size(small) > 0.9 * _size(own):
            said = (f'Keep your model: no file much smaller than {own.name} ({own.mb:.2f} MB) keeps {share} of its '
                    f'{self.measure}.')
        else:
            said = f'For a small file: {words(small)}.'
        if fast != small:
            said += f' For speed: {words(fast)}.'
        near = [row for row in self.rows[1:] if row.mb and (_size(row) <= _size(small) or row == fast)
                and abs(row.value - self.keep * first.value) < row.margin]
        if near:
            said += (f" {self.images:,} images cannot tell whether {', '.join(row.name for row in near)} would keep "
                     f'{share} on others: the difference from the original is known to ± '
                     f'{max(row.margin for row in near):.1f} points.')
        return said

    def cells(self) -> list[list[str]]:
        """The table as text: its heads, and a line for each row."""
        lines = [['', 'file, MB', f'{self.measure}, %', 'ms, batch 1', 'ms per image, batch 32', '10⁶ multiply-adds',
                  '']]
        for row, by in zip(self.rows, dominated(self.rows), strict=True):
            ms = ('-', '-') if row.ms is None else tuple(f'{value:.3g}' for value in row.ms)
            lines.append([row.name, '-' if row.mb is None else f'{row.mb:.2f}', f'{row.value:.1f} ± {row.interval:.1f}',
                          *ms, f'{row.operations:.0f}', f'worse than {by}' if by else ''])
        return lines

    def table(self) -> str:
        """The table, as Markdown."""
        return markdown_table(self.cells())

    def __str__(self) -> str:
        return '\n'.join([*self.about, '', self.table(), '', self.machine, self.recommendation, *self.outlook])

    def _repr_markdown_(self) -> str:  # in a notebook
        about = '\n'.join(['```', *self.about, '```'])
        return '\n\n'.join([about, self.table(), self.machine, self.recommendation, *self.outlook])

    def to_html(self, title: str) -> str:
        """A page with plots, which needs no network and no server; raises ImportError without plotly."""
        (head, *lines), beaten = self.cells(), dominated(self.rows)
        about = ('The numbers are those of the rows of the table. Pale: another row is at least as good in size, value '
                 'and both times, and better in one of them.')
        plots = [dict(
            kind='points', title=f'{self.measure} by {what}', about=about, axes=[axis, f'{self.measure}, %'],
            points=[[row.kind, row.name, str(i), of(row), row.value, row.interval, bool(by)]
                    for i, (row, by) in enumerate(zip(self.rows, beaten, strict=True), 1) if row.ms])
            for what, axis, of in (('size', 'file, MB (logarithmic)', _size),
                                   ('time', 'ms per image in a batch of 32 (logarithmic)', _time))]
        return page(title, self.recommendation, '\n\n'.join([*self.about, f'Times: {self.machine}.']),
                    [['', *head], *([str(i), *line] for i, line in enumerate(lines, 1))], plots, text=self.outlook,
                    pale=beaten)


def _size(row: Row) -> float:
    return row.mb or 1.


def _time(row: Row) -> float:
    return row.ms[1] if row.ms else 1.


def dominated(rows: Sequence[Row]) -> list[str]:
    """For each row, the name of the first that is at least as good in size, value and both times, and better in one."""
    def shown(row: Row) -> tuple[float, ...] | None:
        if row.ms is None or row.mb is None:
            return None
        return (round(row.mb, 2), -round(row.value, 1), *(float(f'{value:.2g}') for value in row.ms))
    keys = [shown(row) for row in rows]
    return [next((other.name for other, theirs in zip(rows, keys, strict=True)
                  if own and theirs and theirs != own and all(a <= b for a, b in zip(theirs, own, strict=True))), '')
            for own in keys]
