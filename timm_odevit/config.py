"""OdeConfig: what turns a stack of transformer blocks into an ODE; frozen, validated, serialisable."""
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from numbers import Integral
from typing import Any, Dict, Optional, Tuple, Union

from .methods import METHODS, adaptive_methods, is_adaptive
from .settings import suggest

__all__ = ['FIELDS', 'PREFIX', 'TIMES', 'OdeConfig']

FIELDS = ('lipschitz', 'native')
TIMES = ('autonomous', 'vectors', 'low_rank')
PREFIX = 'ode_'
_INITS = 'mean, spectral, block:<i> (such as block:5), svd, svd_data'


@dataclass(frozen=True)
class OdeConfig:
    """Settings of an ODE-ViT.

    One unit of time is one transformer block of the base model. Every setting is also a keyword of the `odevit_*`
    models, with `ode_` in front.

    Attributes:
        field: Vector field: 'native', the base model's own sub-layers, or 'lipschitz', the paper's.
        method: Integration method: a name of METHODS, or an adaptive method of the installed torchdiffeq.
        steps: Number K of steps on [0, T]; None for the number of converted layers; one number per stage for a model
            with stages (Swin). An adaptive method chooses its own steps, and K is the number of states that it reports.
        T: End time, in blocks of the base model; None for the number of converted layers.
        time: How the shared block depends on t: 'autonomous', not at all; 'vectors', its vectors (norms, biases,
            LayerScale) have a value per layer; 'low_rank', each matrix has a residual of rank `rank` per layer too.
            Between two layers, values are interpolated linearly in t.
        rank: Rank of the residuals of 'low_rank'.
        phases: Number of shared blocks, on as many consecutive spans of layers.
        boundaries: First layer of each span but the first, such as (7, 10); 'uniform' for spans of equal length;
            'similarity' for spans of similar hidden states, measured on images when a model is converted.
        init: Weights of a shared block: 'mean' of its layers' blocks; 'block:<i>'; 'svd', the mean, and each layer's
            residual from it truncated to `rank`; 'svd_data', the same, least squares over the layer's inputs;
            'spectral': random, every weight matrix at spectral norm 1. None for 'svd' with low_rank, else 'mean'.
        blocks: First and last of the layers that are converted, such as (3, 9); None for all.
        rtol: Relative tolerance of an adaptive method, dimensionless.
        atol: Absolute tolerance of an adaptive method, in units of the hidden state.
        adjoint: Back-propagate an adaptive solution by the adjoint method: memory that does not grow with the number
            of evaluations, gradients up to the tolerance (Chen et al., arXiv 1806.07366).

    Raises:
        ValueError: A setting is out of range; the message names what is allowed.

    Source: ODE-ViT, arXiv 2511.16501; low_rank: Relaxed Recursive Transformers, arXiv 2410.20672; phases: Raptor,
    arXiv 2512.19941.
    """
    field: str = 'native'
    method: str = 'lie_trotter'
    steps: Union[int, Tuple[int, ...], None] = None
    T: Optional[float] = None
    time: str = 'autonomous'
    rank: int = 0
    phases: int = 1
    boundaries: Union[str, Tuple[int, ...]] = 'uniform'
    init: Optional[str] = None
    blocks: Optional[Tuple[int, int]] = None
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
        for name in ('steps', 'boundaries', 'blocks'):  # lists come from JSON
            if isinstance(getattr(self, name), (list, tuple)):
                object.__setattr__(self, name, tuple(_whole(v) for v in getattr(self, name)))
        for name in ('steps', 'rank', 'phases'):
            object.__setattr__(self, name, _whole(getattr(self, name)))
        steps = self.steps
        if steps is not None and not all(_counts(k) for k in (steps if isinstance(steps, tuple) else (steps,))):
            raise ValueError(
                f'steps must be a whole number of at least 1, or None for the depth of the base; got {steps!r}.')
        self._check_time()
        for name, optional in (('T', True), ('rtol', False), ('atol', False)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f'{name} must be a finite number above 0; got {value!r}.')
            object.__setattr__(self, name, float(value))
        if self.init is None:
            object.__setattr__(self, 'init', 'svd' if self.time == 'low_rank' else 'mean')
        if not re.fullmatch(r'mean|svd|svd_data|spectral|block:\d+', str(self.init)):
            raise ValueError(f"Unknown init '{self.init}'. Allowed: {_INITS}.")
        if self.init in ('svd', 'svd_data') and self.time != 'low_rank':
            raise ValueError(f"init '{self.init}' fills the residuals of time='low_rank'; got time='{self.time}'.")
        if self.init == 'svd_data' and self.field != 'native':
            raise ValueError("init 'svd_data' weighs the base's own layers, so it needs field='native'. Use 'svd'.")
        if not isinstance(self.adjoint, bool):
            raise ValueError(f'adjoint must be True or False; got {self.adjoint!r}.')
        if self.adjoint and not self.adaptive:
            raise ValueError(
                f"adjoint needs an adaptive method ({', '.join(adaptive_methods())}); '{self.method}' has fixed steps. "
                'To save memory with fixed steps, use model.set_grad_checkpointing().')

    def _check_time(self) -> None:
        if self.time not in TIMES:
            raise ValueError(
                f"Unknown time '{self.time}'. {suggest(str(self.time), TIMES)}Allowed: {', '.join(TIMES)}.")
        if self.time == 'low_rank' and not _counts(self.rank):
            raise ValueError(f"time='low_rank' needs a rank of at least 1, such as rank=8; got {self.rank!r}.")
        if self.time != 'low_rank' and self.rank != 0:
            raise ValueError(f"rank is for time='low_rank'; got rank={self.rank!r} with time='{self.time}'.")
        if not _counts(self.phases):
            raise ValueError(f'phases must be a whole number of at least 1; got {self.phases!r}.')
        given = self.boundaries
        if isinstance(given, tuple):
            if not all(_counts(v) for v in given) or not all(a < b for a, b in pairwise(given)):
                raise ValueError(
                    f'boundaries must be strictly increasing layers from 1 on, such as (7, 10); got {given!r}.')
            if self.phases not in (1, len(given) + 1):
                raise ValueError(f'{len(given)} boundaries make {len(given) + 1} phases; got phases={self.phases}.')
            object.__setattr__(self, 'phases', len(given) + 1)
        elif given not in ('uniform', 'similarity'):
            raise ValueError(
                f'Unknown boundaries {given!r}. Allowed: uniform, similarity, or layers such as (7, 10).')
        run = self.blocks
        if run is not None and (not isinstance(run, tuple) or len(run) != 2 or not all(
                _counts(v + 1) if type(v) is int else False for v in run) or run[0] > run[1]):
            raise ValueError(f'blocks must be the first and the last layer to convert, such as (3, 9); got {run!r}.')

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
        if not isinstance(self.steps, int) or self.T is None:
            raise ValueError(
                f'steps and T are needed here; got {self.steps} and {self.T}. Set both: OdeConfig(steps=12, T=12).')
        return self.steps, self.T

    def span(self, depth: int) -> Tuple[int, int]:
        """The first and the last layer that are converted, of a sequence of `depth` layers."""
        return self.blocks or (0, depth - 1)

    def resolve(self, depth: int, stage: int = 0) -> 'OdeConfig':
        """The configuration of one stage, with steps and T filled in for `depth` converted layers."""
        steps = self.steps[stage] if isinstance(self.steps, tuple) else self.steps
        return replace(self, steps=depth if steps is None else steps, T=depth if self.T is None else self.T)

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


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value  # NumPy's integers too


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
