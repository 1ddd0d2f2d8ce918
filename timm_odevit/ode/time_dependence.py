"""Fields that depend on time: parameters with a value per layer, and phases with a block each."""
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from .fields import Field
from .skeleton import run_with, skeleton

__all__ = [
    'MERGED', 'RESIDUALS', 'MergedField', 'PiecewiseField', 'TimeField', 'bare_name', 'matrix_shape', 'residual_key']

RESIDUALS = ('vectors', 'up', 'down')  # attributes of a TimeField: of vectors, and the factors of those of matrices
MERGED = 'This model is merged. Call `.restore()` on the object that `merge_()` returned.'


@register_notrace_module  # FX would look up the parameters in the base field and miss the residuals
class TimeField(Field):
    """A field whose parameters are those of a base field plus a residual for each layer of the base model.

    A vector v becomes v + d(t), a matrix W becomes W + B(t) A(t), with A and B of rank r (0 for vectors only). The
    residual of layer l applies from t = l to the next layer, that of the first also before, that of the last after it;
    over the interval of a step, residuals are averaged. Weight decay therefore pulls each layer towards the shared
    block. Matrices are merged before they are used, once per evaluation; training keeps them for the backward pass, as
    much memory as the base model's blocks.

    Source: Relaxed Recursive Transformers, arXiv 2410.20672.
    """
    depends_on_time = True

    def __init__(self, base: Field, layers: Sequence[int], rank: int = 0) -> None:
        super().__init__()
        self.base = base
        self.names = base.names
        self.layers = tuple(layers)
        self.rank = rank
        self.vectors, self.up, self.down = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        L = len(self.layers)
        for name, p in base.named_parameters():
            key = name.replace('.', '-')
            if p.ndim <= 1:
                self.vectors[key] = nn.Parameter(p.new_zeros(L, *p.shape), p.requires_grad)
            elif rank > 0:
                M, N = matrix_shape(p)
                r = min(rank, M, N)
                self.up[key] = nn.Parameter(p.new_zeros(L, M, r), p.requires_grad)
                # not 0 as well: with both factors 0, neither gets a gradient
                down = torch.randn(L, r, N, device=p.device, dtype=p.dtype) / N ** 0.5
                self.down[key] = nn.Parameter(down, p.requires_grad)
        self.statistics = nn.Module()

    @property
    def jumps(self):
        return [float(layer) for layer in self.layers[1:]]

    def add_statistics(self, name: str, residuals: Tensor) -> None:
        """Add residuals of a buffer of the base, such as a running mean, per layer [L, ...]; not trained."""
        self.statistics.register_buffer(name.replace('.', '-'), residuals)

    def forward(self, t, x, context=None, part=''):
        tensors = self.at(t, part, None if context is None else context.interval)
        return run_with(self.base, tensors, t, x, context, part)

    @property
    def has_attention_maps(self):
        return self.base.has_attention_maps

    def block_to_resize(self):
        return self.base.block_to_resize()

    def attention_map(self, t, x, interval=None):
        return skeleton(self.base, self.at(t, 'attention', interval)).attention_map(t, x)

    def at(self, t: float, part: str = '', interval: tuple[float, float] | None = None) -> dict[str, Tensor]:
        """The parameters of the base at t, or averaged over an interval: those of its attention, of its MLP, or all."""
        if interval is None:
            shares = [(_last(self.layers, t), 1.)]
        else:
            shares = self._shares(*interval)
        parameters = {residual_key(name): (name, p) for name, p in self.base.named_parameters()}
        if missing := [key.replace('-', '.') for key in (*self.vectors, *self.up) if key not in parameters]:
            raise RuntimeError(f"{', '.join(missing)}: these parameters have residuals but are no longer in the "
                               'shared block. Put back the part that was replaced, or convert again.')
        merged = {}
        for key, (name, p) in parameters.items():
            if part and name.startswith(self.base.attention_prefixes) != (part == 'attention'):
                continue
            if key in self.vectors:
                merged[name] = p + sum(share * self.vectors[key][i] for i, share in shares)
            elif key in self.up:
                up = torch.cat([share * self.up[key][i] for i, share in shares], dim=1)
                down = torch.cat([self.down[key][i] for i, _ in shares])
                merged[name] = torch.addmm(p.flatten(1), up, down).view_as(p)
        for key, residuals in self.statistics.named_buffers():
            name = key.replace('-', '.')
            merged[name] = self.base.get_buffer(name) + sum(share * residuals[i] for i, share in shares)
        return merged

    def _shares(self, start: float, end: float) -> list[tuple[int, float]]:
        """The index of each layer that applies in an interval, and its share of it."""
        bounds = [-math.inf, *self.layers[1:], math.inf]
        shares = [(min(end, b) - max(start, a)) / (end - start) for a, b in pairwise(bounds)]
        return [(i, 1. if share > 1. - 1e-6 else share) for i, share in enumerate(shares) if share > 1e-6]

    def extra_repr(self) -> str:
        return f'layers={list(self.layers)}, rank={self.rank}'


class PiecewiseField(Field):
    """Several fields, one at a time: fields[which[i]] (by default, in order) from times[i] to times[i + 1].

    The first piece also applies before the first time, the last one after the last.

    Source: Raptor, arXiv 2512.19941.
    """

    def __init__(self, fields: Sequence[Field], times: Sequence[float], which: Sequence[int] | None = None) -> None:
        super().__init__()
        self.fields = nn.ModuleList(fields)
        self.times = tuple(times)
        self.which = tuple(range(len(fields)) if which is None else which)
        self.names = fields[0].names

    @property
    def depends_on_time(self):
        return any(field.depends_on_time for field in self.fields)

    @property
    def has_attention_maps(self):
        return all(field.has_attention_maps for field in self.fields)

    @property
    def jumps(self):
        return [float(t) for t, (a, b) in zip(self.times[1:], pairwise(self.which), strict=True)
                if a != b or self.depends_on_time]

    @property
    def phases(self):
        return list(self.fields)

    def select(self, t):
        return self.fields[self.which[_last(self.times, t)]]

    def forward(self, t, x, context=None, part=''):
        return self.select(t)(t, x, context, part)

    def attention_map(self, t, x, interval=None):
        return self.select(t).attention_map(t, x, interval)

    def extra_repr(self) -> str:
        return f'times={self.times}, which={self.which}'


class MergedField(PiecewiseField):
    """The frozen fields of a merged model."""

    def block_to_resize(self):
        raise ValueError(MERGED)


def bare_name(name: str) -> str:
    """The name of a parameter without wrappers: peft's layers hold the layer that they wrap as `base_layer`."""
    return name.replace('.base_layer.', '.')


def residual_key(name: str) -> str:
    return bare_name(name).replace('.', '-')


def _last(times: Sequence[float], t: float | Tensor) -> int:
    """The index of the last of some times that is at most t, or 0; bisect does not compile."""
    t = float(t.detach()) if isinstance(t, Tensor) else t
    return max(sum(time <= t + 1e-6 for time in times) - 1, 0)


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter of two or more dimensions, viewed as a matrix."""
    return p.shape[0], p[0].numel()
