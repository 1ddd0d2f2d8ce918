"""Charts that move with t, as Plotly figures with one frame per image and state."""
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import Tensor

from ..dynamics.similarity import Similarity
from .findings import Findings
from .pictures import SHOWN

__all__ = ['Chart', 'charts']

SPANS = 3
OURS, THEIRS, FAINT = '#3b82f6', '#ea8a0b', 'rgba(128,128,128,0.35)'


@dataclass(frozen=True)
class Chart:
    """A chart of a page.

    Attributes:
        title: Its title.
        about: What it shows, in a sentence.
        figure: Plotly figure; its frames are named 'image-state', such as 0-12.
        first: Whether it is on the first screen.
    """
    title: str
    about: str
    figure: Any
    first: bool = False


def charts(found: Findings, names: Optional[Sequence[str]]) -> List[Chart]:
    """The charts of a report, the most important first.

    Args:
        found: What was measured.
        names: Names of the classes.

    Raises:
        ImportError: plotly is not installed.
    """
    made = [_plane(found)]
    if found.probabilities is not None:
        made.append(_classes(found, names))
    own, other = found.geometry
    times, between = found.times, found.times[1:-1]
    steps = found.times[1:]

    def line(title: str, about: str, at: Sequence[float], ours: Tensor, theirs: Any = None) -> None:
        if ours.numel() and not bool(ours.isnan().all()):
            made.append(_line(found, title, about, at, ours, theirs))
    if found.followed is not None:
        line('Distance from the teacher', "Relative to the norm of the teacher's state, over all tokens.", times,
             found.followed.distance)
    if found.decided is not None:
        line('Probability of the final class', 'If norm and head read the state at t.', times,
             found.decided.probability)
    line('Speed', 'Length of a step over the norm of the state, per unit of time.', steps, own.speed / own.norm[:, 1:],
         None if other is None else (other.times[1:], other.speed / other.norm[:, 1:]))
    line('Angle between steps', 'In degrees: 0 is straight on, 90 a right angle.', between, own.angle,
         None if other is None else (other.times[1:-1], other.angle))
    line('Class token and patches', 'Cosine of the class token and the mean patch token.', times, own.cosine,
         None if other is None else (other.times, other.cosine))
    line('Likeness of the patches', 'Mean cosine of two patch tokens (anisotropy): 1 if all point the same way.', times,
         own.anisotropy, None if other is None else (other.times, other.anisotropy))
    if found.attention is not None:
        line('Entropy of attention', 'In nats: low where a token attends to few others.',
             found.attention.times.tolist(), found.attention.entropy)
    running = found.exponents.running[..., 0]
    line('Largest Lyapunov exponent', 'Up to t, per unit of time: above 0, small changes of the state grow.',
         found.exponents.times.tolist(), running)
    if found.recovery is not None:
        line('Recovery', 'What is left in the end of a random perturbation at t, relative to its size.',
             found.recovery.times.tolist(), found.recovery.factor)
    if found.similarity is not None:
        made += [_similarity(each, title) for each, title in zip(found.similarity, (
            't', "t of the teacher's state"), strict=True) if each is not None]
    return made


def _plotly() -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError as e:
        raise ImportError("A report needs plotly. Type: pip install 'timm-odevit[report]'") from e
    return go


def _figure(data: List[Any], frames: List[Any], **layout: Any) -> Any:
    go = _plotly()
    figure = go.Figure(data=data, frames=frames)
    figure.update_layout(
        template='none', margin=dict(l=52, r=12, t=8, b=40), height=260, paper_bgcolor='rgba(0,0,0,0)',
        plot_bgcolor='rgba(0,0,0,0)', legend=dict(orientation='h', y=1.02, yanchor='bottom', x=0),
        font=dict(family='system-ui, sans-serif', size=12), hovermode='closest', dragmode=False)
    figure.update_layout(**layout)
    figure.update_xaxes(zeroline=False, fixedrange=True)
    figure.update_yaxes(zeroline=False, fixedrange=True)
    return figure


def _rounded(values: Any, digits: int = 4) -> List[Any]:
    """As numbers for JSON; NaN becomes None."""
    values = torch.as_tensor(values).double()
    return [None if value != value else float(f'{value:.{digits}g}') for value in values.tolist()]


def _frames(found: Findings, of: Any) -> List[Any]:
    """A frame for each image and state; `of` gives the changes for their indices."""
    go = _plotly()
    return [go.Frame(name=f'{i}-{k}', **of(i, k))
            for i in range(len(found.plane.points)) for k in range(len(found.times))]


def _plane(found: Findings) -> Chart:
    go = _plotly()
    ours, theirs = found.plane.points, found.plane.others
    other_times = found.plane.other_times.tolist()
    all_x, all_y = [], []
    for path in ours:
        all_x += [*_rounded(path[:, 0]), None]
        all_y += [*_rounded(path[:, 1]), None]
    taught = theirs.shape[1] > 0

    def traces(i: int, k: int) -> List[Any]:
        made = [
            go.Scatter(x=_rounded(ours[i, :, 0]), y=_rounded(ours[i, :, 1]), mode='lines+markers', name='model',
                       line=dict(color=OURS, width=2), marker=dict(size=4), hoverinfo='skip'),
            go.Scatter(x=_rounded(ours[i, k:k + 1, 0]), y=_rounded(ours[i, k:k + 1, 1]), mode='markers',
                       marker=dict(color=OURS, size=14), showlegend=False, hoverinfo='skip')]
        if taught:
            near = min(range(len(other_times)), key=lambda n: abs(other_times[n] - found.times[k]))
            made += [
                go.Scatter(x=_rounded(theirs[i, :, 0]), y=_rounded(theirs[i, :, 1]), mode='lines', name='teacher',
                           line=dict(color=THEIRS, width=2, dash='dash'), hoverinfo='skip'),
                go.Scatter(x=_rounded(theirs[i, near:near + 1, 0]), y=_rounded(theirs[i, near:near + 1, 1]),
                           mode='markers', marker=dict(color=THEIRS, size=14, symbol='circle-open', line=dict(width=3)),
                           showlegend=False, hoverinfo='skip')]
        return made
    everything = go.Scatter(x=all_x, y=all_y, mode='lines', line=dict(color=FAINT, width=1), name='other images',
                            hoverinfo='skip')
    count = 5 if taught else 3
    figure = _figure(
        [everything, *traces(0, 0)],
        _frames(found, lambda i, k: dict(data=traces(i, k), traces=list(range(1, count)))),
        xaxis=dict(showticklabels=False, title='first principal component'),
        yaxis=dict(showticklabels=False, title='second', scaleanchor='x'))
    figure.update_layout(height=300, margin=dict(l=30))
    token = 'class token' if found.geometry[0].cosine.isfinite().any() else 'mean patch token'
    about = f'The {token} in a plane that shows {100 * found.plane.explained:.0f} % of the variance.'
    return Chart('Its way through the space of features', about, figure, True)


def _classes(found: Findings, names: Optional[Sequence[str]]) -> Chart:
    go = _plotly()
    probabilities: Any = found.probabilities
    taught = found.taught
    chosen = []
    for i, path in enumerate(probabilities):
        best = (path.amax(dim=0) + 2 * path[-1]) if taught is None else path.amax(dim=0) + 2 * path[-1] + 2 * taught[i]
        best = best.topk(min(SHOWN, path.shape[1])).indices
        chosen.append(best[path[-1, best].argsort()].tolist())

    def label(index: int) -> str:
        return names[index].split(',')[0] if names else f'class {index}'

    def traces(i: int, k: int) -> List[Any]:
        shown = [label(index) for index in chosen[i]]
        made = [go.Bar(x=_rounded(probabilities[i, k, chosen[i]]), y=shown, orientation='h', name='model',
                       marker=dict(color=OURS), hovertemplate='%{y}: %{x:.1%}<extra></extra>')]
        if taught is not None:
            made.append(go.Scatter(
                x=_rounded(taught[i, chosen[i]]), y=shown, mode='markers', name='teacher, at the end',
                marker=dict(color=THEIRS, size=12, symbol='line-ns-open', line=dict(width=3)),
                hovertemplate='%{y}: %{x:.1%}<extra></extra>'))
        return made
    count = 1 if taught is None else 2
    figure = _figure(
        traces(0, 0), _frames(found, lambda i, k: dict(data=traces(i, k), traces=list(range(count)))),
        xaxis=dict(range=[0, 1], tickformat='.0%', tickvals=[0, 0.5, 1]), yaxis=dict(automargin=True))
    figure.update_layout(height=300)
    return Chart('What it would answer at t', 'Probabilities, if norm and head read the state at t.', figure, True)


def _line(found: Findings, title: str, about: str, at: Sequence[float], ours: Tensor, theirs: Any) -> Chart:
    go = _plotly()
    at = list(at)

    def own(i: int) -> Any:
        return go.Scatter(x=at, y=_rounded(ours[i]), mode='lines', line=dict(color=OURS, width=1, dash='dot'),
                          name='this image', hovertemplate='t = %{x:.3g}: %{y:.3g}<extra></extra>')

    def now(k: int) -> Dict[str, Any]:
        t = found.times[k]
        return dict(shapes=[dict(type='line', x0=t, x1=t, y0=0, y1=1, yref='paper', line=dict(color=FAINT, width=3))])
    data = [own(0), go.Scatter(x=at, y=_rounded(ours.nanmean(dim=0)), mode='lines+markers', name='model',
                               line=dict(color=OURS, width=2), marker=dict(size=5),
                               hovertemplate='t = %{x:.3g}: %{y:.3g}<extra></extra>')]
    if theirs is not None:
        times, values = theirs
        data.append(go.Scatter(x=list(map(float, times)), y=_rounded(values.nanmean(dim=0)), mode='lines',
                               name='teacher', line=dict(color=THEIRS, width=2, dash='dash'),
                               hovertemplate='t = %{x:.3g}: %{y:.3g}<extra></extra>'))
    figure = _figure(data, _frames(found, lambda i, k: dict(data=[own(i)], traces=[0], layout=now(k))),
                     xaxis=dict(title='t', range=[found.times[0] - 0.2, found.times[-1] + 0.2]),
                     yaxis=dict(rangemode='tozero' if bool((ours.nan_to_num() >= 0).all()) else 'normal'), **now(0))
    return Chart(title, about, figure)


def _similarity(alike: Similarity, columns: str) -> Chart:
    go = _plotly()
    z = [_rounded(row, 3) for row in alike.cka]
    heat = go.Heatmap(
        z=z, x=[f'{t:.3g}' for t in alike.other_times], y=[f'{t:.3g}' for t in alike.times], zmin=0, zmax=1,
        colorscale='Viridis', hovertemplate='t = %{y} and %{x}: %{z:.3f}<extra></extra>')
    figure = _figure([heat], [], xaxis=dict(title=columns, type='category'),
                     yaxis=dict(title='t', type='category', autorange='reversed'))
    about = 'Linear CKA over the images, 1 for the same geometry.'
    if columns != 't':
        return Chart("Likeness to the teacher's states", f'{about} On a bright diagonal, they agree at the same time.',
                     figure)
    begins = alike.spans(min(SPANS, len(alike.cka)))
    spans = [place - 0.5 for place, t in enumerate(alike.times.tolist()) if t in begins]
    for place in spans:
        figure.add_vline(place, line=dict(color='white', dash='dot'))
        figure.add_hline(place, line=dict(color='white', dash='dot'))
    return Chart('Spans of similar states', f'{about} Dotted: cut into {len(spans) + 1} spans.', figure)
