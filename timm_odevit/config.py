"""OdeConfig: what turns a stack of transformer blocks into an ODE; frozen, validated, serialisable."""
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from typing import Any, Dict, Optional, Tuple

from .methods import METHODS, adaptive_methods, is_adaptive, suggest

__all__ = ['FIELDS', 'PREFIX', 'OdeConfig']

FIELDS = ('lipschitz', 'native')
PREFIX = 'ode_'


@dataclass(frozen=True)
class OdeConfig:
    """Settings of an ODE-ViT.

    One unit of time is one transformer block of the base model. Every setting is also a keyword of the `odevit_*`
    models, with `ode_` in front.

    Attributes:
        field: Vector field: 'native', the base model's own sub-layers, or 'lipschitz', the paper's.
        method: Integration method: a name of METHODS, or an adaptive method of the installed torchdiffeq.
        steps: Number K of steps on [0, T]; None for the depth of the base model. An adaptive method chooses its own
            steps, and K is the number of states that it reports.
        T: End time, in blocks of the base model; None for the depth of the base model.
        init: Weights of the shared block: 'mean' of the base's blocks, 'block:<i>', or 'spectral': random, every
            weight matrix at spectral norm 1.
        rtol: Relative tolerance of an adaptive method, dimensionless.
        atol: Absolute tolerance of an adaptive method, in units of the hidden state.
        adjoint: Back-propagate an adaptive solution by the adjoint method: memory that does not grow with the number
            of evaluations, gradients up to the tolerance (Chen et al., arXiv 1806.07366).

    Raises:
        ValueError: A setting is out of range; the message names what is allowed.

    Source: ODE-ViT, arXiv 2511.16501.
    """
    field: str = 'native'
    method: str = 'lie_trotter'
    steps: Optional[int] = None
    T: Optional[float] = None
    init: str = 'mean'
    rtol: float = 1e-3
    atol: float = 1e-3
    adjoint: bool = False

    def __post_init__(self) -> None:
        if self.field not in FIELDS:
            raise ValueError(
                f"Unknown field '{self.field}'. {suggest(str(self.field), FIELDS)}Fields: {', '.join(FIELDS)}.")
        if self.method not in METHODS:
            allowed = [*METHODS, *adaptive_methods()]
            if self.method not in allowed:
                hint = suggest(str(self.method), allowed)
                raise ValueError(f"Unknown method '{self.method}'. {hint}Methods: {', '.join(allowed)}.")
        steps = self.steps
        if isinstance(steps, Integral) and not isinstance(steps, bool):  # NumPy's integers too
            steps = int(steps)
            object.__setattr__(self, 'steps', steps)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(
                f'steps must be a whole number of at least 1, or None for the depth of the base; got {steps!r}.')
        for name, optional in (('T', True), ('rtol', False), ('atol', False)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f'{name} must be a finite number above 0; got {value!r}.')
            object.__setattr__(self, name, float(value))
        if not re.fullmatch(r'mean|spectral|block:\d+', str(self.init)):
            raise ValueError(f"Unknown init '{self.init}'. Allowed: mean, spectral, block:<i> (such as block:5).")
        if not isinstance(self.adjoint, bool):
            raise ValueError(f'adjoint must be True or False; got {self.adjoint!r}.')
        if self.adjoint and not self.adaptive:
            raise ValueError(
                f"adjoint needs an adaptive method ({', '.join(adaptive_methods())}); '{self.method}' has fixed steps. "
                'To save memory with fixed steps, use model.set_grad_checkpointing().')

    @property
    def adaptive(self) -> bool:
        """Whether the method chooses its own steps."""
        return is_adaptive(self.method)

    @property
    def grid(self) -> Tuple[int, float]:
        """Number K of steps and end time T.

        Raises:
            ValueError: One of them is still to be taken from the base model.
        """
        if self.steps is None or self.T is None:
            raise ValueError(
                f'steps and T are needed here; got {self.steps} and {self.T}. Set both: OdeConfig(steps=12, T=12).')
        return self.steps, self.T

    def resolve(self, depth: int) -> 'OdeConfig':
        """The configuration with steps and T filled in for a base of `depth` blocks."""
        return replace(
            self, steps=depth if self.steps is None else self.steps, T=depth if self.T is None else self.T)

    def to_args(self) -> Dict[str, Any]:
        """The settings as `ode_*` keywords of `timm.create_model`, ready for JSON."""
        return {PREFIX + name: value for name, value in asdict(self).items()}

    @classmethod
    def from_args(cls, args: Dict[str, Any], owner: str) -> 'OdeConfig':
        """Build a configuration from `ode_*` keywords.

        Args:
            args: Keywords that all start with `ode_`.
            owner: Name of the model for messages.

        Raises:
            TypeError: A keyword is unknown; the message names the closest one.
        """
        known = [PREFIX + f.name for f in fields(cls)]
        for name in args:
            if name not in known:
                raise TypeError(
                    f"{owner} got an unknown argument '{name}'. {suggest(name, known)}Arguments: {', '.join(known)}.")
        return cls(**{name[len(PREFIX):]: value for name, value in args.items()})
