"""Solver steps, one module each, and their sequence."""
from functools import partial
from typing import TYPE_CHECKING, Any, Iterator, List, Tuple

import torch
from torch import Tensor, nn

from .adaptive import Measured, solve_adaptive
from .config import OdeConfig
from .fields import Context, Field
from .methods import METHODS
from .reversible import Companion, step_forth
from .tokens import Tokens

__all__ = ['Solver', 'Step', 'pass_of']

_HOOKS = ('_forward_hooks', '_forward_hooks_with_kwargs', '_forward_hooks_always_called', '_forward_pre_hooks',
          '_forward_pre_hooks_with_kwargs', '_backward_hooks', '_backward_pre_hooks', '_is_full_backward_hook')


class Step(nn.Module):
    """One solver step: a module that maps the state at t [B, N, D] to the state at t + h.

    A step defines when and how a field is evaluated, but holds none; the caller supplies it by `bound`, for each use.
    A bound step is called as the host calls its transformer blocks, with whatever the host passes besides the state.

    Args:
        t: Time at which the step starts.
        h: Length of the step, in the same unit.
    """
    __jit_unused_properties__ = ('attn',)
    t: float
    h: float
    nodes: Tuple[float, ...] = (0.,)
    shared_by_pass = None  # of a bound step: the Tokens or the Companion of its pass through the steps
    if TYPE_CHECKING:  # TorchScript reads the annotations of a module
        field: Any

    def __init__(self, t: float, h: float) -> None:
        super().__init__()
        self.t = t
        self.h = h

    def again(self):
        """A step with the same settings."""
        return type(self)(self.t, self.h)

    def bound(self, field, shared_by_pass=None):
        """This step with a field: a new module for each use, with the same settings and hooks.

        Args:
            field: Vector field: field(t, x, context, part) with part 'attention', 'mlp' or '' for their sum.
            shared_by_pass: The Tokens or the Companion of the pass that the step is part of; see `pass_of`.
        """
        twin: Any
        if torch.compiler.is_dynamo_compiling():  # before torch 2.13, Dynamo can create modules only this way
            twin = self.again()
            for name in _HOOKS:
                setattr(twin, name, getattr(self, name))
            twin.field, twin.shared_by_pass, twin.training = field, shared_by_pass, self.training
        else:
            twin = object.__new__(type(self))
            twin.__dict__.update(
                self.__dict__, _modules={'field': field}, _step=self, shared_by_pass=shared_by_pass)
        return twin

    def apart(self):
        """A step with the same settings and its own copies of the hooks."""
        other = self.again()
        for name in _HOOKS:
            value = getattr(self, name)
            other.__dict__[name] = value.copy() if isinstance(value, dict) else value
        return other

    def register_full_backward_hook(self, hook, prepend=False):
        """Register a hook on the step, even if bound: torch records its kind in the module it is registered on."""
        return super(Step, self.__dict__.get('_step', self)).register_full_backward_hook(hook, prepend)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Step) and self._forward_hooks is other._forward_hooks  # bound or not

    def __hash__(self) -> int:  # FX needs it to find the name of a bound step
        return id(self._forward_hooks)

    @torch.jit.unused
    def forward(self, x, *args, **kwargs):
        if 'field' not in self._modules:
            raise RuntimeError('A step of `blocks.solver` has no field. Call the steps from `blocks` itself, such as '
                               'model.blocks[0] or `for step in model.blocks`.')
        ready = len(args) == 1 and isinstance(args[0], Context)  # from OdeBlocks, which folds once for all steps
        context = args[0] if ready else self.field.context(args, kwargs)
        run = self.advance if self.shared_by_pass is None else partial(self.shared_by_pass.step, self)
        return run(x, context)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if '_step' in self.__dict__:  # an attribute set on a bound step is set on the step, too
            setattr(self._step, name, value)

    @property
    @torch.jit.unused
    def hooked(self):
        """Whether the step has forward hooks."""
        return bool(self._forward_hooks or self._forward_pre_hooks)

    @property
    def attn(self) -> Any:
        """The attention of the block, where a host looks for settings that depend on the image size."""
        return self.field.select(self.t).resizable().attn

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Set the image size, as Swin does on each of its blocks; the steps share one block."""
        if '_step' not in self.__dict__:
            raise ValueError('This model is merged. Call restore() on its Merged first.')
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
    """Attention for h, then the MLP for h, each by an Euler step; at h = 1, this is the pre-norm transformer block."""

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


class ReversibleStep(Step):
    """A step that can be undone. Its second state is that of its pass; a step alone starts from two equal states."""
    nodes = (0., 1.)

    def advance(self, x: Tensor, context: Context) -> Tensor:
        return step_forth(self, x, x, context)[0]


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

    def bound(self, field: Field, prefix: int = 0) -> Iterator[Step]:
        """The steps, each bound to the field that applies where it starts; adaptive steps get the whole field.

        Args:
            field: Vector field.
            prefix: How many tokens come before those of the patches, which may be merged.
        """
        steps: Any = self
        shared = pass_of(self.config, self.t, prefix)
        for step in steps:
            yield step.bound(field if self.config.adaptive else field.select(step.t), shared)


_OWN_CLASS = {'lie_trotter': LieTrotterStep, 'strang': StrangStep, 'reversible': ReversibleStep}


def _step(config: OdeConfig, t: float, h: float) -> Step:
    if config.adaptive:
        return AdaptiveStep(config, t, h)
    if config.method in _OWN_CLASS:
        return _OWN_CLASS[config.method](t, h)
    return RungeKuttaStep(config.method, t, h)


def pass_of(config: OdeConfig, t: float, prefix: int) -> Any:
    """What the steps of one pass share: Tokens if tokens are merged, a Companion for the reversible method, or None.

    Args:
        config: Settings, resolved.
        t: Time at which the first step starts.
        prefix: How many tokens come before those of the patches.
    """
    if config.method == 'reversible':
        return Companion(t)
    return Tokens(config.tokens, prefix, (t, config.grid[1])) if config.tokens < 1 else None
