"""Integration: one module a step, a plain loop over them, and torchdiffeq for the adaptive methods."""
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from .config import OdeConfig
from .fields import Context, Field
from .methods import METHODS

__all__ = ['Measured', 'Solver', 'Step', 'integrate', 'solve_adaptive']


_HOOKS = ('_forward_hooks', '_forward_hooks_with_kwargs', '_forward_hooks_always_called', '_forward_pre_hooks',
          '_forward_pre_hooks_with_kwargs', '_backward_hooks', '_backward_pre_hooks', '_is_full_backward_hook')


class Step(nn.Module):
    """One solver step: a module that takes the state at t [B, N, D] to the state at t + h.

    A step says when and how a field is evaluated; it holds none. Who runs it gives it one by `bound`, for that call.
    A bound step is called as the host calls its transformer blocks, with whatever it passes beside the state.

    Args:
        t: Time at which the step starts.
        h: Length of the step, in the same unit.
    """
    __jit_unused_properties__ = ('attn',)
    t: float
    h: float
    nodes: Tuple[float, ...] = (0.,)
    if TYPE_CHECKING:  # TorchScript reads the annotations of a module
        field: Any

    def __init__(self, t: float, h: float) -> None:
        super().__init__()
        self.t = t
        self.h = h

    @torch.jit.unused
    def again(self):
        """A step with the same settings."""
        return type(self)(self.t, self.h)

    @torch.jit.unused
    def bound(self, field):
        """This step with a field: the same settings and hooks, in a module that is made anew for each use.

        Args:
            field: Vector field: field(t, x, context, part) with part 'attention', 'mlp' or '' for their sum.
        """
        twin: Any
        if torch.compiler.is_dynamo_compiling():  # before torch 2.13, it follows no other way to make a module
            twin = self.again()
            for name in _HOOKS:
                setattr(twin, name, getattr(self, name))
            twin.field = field
        else:
            twin = object.__new__(type(self))
            twin.__dict__.update(self.__dict__, _modules={'field': field}, _step=self)
        return twin

    @torch.jit.unused
    def apart(self):
        """A step with the same settings, and hooks of its own, which are the same to begin with."""
        other = self.again()
        for name in _HOOKS:
            value = getattr(self, name)
            other.__dict__[name] = value.copy() if isinstance(value, dict) else value
        return other

    @torch.jit.unused
    def register_full_backward_hook(self, hook, prepend=False):
        """Register a hook for the step, bound or not: torch notes its kind in the module that it is registered on."""
        return super(Step, self.__dict__.get('_step', self)).register_full_backward_hook(hook, prepend)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Step) and self._forward_hooks is other._forward_hooks  # bound or not

    def __hash__(self) -> int:  # with it, FX finds the name of a bound step
        return id(self._forward_hooks)

    @torch.jit.unused
    def forward(self, x, *args, **kwargs):
        if 'field' not in self._modules:
            raise RuntimeError('A step of `blocks.solver` has no field. Call those that `blocks` itself gives, such as '
                               'model.blocks[0] or `for step in model.blocks`.')
        ready = len(args) == 1 and isinstance(args[0], Context)  # from OdeBlocks, which folds once for all steps
        return self.advance(x, args[0] if ready else self.field.context(args, kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if '_step' in self.__dict__:  # what is set on a bound step is set on the step
            setattr(self._step, name, value)

    @property
    def attn(self) -> Any:
        """The attention of the block: where a host looks for what depends on the image size."""
        return self.field.select(self.t).resizable().attn

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """What Swin calls on each block when the image size changes; the steps share one."""
        if '_step' not in self.__dict__:
            raise ValueError('This model is merged. Call restore() on what merge_ returned first.')
        self.field.select(self.t).resizable().set_input_size(*args, **kwargs)

    def extra_repr(self) -> str:
        return f't={self.t:g}, h={self.h:g}'


class RungeKuttaStep(Step):
    """A step of an explicit Runge-Kutta method, given by its Butcher tableau."""
    a: List[List[float]]
    b: List[float]
    c: List[float]

    def __init__(self, method: str, t: float, h: float) -> None:
        super().__init__(t, h)
        self.method = method
        table = METHODS[method]
        self.nodes = table.c
        self.a = [list(row) for row in table.a]
        self.b = list(table.b)
        self.c = list(table.c)

    @torch.jit.unused
    def again(self):
        return RungeKuttaStep(self.method, self.t, self.h)

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
    nodes = (0., 0.25, 0.5, 0.75)

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

    def __init__(self, config: OdeConfig, t: float, h: float) -> None:
        super().__init__(t, h)
        self.config = config
        self.measured = Measured()

    def again(self):
        twin = AdaptiveStep(self.config, self.t, self.h)
        twin.measured = self.measured
        return twin

    @property
    def evaluations(self) -> int:
        """Field evaluations of the last call in this thread."""
        return self.measured.evaluations

    def advance(self, x, context):
        states, self.measured.evaluations = solve_adaptive(
            self.field, x, (self.t, self.t + self.h), self.config, context)
        return states[-1]


class Measured(threading.local):
    """Field evaluations of an adaptive solution, counted for each thread; a copy starts at 0."""
    evaluations = 0

    def __reduce__(self) -> Any:
        return Measured, ()


class Solver(nn.ModuleList):
    """The K steps of a resolved configuration on [t, t + T]: modules without parameters and without a field.

    Args:
        config: Method, steps and T, resolved.
        t: Time at which the first step starts.
    """

    def __init__(self, config: OdeConfig, t: float = 0.) -> None:
        steps, T = config.grid
        super().__init__(_step(config, t + i * (T / steps), T / steps) for i in range(steps))
        self.config = config
        self.t = t

    def bound(self, field: Field) -> Iterator[Step]:
        """The steps, each with the field that is in charge where it starts; an adaptive one with the whole."""
        steps: Any = self
        for step in steps:
            yield step.bound(field if self.config.adaptive else field.select(step.t))


def _step(config: OdeConfig, t: float, h: float) -> Step:
    if config.adaptive:
        return AdaptiveStep(config, t, h)
    if config.method == 'lie_trotter':
        return LieTrotterStep(t, h)
    return StrangStep(t, h) if config.method == 'strang' else RungeKuttaStep(config.method, t, h)


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
    for i, step in enumerate(Solver(config).bound(module)):
        x = step(x)
        _check_finite(x, i + 1, config)
        if keep:
            states.append(x)
    return torch.stack(states) if keep else x


def solve_adaptive(
        field: Field,
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
    if x0.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"'{config.method}' controls its error and needs float32 or float64; got {x0.dtype}. "
            f"Use a fixed-step method ({', '.join(METHODS)}) or a float32 model.")
    if not x0.numel():  # no error could be measured
        return x0.expand(len(times), *x0.shape), 0
    # across a jump of the field no error estimate holds, so each piece between two jumps is solved on its own
    bounds = [times[0], *(t for t in field.jumps if times[0] < t < times[-1]), times[-1]]
    x, states, evaluations = x0, [x0], 0
    for start, end in pairwise(bounds):
        wanted = [t for t in times[1:] if start < t <= end]
        inner = [start, *wanted, *([] if wanted and wanted[-1] == end else [end])]
        found, count = _solve_smooth(field.select(start), x, inner, config, context)
        states += list(found[1:len(wanted) + 1])
        x, evaluations = found[-1], evaluations + count
    return torch.stack(states), evaluations


def _solve_smooth(
        field: Field,
        x0: Tensor,
        times: Sequence[float],
        config: OdeConfig,
        context: Context,
) -> Tuple[Tensor, int]:
    import torchdiffeq

    # the adjoint evaluates the field again, in a backward pass outside of autocast: there it folds its own weights
    counted = _Counted(field, context._replace(weights=None if config.adjoint else field.fold()))
    grid = torch.tensor(times, dtype=x0.dtype, device=x0.device)
    options: Dict[str, Any] = dict(rtol=config.rtol, atol=config.atol, method=config.method)
    try:
        if config.adjoint:
            handed = [v for v in context.passed.values() if isinstance(v, Tensor) and v.requires_grad]
            states = torchdiffeq.odeint_adjoint(
                counted, x0, grid, adjoint_params=(*counted.parameters(), *handed), **options)
        else:
            states = torchdiffeq.odeint(counted, x0, grid, **options)
    except AssertionError as e:  # how torchdiffeq says that the step size underflowed or the state is not finite
        raise FloatingPointError(
            f"'{config.method}' failed between t = {times[0]:g} and {times[-1]:g} after {counted.evaluations} "
            f'evaluations: {e}. Loosen rtol and atol, or check the field for divergence.') from e
    return states, counted.evaluations


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
