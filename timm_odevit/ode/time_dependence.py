"""Fields that depend on time: parameters with a value per layer, and phases with a block each.

A block runs with other weights through shallow copies of its modules: another thread may be running the model, too.
"""
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.func import functional_call

from .fields import Field

__all__ = [
    'RESIDUALS', 'MergedField', 'PiecewiseField', 'TimeField', 'bare_name', 'matrix_shape', 'residual_key',
    'shallow_copy', 'view']

RESIDUALS = ('vectors', 'up', 'down')  # attributes of a TimeField: of vectors, and the factors of those of matrices
Module = TypeVar('Module', bound=nn.Module)


@register_notrace_module  # FX would look up the parameters in the base field and miss the residuals
class TimeField(Field):
    """A field whose parameters are those of a base field plus a residual for each layer: v + d(t), W + B(t) A(t).

    A and B are of rank r; with 0, only vectors have residuals. The residual of layer l applies from t = l to the next
    layer; over the interval of a step, they are averaged. Source: Relaxed Recursive Transformers, arXiv 2410.20672.
    """
    depends_on_time = True

    def __init__(self, base: Field, layers: Sequence[int], rank: int = 0) -> None:
        super().__init__()
        self.base, self.names, self.layers = base, base.names, tuple(layers)
        self.jumps = [float(layer) for layer in self.layers[1:]]
        self.vectors, self.up, self.down = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        self.statistics, L = nn.Module(), len(self.layers)
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

    @property
    def has_attention_maps(self):
        return self.base.has_attention_maps

    def add_statistics(self, name: str, residuals: Tensor) -> None:
        """Add residuals of a buffer of the base, such as a running mean, per layer [L, ...]; not trained."""
        self.statistics.register_buffer(name.replace('.', '-'), residuals)

    def forward(self, t, x, context=None, part=''):
        tensors = self.at(t, part, None if context is None else context.interval)
        if torch.compiler.is_compiling():  # the swap is simulated; before PyTorch 2.13, Dynamo creates no modules
            return functional_call(self.base, tensors, (t, x, context, part), tie_weights=False)
        return _with_tensors(self.base, tensors)(t, x, context, part)

    def at(self, t: float, part: str = '', interval: tuple[float, float] | None = None) -> dict[str, Tensor]:
        """The parameters of the base, of a part of it or all, at t or averaged over an interval."""
        shares = [(_last(self.layers, t), 1.)] if interval is None else self._shares(*interval)
        parameters = {residual_key(name): (name, p) for name, p in self.base.named_parameters()}
        if missing := [key.replace('-', '.') for key in (*self.vectors, *self.up) if key not in parameters]:
            raise RuntimeError(f"{', '.join(missing)}: these parameters have residuals but are no longer in the shared "
                               'block. Put them back, or convert again.')
        merged = {}
        for key, (name, p) in parameters.items():
            if part and name.startswith(self.base.attention_prefixes) == (part == 'mlp'):
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
        """The index of each layer in an interval, and its share of it."""
        bounds = [-math.inf, *self.layers[1:], math.inf]
        shares = [(min(end, b) - max(start, a)) / (end - start) for a, b in pairwise(bounds)]
        return [(i, 1. if share > 1. - 1e-6 else share) for i, share in enumerate(shares) if share > 1e-6]


class PiecewiseField(Field):
    """Several fields, one at a time: fields[which[i]] from times[i] to times[i + 1], and before the first and after the
    last time. No step crosses a border. Source: Raptor, arXiv 2512.19941.
    """

    def __init__(self, fields: Sequence[Field], times: Sequence[float], which: Sequence[int],
                 borders: Sequence[float] = ()) -> None:
        super().__init__()
        self.fields, self.names = nn.ModuleList(fields), fields[0].names
        self.times, self.which, self.borders = tuple(times), tuple(which), tuple(borders)
        self.depends_on_time = any(field.depends_on_time for field in fields)
        self.jumps = [float(t) for t, (a, b) in zip(self.times[1:], pairwise(self.which), strict=True)
                      if a != b or self.depends_on_time]

    @property
    def has_attention_maps(self):
        return all(field.has_attention_maps for field in self.fields)

    @property
    def phases(self):
        return list(self.fields)

    def select(self, t):
        return self.fields[self.which[_last(self.times, t)]]

    def forward(self, t, x, context=None, part=''):
        return self.select(t)(t, x, context, part)


class MergedField(PiecewiseField):
    """The frozen fields of a merged model, one for each step."""


def bare_name(name: str) -> str:
    """The name of a parameter without wrappers: peft's layers hold the layer that they wrap as `base_layer`."""
    return name.replace('.base_layer.', '.')


def residual_key(name: str) -> str:
    return bare_name(name).replace('.', '-')


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter of two or more dimensions, viewed as a matrix."""
    return p.shape[0], p[0].numel()


def _last(times: Sequence[float], t: float | Tensor) -> int:
    """The index of the last of some times that is at most t, or 0; bisect does not compile."""
    t = float(t.detach()) if isinstance(t, Tensor) else t
    return max(sum(time <= t + 1e-6 for time in times) - 1, 0)


def _with_tensors(module: Module, tensors: Mapping[str, Tensor]) -> Module:
    """A module that shares everything with another one but some parameters and buffers, by name: copies nothing."""
    twin: Any = shallow_copy(module)
    for kind in ('_parameters', '_buffers'):
        twin.__dict__[kind] = module.__dict__[kind].copy()
    below: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, dot, rest = name.partition('.')
        if dot:
            below.setdefault(first, {})[rest] = tensor
        else:
            (twin._buffers if first in twin._buffers else twin._parameters)[first] = tensor
    for first, inner in below.items():
        twin._modules[first] = _with_tensors(twin._modules[first], inner)
    return twin


def shallow_copy(module: Module) -> Module:
    """A module of the same class with the same settings, hooks and tensors, but submodules that can be replaced."""
    twin: Any = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    if 'forward' in module.__dict__:
        twin.__dict__.update(_rebound(module, module, twin))
        if twin.__dict__['forward'] is module.__dict__['forward']:
            raise RuntimeError(f'The forward of this {type(module).__name__} was replaced by a function, which may '
                               'hold other weights. Use a method, a partial that takes the module, or a hook.')
    twin.__dict__['_compiled_call_impl'] = None  # module.compile() ties it to the original module
    twin.__dict__['_modules'] = module.__dict__['_modules'].copy()
    return twin


def view(module: Any, twins: Mapping[Any, Any]) -> Any:
    """A shallow copy of a module in which some modules are replaced by twins; the module itself if it has none."""
    if module in twins:
        return twins[module]
    children = {name: view(child, twins) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copied = shallow_copy(module)
    copied._modules.update(children)
    for original, twin in twins.items():
        twin.__dict__.update(_rebound(twin, module, copied))
        if module.__dict__.get('feature_info') is original.feature_info:
            copied.feature_info = twin.feature_info
    for name, child in children.items():  # some are bound to their host, such as RoPE, which makes a table per step
        if child is module._modules[name] and (bound := _rebound(child, module, copied)):
            copied._modules[name] = shallow_copy(child)
            copied._modules[name].__dict__.update(bound)
    return copied


def _rebound(owner: Any, module: Any, twin: Any) -> dict[str, Any]:
    """The attributes of an owner that are methods of a module, or partials that take it, for the module's twin."""
    bound: dict[str, Any] = {}
    for name, value in owner.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            bound[name] = MethodType(value.__func__, twin)
        elif isinstance(value, partial) and any(arg is module for arg in value.args):
            args = [twin if arg is module else arg for arg in value.args]
            bound[name] = partial(value.func, *args, **value.keywords)
    return bound
