"""The integration methods: a class of steps for each. A step maps the state at t to the state at t + h."""
from typing import Any

import torch
from torch import Tensor, nn

from .fields import Context, Field
from .tokens import TokenMerging

__all__ = ['METHODS', 'RungeKutta', 'Step']


class Step(nn.Module):
    """One step of a solver: maps the state at t [B, N, D] to the state at t + h.

    It is called as a host calls its blocks. Weights that depend on time are averaged over the step.

    Attributes:
        order: Order of convergence of the global error.
        evaluations: Field evaluations of one step; one of a sub-flow alone counts as half.
        splits: Whether the step advances the two sub-flows one after the other.
    """
    order: int
    evaluations: int
    splits = False
    field: Any

    def __init__(self, field: Field, t: float, h: float, merging: TokenMerging | None = None) -> None:
        super().__init__()
        self.t = t
        self.h = h
        self.merging = merging
        self.interval = (t, t + h)
        self.set_field(field)

    def set_field(self, field: Field) -> None:
        """Hold a field, of several phases the one that applies where the step starts."""
        self.phases = tuple(field.phases)  # a host resizes all of them, also those in which no step starts
        # not as a submodule: the field is named, saved, moved and trained once, as the blocks' `shared`
        self.__dict__['field'] = field.select(self.t) if len(self.phases) > 1 else field

    def enter(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Context]:
        """The state that the step computes, in which similar tokens may be merged, and the context of its field."""
        ready = len(args) == 1 and isinstance(args[0], Context)  # from OdeBlocks, which makes one for all steps
        context = args[0] if ready else self.field.context(args, kwargs)
        context = context._replace(interval=self.interval)
        return (x, context) if self.merging is None else self.merging.enter(self.t, x, context)

    def leave(self, x: Tensor, context: Context) -> Tensor:
        return x if self.merging is None else self.merging.leave(x, context)

    @property
    def attn(self) -> Any:
        """The attention of the block, or of all phases' blocks, by which a host changes its image size."""
        parts = [field.block_to_resize().attn for field in self.phases]
        return parts[0] if len(parts) == 1 else _Together(parts)

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        for field in self.phases:
            field.block_to_resize().set_input_size(*args, **kwargs)

    def __repr__(self) -> str:
        return f'{type(self).__name__}(t={self.t:g}, h={self.h:g})'


class _Together:
    """The same part of each phase's block: a call of one of its methods is one of all of them."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        values = [getattr(part, name) for part in self._parts]
        return _Together(values) if callable(values[0]) else values[0]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for part in self._parts:
            part(*args, **kwargs)


class RungeKutta(Step):
    """An explicit Runge-Kutta method: its nodes, the lower triangle of its Butcher matrix, by rows, and its weights.

    Source: Hairer, Nørsett & Wanner, Solving ODEs I, II.1.
    """
    nodes: tuple[float, ...]  # fractions of h
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, context = self.enter(x, args, kwargs)
        slopes: list[Tensor] = []
        for node, row in zip(self.nodes, self.a, strict=True):
            y = x
            for weight, slope in zip(row, slopes, strict=True):
                if weight:
                    y = torch.add(y, slope, alpha=self.h * weight)
            slopes.append(self.field(self.t + node * self.h, y, context, ''))
        for weight, slope in zip(self.b, slopes, strict=True):
            if weight:
                x = torch.add(x, slope, alpha=self.h * weight)
        return self.leave(x, context)


class Euler(RungeKutta):
    order, evaluations, nodes = 1, 1, (0.,)
    a, b = ((),), (1.,)


class Midpoint(RungeKutta):
    order, evaluations, nodes = 2, 2, (0., 1 / 2)
    a, b = ((), (1 / 2,)), (0., 1.)


class Heun2(RungeKutta):
    order, evaluations, nodes = 2, 2, (0., 1.)
    a, b = ((), (1.,)), (1 / 2, 1 / 2)


class RK4(RungeKutta):
    """The 3/8 rule, as in torchdiffeq."""
    order, evaluations, nodes = 4, 4, (0., 1 / 3, 2 / 3, 1.)
    a, b = ((), (1 / 3,), (-1 / 3, 1.), (1., -1., 1.)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)


class LieTrotter(Step):
    """Attention for h, then the MLP for h, each by an Euler step; at h = 1, this is the pre-norm transformer block.

    Source: Hairer, Lubich & Wanner, Geometric Numerical Integration, II.5.
    """
    order, evaluations, splits = 1, 1, True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, context = self.enter(x, args, kwargs)
        x = torch.add(x, self.field(self.t, x, context, 'attention'), alpha=self.h)
        x = torch.add(x, self.field(self.t, x, context, 'mlp'), alpha=self.h)
        return self.leave(x, context)


class Strang(Step):
    """The MLP for h/2, attention for h, the MLP for h/2, each by one midpoint step: six half evaluations.

    Source: Hairer, Lubich & Wanner, Geometric Numerical Integration, II.5.
    """
    order, evaluations, splits = 2, 3, True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, context = self.enter(x, args, kwargs)
        x = self._mlp(self.t, x, context)
        y = torch.add(x, self.field(self.t, x, context, 'attention'), alpha=self.h / 2)
        x = torch.add(x, self.field(self.t + self.h / 2, y, context, 'attention'), alpha=self.h)
        x = self._mlp(self.t + self.h / 2, x, context)
        return self.leave(x, context)

    def _mlp(self, t: float, x: Tensor, context: Context) -> Tensor:
        y = torch.add(x, self.field(t, x, context, 'mlp'), alpha=self.h / 4)
        return torch.add(x, self.field(t + self.h / 4, y, context, 'mlp'), alpha=self.h / 2)


METHODS: dict[str, type[Step]] = {
    'euler': Euler, 'midpoint': Midpoint, 'heun2': Heun2, 'rk4': RK4, 'lie_trotter': LieTrotter, 'strang': Strang}
