"""The integration methods: a class of steps for each.

Sources: Hairer, Nørsett & Wanner, Solving ODEs I, II.1; for splitting, Hairer, Lubich & Wanner, Geometric Numerical
Integration, II.5.
"""
from typing import Any

import torch
from torch import Tensor, nn

from .fields import Context, Field
from .tokens import TokenMerging


class Step(nn.Module):
    """One step of a solver: maps the state at t [B, N, D] to the state at t + h; called as a host calls its blocks."""
    order: int  # of convergence of the global error
    evaluations: int  # of the field in one step; one of a sub-flow alone counts as half
    splits = False  # whether the step advances the two sub-flows one after the other
    whole: Any
    advance: Any  # the state at t + h [B, N, D], or of its groups of tokens [B, G, D], for that at t and a Context

    def __init__(self, field: Field, t: float, h: float, merging: TokenMerging | None = None) -> None:
        super().__init__()
        self.t, self.h, self.merging = t, h, merging
        self.set_field(field)

    def set_field(self, field: Field) -> None:
        """Hold a field, not as a submodule: it is named, saved, moved and trained once, as the blocks' `shared`."""
        self.__dict__['whole'] = field
        self.phase = str(field.phases.index(field.select(self.t))) if len(field.phases) > 1 else ''

    @property
    def field(self) -> Any:
        """Of several phases, the one that applies where the step starts."""
        return self.whole.fields._modules[self.phase] if self.phase else self.whole

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        context = self.field.context(args, kwargs)
        if self.merging is None:
            return self.advance(x, context)
        x, context = self.merging.enter(self.t, x, context)
        return self.merging.leave(self.advance(x, context), context)

    def __repr__(self) -> str:
        return f'{type(self).__name__}(t={self.t:g}, h={self.h:g})'


class RungeKutta(Step):
    """An explicit Runge-Kutta method: the lower triangle of its Butcher matrix, by rows, and its weights."""
    a: tuple[tuple[float, ...], ...]  # each row sums to its node, a fraction of h
    b: tuple[float, ...]

    def advance(self, x: Tensor, context: Context) -> Tensor:
        slopes: list[Tensor] = []
        for row in self.a:
            slopes.append(self.field(self.t + sum(row, 0.) * self.h, self._along(x, row, slopes), context, ''))
        return self._along(x, self.b, slopes)

    def _along(self, x: Tensor, weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
        for weight, slope in zip(weights, slopes, strict=True):
            if weight:
                x = torch.add(x, slope, alpha=self.h * weight)
        return x


class Euler(RungeKutta):
    order, evaluations = 1, 1
    a, b = ((),), (1.,)


class Midpoint(RungeKutta):
    order, evaluations = 2, 2
    a, b = ((), (1 / 2,)), (0., 1.)


class Heun2(RungeKutta):
    order, evaluations = 2, 2
    a, b = ((), (1.,)), (1 / 2, 1 / 2)


class RK4(RungeKutta):
    """The 3/8 rule, as in torchdiffeq."""
    order, evaluations = 4, 4
    a, b = ((), (1 / 3,), (-1 / 3, 1.), (1., -1., 1.)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)


class LieTrotter(Step):
    """Attention for h, then the MLP for h, each by an Euler step; at h = 1, this is the pre-norm transformer block."""
    order, evaluations, splits = 1, 1, True

    def advance(self, x: Tensor, context: Context) -> Tensor:
        for part in ('attention', 'mlp'):
            x = torch.add(x, self.field(self.t, x, context, part), alpha=self.h)
        return x


class Strang(Step):
    """The MLP for h/2, attention for h, the MLP for h/2, each by one midpoint step: six half evaluations."""
    order, evaluations, splits = 2, 3, True

    def advance(self, x: Tensor, context: Context) -> Tensor:
        half = self.h / 2
        for part, t, h in (('mlp', self.t, half), ('attention', self.t, self.h), ('mlp', self.t + half, half)):
            y = torch.add(x, self.field(t, x, context, part), alpha=h / 2)
            x = torch.add(x, self.field(t + h / 2, y, context, part), alpha=h)
        return x


METHODS: dict[str, type[Step]] = {
    'euler': Euler, 'midpoint': Midpoint, 'heun2': Heun2, 'rk4': RK4, 'lie_trotter': LieTrotter, 'strang': Strang}
