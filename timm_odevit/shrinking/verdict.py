"""The verdict: a table of what was compared, what it recommends, and both as a page."""
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ..files import markdown_table
from .candidates import Row

COLORS = {'original': '#808080', 'plain': '#c2610c', 'student': '#3b82f6'}
AROUND = 'bottom right', 'middle left', 'top right'  # where a point's number is, in turn: points may be near
TICKS = [digit * 10. ** power for power in range(-3, 5) for digit in (1, 2, 5)]
FAINT, CLEAR = 'rgba(128,128,128,0.3)', 'rgba(0,0,0,0)'


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
        rows = [{**asdict(row), 'dominated_by': by} for row, by in zip(self.rows, self.beaten, strict=True)]
        return {**asdict(self), 'rows': rows, 'recommendation': self.recommendation}

    @cached_property
    def beaten(self) -> list[str]:
        """For each row, the name of the first that is as good in size, value and times, as shown, and better in one.

        Times whose 95 % intervals overlap are equal.
        """
        def beats(other: Row, own: Row) -> bool:
            slower = [0. if abs(a - b) < (p * a + q * b) / 100 else a - b
                      for a, b, p, q in zip(other.ms, own.ms, other.ms_off, own.ms_off, strict=True)]
            worse = [round(other.mb, 2) - round(own.mb, 2), round(own.value, 1) - round(other.value, 1), *slower]
            return all(by <= 0 for by in worse) and any(worse)
        return [next((other.name for other in self.rows if beats(other, own)), '') for own in self.rows]

    @property
    def good(self) -> list[Row]:
        """The rows that keep enough; at least the original."""
        return [row for row in self.rows if row.value >= self.keep * self.rows[0].value]

    @property
    def _unbeaten(self) -> list[Row]:
        good = self.good
        return [row for row, by in zip(self.rows, self.beaten, strict=True) if row in good and not by] or good

    @property
    def smallest(self) -> Row:
        """The row of `good` with the smallest file, of those that no other row beats in everything."""
        return min(self._unbeaten, key=lambda row: row.mb)

    @property
    def fastest(self) -> Row:
        """The row that takes the least time for a batch of 32, of the same rows."""
        return min(self._unbeaten, key=lambda row: row.ms[1])

    @property
    def recommendation(self) -> str:
        """What to use, in a sentence or two."""
        first, small, fast, share = self.rows[0], self.smallest, self.fastest, f'{100 * self.keep:g} %'
        own = min((row for row in self.good if row.kind == 'original'), key=lambda row: row.mb)

        def words(row: Row) -> str:
            other = first if row == own else own
            return (f'{row.name} ({row.mb:.2f} MB, {row.value:.1f} % {self.measure}; {row.mb / other.mb:.2f} of '
                    f'the size and {row.ms[1] / other.ms[1]:.2f} of the time, for a batch, of {other.name})')
        said = f'For a small file: {words(small)}.'
        if small.kind == 'original' or small.mb > 0.9 * own.mb:
            said = (f'Keep your model: no file much smaller than {own.name} ({own.mb:.2f} MB) keeps {share} of its '
                    f'{self.measure}.')
        if fast != small:
            said += f' For speed: {words(fast)}.'
        near = [row for row in self.rows[1:] if (row.mb <= small.mb or row == fast)
                and abs(row.value - self.keep * first.value) < row.margin]
        if near:
            said += (f" {self.images:,} images cannot tell whether {', '.join(row.name for row in near)} would keep "
                     f'{share} on others: the difference from the original is known to ± '
                     f'{max(row.margin for row in near):.1f} points.')
        return said

    def _cells(self) -> list[list[str]]:
        near = self.measure == 'cosine'
        heads = ['', 'file, MB', f'{self.measure}, %', *['same nearest image, %'] * near, 'ms, batch 1',
                 'ms per image, batch 32', 'million multiply-adds', '']
        lines = [[row.name, f'{row.mb:.2f}', f'{row.value:.1f} ± {row.interval:.1f}',
                  *[f'{row.neighbours:.1f}'] * near,
                  *(f'{ms:.3g}' + (off >= 0.5) * f' ± {off:.0f} %' for ms, off in zip(row.ms, row.ms_off, strict=True)),
                  f'{row.operations:.0f}', f'worse than {by}' if by else '']
                 for row, by in zip(self.rows, self.beaten, strict=True)]
        return [heads, *lines]

    def table(self) -> str:
        """In Markdown."""
        return markdown_table(self._cells())

    def __repr__(self) -> str:
        return '\n'.join([*self.about, '', self.table(), '', self.machine, self.recommendation, *self.outlook])

    def to_html(self, title: str) -> str:
        """A page with a plot, which needs no network and no server; raises ImportError without plotly."""
        try:
            from plotly.subplots import make_subplots
        except ImportError as e:
            raise ImportError('A page needs plotly. Type: pip install plotly') from e
        what = ('file, MB', [row.mb for row in self.rows]), ('ms per image, batch 32', [row.ms[1] for row in self.rows])
        figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.03)
        for column, (axis, xs) in enumerate(what, 1):
            points = sorted((x, -row.value, i) for i, (row, x) in enumerate(zip(self.rows, xs, strict=True)))
            front = [i for n, (_, value, i) in enumerate(points) if all(value < other for _, other, _ in points[:n])]
            for kind, color in COLORS.items():
                own = [i for *_, i in points if self.rows[i].kind == kind]
                figure.add_scatter(
                    row=1, col=column, name=kind, showlegend=column == 1, mode='markers+text', marker_color=color,
                    marker_size=9, x=[xs[i] for i in own], y=[self.rows[i].value for i in own], opacity=0.8,
                    error_y=dict(array=[self.rows[i].interval for i in own], thickness=0.7, width=0),
                    text=[str(i + 1) if i in front else '' for i in own],
                    textposition=[AROUND[front.index(i) % 3] if i in front else AROUND[0] for i in own],
                    hovertext=[f'{i + 1}: {escape(self.rows[i].name)}' for i in own])
            figure.update_xaxes(type='log', title=f'{axis}<br>(logarithmic)', title_font_size=12, tickvals=TICKS,
                                row=1, col=column)
        figure.update_yaxes(title=f'{self.measure}, %', row=1, col=1)
        figure.update_xaxes(gridcolor=FAINT).update_yaxes(gridcolor=FAINT, zeroline=False)
        figure.update_layout(height=380, margin=dict(l=50, r=10, t=10, b=50), paper_bgcolor=CLEAR, plot_bgcolor=CLEAR,
                             font_color='#808080', dragmode=False,
                             legend=dict(orientation='h', y=1.02, yanchor='bottom'))
        head, *rows = ([str(i or ''), *cells] for i, cells in enumerate(self._cells()))
        best = [i for i, by in enumerate(self.beaten) if i == 0 or not by]
        others = [row for i, row in enumerate(rows) if i not in best]
        return Template(Path(__file__).with_name('page.html').read_text(encoding='utf-8')).substitute(
            title=escape(title), lead=escape(self.recommendation),
            plot=figure.to_html(full_html=False, config={'displayModeBar': False}),
            outlook=''.join(f'<p>{escape(said)}</p>' for said in self.outlook),
            table=_html_table([head, *(rows[i] for i in best)]),
            others=f'<details><summary>{len(others)} more, each no better than one of these in anything'
                   f'</summary>{_html_table([head, *others])}</details>' if others else '',
            footer=escape('\n\n'.join([*self.about, f'Times: {self.machine}.'])))


def _html_table(rows: list[list[str]]) -> str:
    lines = (''.join(f'<t{kind}>{escape(cell)}</t{kind}>' for cell in row)
             for row, kind in zip(rows, 'h' + 'd' * len(rows), strict=False))
    return f"<div class=scroll><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"
