"""Charts that move with the image and with t, as Plotly figures with frames."""
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from .findings import Findings

__all__ = ['Chart', 'charts', 'drawn', 'fill_page', 'plotly']

SHOWN = 5  # classes
OURS, THEIRS, BAR = '#3b82f6', '#c2610c', '#808080'


@dataclass(frozen=True)
class Chart:
    """A chart of a page.

    Attributes:
        title: Its title.
        about: What it shows, in a sentence.
        figure: Plotly figure.
        moves: How its frames are named, for image 3 at state 7: 'i' i3, 't' t7, 'b' 3-7; '' without frames.
        first: Whether it is on the first screen.
    """
    title: str
    about: str
    figure: Any
    moves: str
    first: bool = False


def charts(found: Findings, names: Sequence[str] | None) -> list[Chart]:
    """The charts of a report, the most important first; `names` are those of the classes."""
    own, other = found.geometry
    made: list[Chart] = []
    if found.probabilities is not None:
        made.append(_classes(found, names))
    rows: list[Any] = [  # title, what it shows, the model's measures [B, times] and the teacher's
        ('Distance from the teacher',
         "Relative to the norm of the teacher's state, over all tokens. Where it jumps, try another phase or a "
         'higher rank.', found.followed, lambda m: (m.times, m.distance), None),
        ('Probability of the final class',
         'As the norm and head read it from the state at t. If it is high early, images can stop early: odevit halt.',
         found.decided, lambda m: (m.times, m.probability), None),
        ('Speed',
         'Length of a step over the norm of the state, per unit of time. Where it is low, fewer steps are enough.',
         own, lambda m: (m.times[1:], m.speed / m.norm[:, 1:]), other),
        ('Angle between steps', 'In degrees: 0 is straight on, 90 a right angle. Straight trajectories need few steps.',
         own, lambda m: (m.times[1:-1], m.angle), other),
        ('Class token and patches',
         'Cosine of the class token and the mean patch token: near 1, pooling the patches would do as well.',
         own, lambda m: (m.times, m.cosine), other),
        ('Similarity of the patches',
         'Mean cosine of two patch tokens (anisotropy). Near 1, try fewer tokens: tokens=0.5.',
         own, lambda m: (m.times, m.anisotropy), other),
        ('Entropy of attention',
         'In nats: low where a token attends to few others; where it is high, try fewer tokens.',
         found.attention, lambda m: (m.times, m.entropy), None),
        ('Largest Lyapunov exponent',
         'Up to t, per unit of time: above 0, some small changes of the state grow, and larger steps are a risk.',
         found.exponents, lambda m: (m.times, m.running[..., 0]), None)]
    for title, about, ours, of, theirs in rows:
        if ours is not None and not bool(of(ours)[1].isnan().all()):
            made.append(_line(found, title, about, of(ours), None if theirs is None else of(theirs)))
    return made


def fill_page(package: str, parts: dict[str, str]) -> str:
    """The page.html of a package, with a part in place of each {{name}}."""
    before, *rest = files(package).joinpath('page.html').read_text(encoding='utf-8').split('{{')
    for piece in rest:  # in one pass, so that what is filled in is not filled in again
        name, after = piece.split('}}', 1)
        before += parts[name] + after
    return before


def drawn(figure: Any, **options: Any) -> str:
    """A figure as HTML for a page that holds plotly.js."""
    return figure.to_html(full_html=False, include_plotlyjs=False,
                          config={'displayModeBar': False, 'responsive': True}, **options)


def plotly() -> Any:
    """Plotly's figures; raises ImportError, which says what to type, without it."""
    try:
        import plotly.graph_objects as go
    except ImportError as e:
        raise ImportError('A report needs plotly. Type: pip install plotly') from e
    return go


def _figure(data: list[Any], frames: list[Any], **layout: Any) -> Any:
    go = plotly()
    figure = go.Figure(data=data, frames=frames)
    figure.update_layout(
        template='none', margin=dict(l=52, r=12, t=8, b=40), height=260, paper_bgcolor='rgba(0,0,0,0)',
        plot_bgcolor='rgba(0,0,0,0)', legend=dict(orientation='h', y=1.02, yanchor='bottom', x=0),
        font=dict(family='system-ui, sans-serif', size=12), hovermode='closest', dragmode=False)
    figure.update_layout(**layout)
    figure.update_xaxes(zeroline=False, fixedrange=True)
    figure.update_yaxes(zeroline=False, fixedrange=True)
    return figure


def _rounded(values: Any, digits: int = 4) -> list[Any]:
    """As numbers for JSON; NaN becomes None."""
    values = torch.as_tensor(values).double()
    return [None if value != value else float(f'{value:.{digits}g}') for value in values.tolist()]


def _frame(name: str, data: list[Any], first: int, **layout: Any) -> Any:
    """A frame that replaces traces, from the `first` on, and parts of the layout."""
    return plotly().Frame(name=name, data=data, traces=list(range(first, first + len(data))), layout=layout)


def _classes(found: Findings, names: Sequence[str] | None) -> Chart:
    go = plotly()
    probabilities: Any = found.probabilities
    taught = found.taught
    chosen = []
    for i, path in enumerate(probabilities):
        best = path.amax(dim=0) + 2 * path[-1] + (0 if taught is None else 2 * taught[i])
        best = best.topk(min(SHOWN, path.shape[1])).indices
        chosen.append(best[path[-1, best].argsort()].tolist())
    labels = [[escape(names[index] if names else f'class {index}') for index in best] for best in chosen]

    def traces(i: int, k: int) -> list[Any]:
        shown = dict(y=list(range(len(chosen[i]))), customdata=labels[i],
                     hovertemplate='%{customdata}: %{x:.1%}<extra></extra>')
        made = [go.Bar(x=_rounded(probabilities[i, k, chosen[i]]), orientation='h', name='model',
                       marker=dict(color=OURS), **shown)]
        if taught is not None:
            made.append(go.Scatter(
                x=_rounded(taught[i, chosen[i]]), mode='markers', name='teacher, at the end',
                marker=dict(color=THEIRS, size=12, symbol='line-ns-open', line=dict(width=3)), **shown))
        return made

    def ticks(i: int) -> dict[str, Any]:
        return dict(tickvals=list(range(len(labels[i]))), ticktext=[
            label if len(label) <= 24 else f'{label[:22]}…' for label in labels[i]])
    figure = _figure(
        traces(0, 0),
        [*(_frame(f'i{i}', [], 0, yaxis=ticks(i)) for i in range(len(chosen))),
         *(_frame(f'{i}-{k}', traces(i, k), 0) for i in range(len(chosen)) for k in range(len(found.times)))],
        xaxis=dict(range=[0, 1], tickformat='.0%', tickvals=[0, 0.5, 1]), yaxis=dict(automargin=True, **ticks(0)))
    figure.update_layout(height=300, margin=dict(r=30))
    about = 'Probabilities, as the norm and head read them from the state at t.'
    return Chart('What it would answer at t', about, figure, 'ib', True)


def _line(found: Findings, title: str, about: str, measured: Any, taught: Any) -> Chart:
    """A line over t from times [T] and values [B, T] of the model, and perhaps of the teacher."""
    go, ours = plotly(), measured[1]

    def line(times: Tensor, values: Tensor, mode: str, name: str, **style: Any) -> Any:
        return go.Scatter(x=_rounded(times), y=_rounded(values), mode=mode, name=name, line=style, marker=dict(size=5),
                          hovertemplate='t = %{x:.3g}: %{y:.3g}<extra></extra>')

    def own(i: int) -> Any:
        return line(measured[0], ours[i], 'lines', 'this image', color=OURS, width=1, dash='dot')

    def now(t: float) -> dict[str, Any]:
        return dict(shapes=[dict(type='line', x0=t, x1=t, y0=0, y1=1, yref='paper', line=dict(color=BAR, width=2))])
    data = [own(0), line(measured[0], ours.nanmean(dim=0), 'lines+markers', 'model', color=OURS, width=2)]
    if taught is not None:
        data.append(line(taught[0], taught[1].nanmean(dim=0), 'lines', 'teacher', color=THEIRS, width=2, dash='dash'))
    figure = _figure(data, [*(_frame(f'i{i}', [own(i)], 0) for i in range(len(ours))),
                            *(_frame(f't{k}', [], 0, **now(t)) for k, t in enumerate(found.times))],
                     xaxis=dict(title='t', range=[found.times[0] - 0.2, found.times[-1] + 0.2]),
                     yaxis=dict(rangemode='tozero' if bool((ours.nan_to_num() >= 0).all()) else 'normal'),
                     **now(found.times[0]))
    return Chart(title, about, figure, 'it')
