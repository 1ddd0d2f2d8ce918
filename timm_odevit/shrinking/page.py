"""The verdict as a page, with plots; it needs no network and no server."""
from html import escape
from typing import Any

from ..reporting.charts import drawn, fill_page, plotly
from .candidates import Row
from .verdict import Verdict, dominated

__all__ = ['write_page']

COLOURS = {'original': '#808080', 'plain': '#c2610c', 'student': '#3b82f6'}


def write_page(verdict: Verdict, title: str) -> str:
    """The page, as HTML; raises ImportError without plotly."""
    from plotly.offline import get_plotlyjs
    beaten = dominated(verdict.rows)
    head = ''.join(f'<th scope="col">{escape(text)}</th>' for text in ('', *verdict.heads))
    body = []
    for i, (row, by) in enumerate(zip(verdict.cells(), beaten, strict=True), 1):
        cells = ''.join(f'<td>{escape(cell)}</td>' for cell in (str(i), *row))
        body.append(f'<tr class="beaten">{cells}</tr>' if by else f'<tr>{cells}</tr>')
    parts = {
        'title': escape(title), 'recommendation': escape(verdict.recommendation),
        'outlook': ''.join(f'<p>{escape(text)}</p>' for text in verdict.outlook),
        'size': _plot(verdict, beaten, 'file, MB (logarithmic)', lambda row: row.mb),
        'time': _plot(verdict, beaten, 'ms per image in a batch of 32 (logarithmic)', lambda row: row.ms and row.ms[1]),
        'table': f'<table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>',
        'about': ''.join(f'<p>{escape(text)}</p>' for text in (*verdict.about, f'Times: {verdict.machine}.')),
        'plotly': get_plotlyjs(),
    }
    return fill_page(__package__, parts)


def _plot(verdict: Verdict, beaten: list[str], axis: str, of: Any) -> str:
    """What was measured over size or time: points with their numbers in the table, and the line of the best."""
    go = plotly()
    points = [(of(row), row, i, by) for i, (row, by) in enumerate(zip(verdict.rows, beaten, strict=True), 1) if of(row)]
    best: list[tuple[float, Row]] = []
    for x, row, *_ in sorted(points, key=lambda point: (point[0], -point[1].value)):
        if not best or row.value > best[-1][1].value:
            best.append((x, row))
    figure = go.Figure(go.Scatter(
        x=[x for x, _ in best], y=[row.value for _, row in best], mode='lines', hoverinfo='skip', showlegend=False,
        line=dict(color='rgba(128,128,128,0.6)', width=1, shape='hv')))
    for kind, colour in COLOURS.items():
        own = [point for point in points if point[1].name.startswith(kind)]
        figure.add_scatter(
            x=[x for x, *_ in own], y=[row.value for _, row, *_ in own], mode='markers+text', name=kind,
            text=[str(i) for *_, i, _ in own], textposition='top center', textfont=dict(color=colour),
            marker=dict(color=colour, size=9, opacity=[0.35 if by else 1. for *_, by in own]),
            customdata=[row.name for _, row, *_ in own],
            hovertemplate='%{customdata}: %{x:.3g}, %{y:.1f} %<extra></extra>',
            error_y=dict(array=[row.interval for _, row, *_ in own], thickness=0.7, width=0))
    figure.update_layout(
        template='none', height=340, margin=dict(l=52, r=12, t=8, b=44), paper_bgcolor='rgba(0,0,0,0)',
        plot_bgcolor='rgba(0,0,0,0)', font=dict(family='system-ui, sans-serif', size=12, color='#808080'),
        legend=dict(orientation='h', y=1.02, yanchor='bottom', x=0), dragmode=False)
    ticks = [digit * 10. ** power for power in range(-3, 5) for digit in (1, 2, 5)]
    figure.update_xaxes(type='log', title=axis, fixedrange=True, gridcolor='rgba(128,128,128,0.2)',
                       tickvals=ticks, ticktext=[f'{tick:g}' for tick in ticks])
    figure.update_yaxes(title=f'{verdict.measure}, %', fixedrange=True, gridcolor='rgba(128,128,128,0.2)')
    return drawn(figure)
