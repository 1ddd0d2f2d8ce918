"""Integration: one module a step, a plain loop over them, and torchdiffeq for the adaptive methods."""
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Callable, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from .config import OdeConfig
from .fields import Context, Field
from .methods import METHODS
from .time_dependence import PhasedField, TimeField

__all__ = ['Step', 'integrate', 'make_steps', 'solve_adaptive']


class Step(nn.Module):
    """One solver step: a module that takes the state at t [B, N, D] to the state at t + h.

    A step is called as the host calls its transformer blocks, with whatever it passes beside the state. It uses its
    field, but does not own it: K steps share one field, which is registered once, in OdeBlocks.

    Args:
        field: Vector field: field(t, x, context, part) with part 'attention', 'mlp' or '' for their sum.
        t: Time at which the step starts.
        h: Length of the step, in the same unit.
        own: Register the field as a sub-module of the step, as TorchScript needs.
    """
    __jit_unused_properties__ = ('attn',)
    t: float
    h: float
    if TYPE_CHECKING:  # TorchScript reads the annotations of a module
        field: Any

    def __init__(self, field: nn.Module, t: float, h: float, own: bool = False) -> None:
        super().__init__()
        self.t = t
        self.h = h
        if own:
            self.field = field
        else:
            self.__dict__['field'] = field  # past nn.Module's registration

    @torch.jit.unused
    def forward(self, x, *args, **kwargs):
        ready = len(args) == 1 and isinstance(args[0], Context)  # from OdeBlocks, which folds once for all steps
        return self.advance(x, args[0] if ready else self.field.context(args, kwargs))

    @property
    def attn(self) -> Any:
        """The attention of the block: where a host looks for what depends on the image size."""
        return self._resizable().attn

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """What Swin calls on each block when the image size changes; the steps share one."""
        self._resizable().set_input_size(*args, **kwargs)

    def _resizable(self) -> Any:
        field = self.field.select(self.t) if isinstance(self.field, PhasedField) else self.field
        if isinstance(field, TimeField):
            if any('position_bias_table' in name for name in field.up):
                raise ValueError(
                    'The residuals of the position bias have the size of the image that the model was converted for. '
                    'Call set_input_size before convert_.')
            field = field.base
        return field.block

    def extra_repr(self) -> str:
        return f't={self.t:g}, h={self.h:g}'


class RungeKuttaStep(Step):
    """A step of an explicit Runge-Kutta method, given by its Butcher tableau."""
    a: List[List[float]]
    b: List[float]
    c: List[float]

    def __init__(self, field: nn.Module, method: str, t: float, h: float, own: bool = False) -> None:
        super().__init__(field, t, h, own)
        table = METHODS[method]
        self.a = [list(row) for row in table.a]
        self.b = list(table.b)
        self.c = list(table.c)

    def advance(self, x: Tensor, context: Context) -> Tensor:
        slopes: List[Tensor] = []
        for i in range(len(self.c)):
            y = x
            for j in range(i):
                if self.a[i][j] != 0.:
                    y = torch.add(y, slopes[j], alpha=self.h * self.a[i][j])
            slopes.append(self.field(self.t + self.c[i] * self.h, y, context, ''))
        for i in range(len(self.b)):
            if self.b[i] != 0.:
                x = torch.add(x, slopes[i], alpha=self.h * self.b[i])
        return x


class LieTrotterStep(Step):
    """Attention for h, then the MLP for h, each by an Euler step: at h = 1, the pre-norm transformer block."""

    def advance(self, x: Tensor, context: Context) -> Tensor:
        x = torch.add(x, self.field(self.t, x, context, 'attention'), alpha=self.h)
        return torch.add(x, self.field(self.t, x, context, 'mlp'), alpha=self.h)


class StrangStep(Step):
    """The MLP for h/2, attention for h, the MLP for h/2, each sub-flow by one midpoint step."""

    def advance(self, x: Tensor, context: Context) -> Tensor:
        x = self._mlp(self.t, x, context)
        y = torch.add(x, self.field(self.t, x, context, 'attention'), alpha=0.5 * self.h)
        slope = self.field(self.t + 0.5 * self.h, y, context, 'attention')
        x = torch.add(x, slope, alpha=self.h)
        return self._mlp(self.t + 0.5 * self.h, x, context)

    def _mlp(self, t: float, x: Tensor, context: Context) -> Tensor:
        y = torch.add(x, self.field(t, x, context, 'mlp'), alpha=0.25 * self.h)
        return torch.add(x, self.field(t + 0.25 * self.h, y, context, 'mlp'), alpha=0.5 * self.h)


class AdaptiveStep(Step):
    """An adaptive solution over [t, t + h]."""

    def __init__(self, field: nn.Module, config: OdeConfig, t: float, h: float) -> None:
        super().__init__(field, t, h)
        self.config = config
        self.evaluations = 0

    def advance(self, x, context):
        states, self.evaluations = solve_adaptive(self.field, x, (self.t, self.t + self.h), self.config, context)
        return states[-1]


def make_steps(field: Field, config: OdeConfig, t: float = 0., own: bool = False) -> List[Step]:
    """The K steps of a resolved configuration on [t, t + T].

    Args:
        field: Vector field that the steps share; with phases, a step uses the phase in which it starts.
        config: Method, steps and T, resolved.
        t: Time at which the first step starts.
        own: Register the field in each step, for TorchScript; fixed-step methods only. A field that depends on time
            is frozen at the start of the step.

    Returns:
        K modules, each of which advances the state by T / K.
    """
    steps, T = config.grid
    h = T / steps
    made: List[Step] = []
    for i in range(steps):
        start = t + i * h
        if config.adaptive:
            made.append(AdaptiveStep(field, config, start, h))
            continue
        part = field.select(start) if isinstance(field, PhasedField) else field
        if own and isinstance(part, TimeField):
            part = part.frozen(start)
        if config.method == 'lie_trotter':
            made.append(LieTrotterStep(part, start, h, own))
        elif config.method == 'strang':
            made.append(StrangStep(part, start, h, own))
        else:
            made.append(RungeKuttaStep(part, config.method, start, h, own))
    return made


def integrate(field: Callable[..., Tensor], x0: Tensor, config: OdeConfig, *, keep: bool = False) -> Tensor:
    """Solve dx/dt = field(t, x) from t = 0 to config.T.

    Fixed-step methods run as a plain loop over Python floats, adaptive ones through torchdiffeq.
    Time is dimensionless: one unit is one transformer block of the base model.

    Args:
        field: Vector field, called as field(t, x) with t a float (a 0-dim tensor from an adaptive method) and
            x [B, N, D] (any shape will do); returns the slope in the shape of x. The splitting methods call its
            `attention(t, x)` and `mlp(t, x)`.
        x0: State at t = 0 [B, N, D]; integrated in its own dtype.
        config: Method, number of steps and end time; steps and T must be set.
        keep: Also keep the states in between.

    Returns:
        x(T) [B, N, D], or all states [K + 1, B, N, D] with keep.

    Raises:
        ValueError: steps or T is not set, the state is in half precision for an adaptive method, or the field has no
            sub-flows to split.
        FloatingPointError: The state stopped being finite; the message names the step and t.

    Source: Hairer, Nørsett & Wanner, Solving ODEs I, II.1; ODE-ViT, arXiv 2511.16501.
    """
    steps, T = config.grid
    if not config.adaptive and METHODS[config.method].splits and not hasattr(field, 'attention'):
        raise ValueError(
            f"'{config.method}' splits the field in attention(t, x) and mlp(t, x), which this one does not have. "
            "Use an unsplit method, such as 'euler' or 'rk4'.")
    module: Any = field if isinstance(field, Field) else _Callable(field)
    if config.adaptive:
        times = [i * T / steps for i in range(steps + 1)]
        wanted = times if keep else (times[0], times[-1])
        found = solve_adaptive(module, x0, wanted, config, module.context((), {}))[0]
        _check_finite(found[-1], steps, config)
        return found if keep else found[-1]
    x, states = x0, [x0]
    for i, step in enumerate(make_steps(module, config)):
        x = step(x)
        _check_finite(x, i + 1, config)
        if keep:
            states.append(x)
    return torch.stack(states) if keep else x


def solve_adaptive(
        field: nn.Module,
        x0: Tensor,
        times: Sequence[float],
        config: OdeConfig,
        context: Context,
) -> Tuple[Tensor, int]:
    """Solve with an adaptive method of torchdiffeq.

    Args:
        field: Vector field, called as field(t, x, context, '') with t a 0-dim tensor.
        x0: State at times[0] [B, N, D], float32 or float64.
        times: Increasing times at which the state is wanted.
        config: Method, tolerances, adjoint.
        context: What the host hands to its blocks beside the state.

    Returns:
        The states [len(times), B, N, D], and the number of field evaluations of the forward solution.

    Raises:
        ValueError: The state is in half precision, in which no step size can be controlled.
        FloatingPointError: The solver could not meet the tolerance with any step size.
    """
    import torchdiffeq

    if isinstance(field, PhasedField):
        return _solve_phases(field, x0, times, config, context)
    if x0.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"'{config.method}' controls its error and needs float32 or float64; got {x0.dtype}. "
            f"Use a fixed-step method ({', '.join(METHODS)}) or a float32 model.")
    counted = _Counted(field, context)
    grid = torch.tensor(times, dtype=x0.dtype, device=x0.device)
    solve = torchdiffeq.odeint_adjoint if config.adjoint else torchdiffeq.odeint
    try:
        states = solve(counted, x0, grid, rtol=config.rtol, atol=config.atol, method=config.method)
    except AssertionError as e:  # how torchdiffeq says that the step size underflowed or the state is not finite
        raise FloatingPointError(
            f"'{config.method}' failed between t = {times[0]:g} and {times[-1]:g} after {counted.evaluations} "
            f'evaluations: {e}. Loosen rtol and atol, or check the field for divergence.') from e
    return states, counted.evaluations


def _solve_phases(
        field: PhasedField,
        x0: Tensor,
        times: Sequence[float],
        config: OdeConfig,
        context: Context,
) -> Tuple[Tensor, int]:
    """Solve phase by phase: across the jump between two phases, no error estimate holds."""
    jumps = [field.first + i for i in range(1, len(field.owner)) if field.owner[i] != field.owner[i - 1]]
    bounds = [times[0], *(t for t in jumps if times[0] < t < times[-1]), times[-1]]
    x, states, evaluations = x0, [x0], 0
    for start, end in pairwise(bounds):
        part = field.select(start)
        wanted = [t for t in times[1:] if start < t <= end]
        inner = [start, *wanted, *([] if wanted and wanted[-1] == end else [end])]
        found, count = solve_adaptive(part, x, inner, config, context._replace(weights=part.fold()))
        states += list(found[1:len(wanted) + 1])
        x, evaluations = found[-1], evaluations + count
    return torch.stack(states), evaluations


class _Counted(nn.Module):
    """field(t, x) for torchdiffeq, with its context bound and its evaluations counted."""

    def __init__(self, field: nn.Module, context: Context) -> None:
        super().__init__()
        self.field = field
        self.context = context
        self.evaluations = 0

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        self.evaluations += 1  # the adjoint's own evaluations come later, in the backward pass
        return self.field(t, x, self.context, '')


class _Callable(Field):
    """Any callable field(t, x) as a Field."""

    def __init__(self, field: Callable[..., Tensor]) -> None:
        super().__init__()
        self.field = field

    def attention(self, t, x, context):
        return self.field.attention(t, x)

    def mlp(self, t, x, context):
        return self.field.mlp(t, x)

    def both(self, t, x, context):
        return self.field(t, x)


def _check_finite(x: Tensor, step: int, config: OdeConfig) -> None:
    steps, T = config.grid
    if not torch.isfinite(x).all():
        raise FloatingPointError(
            f'The state is not finite after step {step} of {steps} '
            f"(t = {step * T / steps:g}, '{config.method}'). Use more steps or a smaller T.")
