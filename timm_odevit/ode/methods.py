"""The integration methods: a table of fixed-step methods, and the adaptive ones of the installed torchdiffeq."""
from dataclasses import dataclass
from typing import List, Tuple

__all__ = ['METHODS', 'Method', 'adaptive_methods']


@dataclass(frozen=True)
class Method:
    """One fixed-step method.

    Attributes:
        order: Order of convergence of the global error.
        evaluations: Field evaluations per step. A field is the sum of an attention and an MLP sub-flow, so one
            evaluation of one sub-flow counts as half.
        a: Lower triangle of the Butcher matrix, one row per stage; empty for other methods.
        b: Butcher weights.
        c: Butcher nodes, dimensionless fractions of the step.
        splits: Whether the method advances the two sub-flows one after the other.
    """
    order: int
    evaluations: int
    a: Tuple[Tuple[float, ...], ...] = ()
    b: Tuple[float, ...] = ()
    c: Tuple[float, ...] = ()
    splits: bool = False


# Tableaux: Hairer, Nørsett & Wanner, Solving ODEs I, II.1; rk4 is the 3/8 rule, as in torchdiffeq.
# Splitting: Hairer, Lubich & Wanner, Geometric Numerical Integration, II.5. A strang step advances the MLP by
# h/2, attention by h and the MLP by h/2, each with one midpoint step: 2 + 2 + 2 halves = 3 evaluations.
# reversible: McCallum & Foster, arXiv 2410.11648, with Euler steps.
METHODS = {
    'euler': Method(1, 1, a=((),), b=(1.,), c=(0.,)),
    'midpoint': Method(2, 2, a=((), (1 / 2,)), b=(0., 1.), c=(0., 1 / 2)),
    'heun2': Method(2, 2, a=((), (1.,)), b=(1 / 2, 1 / 2), c=(0., 1.)),
    'rk4': Method(
        4, 4, a=((), (1 / 3,), (-1 / 3, 1.), (1., -1., 1.)), b=(1 / 8, 3 / 8, 3 / 8, 1 / 8), c=(0., 1 / 3, 2 / 3, 1.)),
    'lie_trotter': Method(1, 1, splits=True),
    'strang': Method(2, 3, splits=True),
    'reversible': Method(1, 2),
}


def adaptive_methods() -> List[str]:
    """Names of the adaptive methods that the installed torchdiffeq offers (imports torchdiffeq)."""
    from torchdiffeq._impl.odeint import SOLVERS  # torchdiffeq publishes no list of its methods
    from torchdiffeq._impl.solvers import AdaptiveStepsizeODESolver
    return sorted(name for name, cls in SOLVERS.items() if issubclass(cls, AdaptiveStepsizeODESolver))
