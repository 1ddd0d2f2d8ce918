"""OdeConfig: the settings that turn a stack of transformer blocks into an ODE; frozen, validated, serialisable."""
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from ..settings import Settings, flag, integer, many, number, one_of, refuse_unknown, setting
from .methods import METHODS

__all__ = ['DEFAULT', 'FIELDS', 'HALTING', 'MOST_STEPS', 'PREFIX', 'TIMES', 'WITH_HEAD', 'OdeConfig', 'adaptive_methods']

FIELDS = ('lipschitz', 'native')
INITS = ('mean', 'spectral', 'svd', 'svd_data')
TIMES = ('autonomous', 'vectors', 'low_rank')
WITH_HEAD = ('entropy', 'confidence')  # halting rules that apply the model's norm and head to states along the way
HALTING = (*WITH_HEAD, 'acceleration', 'residual')
PREFIX = 'ode_'
MOST_STEPS = 10_000  # in a recipe or a config.json


def adaptive_methods() -> list[str]:
    """Names of the adaptive methods that the installed torchdiffeq offers (imports torchdiffeq)."""
    from torchdiffeq._impl.odeint import SOLVERS  # torchdiffeq publishes no list of its methods
    from torchdiffeq._impl.solvers import AdaptiveStepsizeODESolver
    return sorted(name for name, cls in SOLVERS.items() if issubclass(cls, AdaptiveStepsizeODESolver))


def _method(name: str, value: Any) -> str:
    if value in list(METHODS):
        return value
    return one_of([*METHODS, *adaptive_methods()])(name, value)  # imports torchdiffeq


def _steps(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value:
        return many(integer(1), 'whole numbers of at least 1, one per stage')(name, value)
    return integer(1, none='the number of converted layers')(name, value)


def _boundaries(name: str, value: Any) -> Any:
    if value == 'uniform':
        return value
    allowed = "'uniform', or strictly increasing layers, each at least 1, such as (7, 10)"
    found = many(integer(1), allowed)(name, [value] if isinstance(value, int) else value)
    if not all(a < b for a, b in pairwise(found)):
        raise ValueError(f'{name} must be {allowed}; got {value!r}.')
    return found


def _blocks(name: str, value: Any) -> Any:
    if value is None:
        return None
    allowed = 'the first and the last layer to convert, such as (3, 9)'
    found = many(integer(0), allowed)(name, value)
    if len(found) != 2 or found[0] > found[1]:
        raise ValueError(f'{name} must be {allowed}; got {value!r}.')
    return found


@dataclass(frozen=True, repr=False)
class OdeConfig(Settings):
    """Settings of an ODE-ViT.

    One unit of time is one transformer block of the base model. Every setting is also a keyword of the `odevit_*`
    models, with the prefix `ode_`.

    Attributes:
        field: Vector field: 'native', the base model's own sub-layers, or 'lipschitz', the paper's.
        method: Integration method: euler, midpoint, heun2, rk4, lie_trotter or strang (see METHODS), or an adaptive
            method of the installed torchdiffeq, such as dopri5.
        steps: Number K of steps on [0, T]; None for the number of converted layers; one number per stage for a model
            with stages (Swin). An adaptive method chooses its own steps; K is then the number of states it reports.
        T: End time, in blocks of the base model; None for the number of converted layers.
        time: How the shared block depends on t: 'autonomous', not at all; 'vectors', its vectors (norms, biases,
            LayerScale) have a value per layer; 'low_rank', each matrix also has a residual of rank `rank` per layer.
            Between two layers, values are interpolated linearly in t, unless they are `averaged`.
        averaged: Each step of a fixed-step method uses the mean of the layers' values over the step, not their value at
            one t. Better if several numbers of steps are trained (hub/lab/steps.md); with euler and lie_trotter, it
            changes nothing for steps of length 1.
        rank: Rank of the residuals of 'low_rank'.
        phases: Number of shared blocks, one per span of consecutive layers.
        boundaries: First layer of each span except the first, such as (7, 10); 'uniform' for spans of equal length.
        init: Initial weights of a shared block: 'mean', the mean of the blocks that it replaces; 'svd', the mean, and
            each layer's residual from it truncated to `rank`; 'svd_data', the same, fitted to the layer's inputs by
            least squares; 'spectral', random, every weight matrix with spectral norm 1. None for 'svd' with low_rank,
            else 'mean'.
        blocks: First and last layer to convert, such as (3, 9); None for all.
        rtol: Relative tolerance of an adaptive method, dimensionless.
        atol: Absolute tolerance of an adaptive method, in units of the hidden state.
        adjoint: Backpropagate through an adaptive solution by the adjoint method (Chen et al., arXiv 1806.07366): its
            memory does not grow with the number of evaluations, and at the default tolerance, gradients are wrong by 2
            to 3 % (hub/RESULTS.md).
        tokens: Share of the patch tokens left at T. Between steps, similar tokens are merged, so their number falls
            linearly in t. The state keeps its shape: merged tokens have equal states. Needs plain attention (no
            windows, RoPE or position bias).
        halting: Rule by which an image leaves the batch before the last step: 'entropy' of the class probabilities
            after each step, 'confidence' in the predicted class, 'acceleration' or 'residual' of the state; None for no
            halting. Images halt only in eval mode, if the model runs all blocks in one call (as timm's
            VisionTransformer does) and no step has a hook. With the first two rules, norm and head run after every
            step.
        halting_threshold: An image halts once its score is at most this; dimensionless; see `calibrate_halting`.

    Raises:
        ValueError: A setting is out of range; the message names what is allowed.

    Examples:
        >>> paper = OdeConfig(field='lipschitz', method='euler', init='spectral')
        >>> config = OdeConfig(time='low_rank', rank=8, steps=6)
        >>> done = convert_(vit, config)
        >>> model = timm.create_model('odevit_tiny', ode_steps=24, ode_method='rk4')

    Source: ODE-ViT, arXiv 2511.16501; low_rank: Relaxed Recursive Transformers, arXiv 2410.20672; phases: Raptor,
    arXiv 2512.19941; tokens: Token Merging, arXiv 2210.09461; halting by entropy: Loop-ViT, arXiv 2602.02156.
    """
    field: str = setting('native', one_of(FIELDS))
    method: str = setting('lie_trotter', _method)
    steps: int | tuple[int, ...] | None = setting(None, _steps)
    T: float | None = setting(None, number(0., open='(', none='the number of converted layers'))
    time: str = setting('autonomous', one_of(TIMES))
    averaged: bool = setting(False, flag)
    rank: int = setting(0, integer(0))
    phases: int = setting(1, integer(1))
    boundaries: str | tuple[int, ...] = setting('uniform', _boundaries)
    init: str | None = setting(None, one_of(INITS, none="'svd' with low_rank, else 'mean'"))
    blocks: tuple[int, int] | None = setting(None, _blocks)
    rtol: float = setting(1e-3, number(0., open='('))
    atol: float = setting(1e-3, number(0., open='('))
    adjoint: bool = setting(False, flag)
    tokens: float = setting(1., number(0., 1., open='('))
    halting: str | None = setting(None, one_of(HALTING, none='no halting'))
    halting_threshold: float = setting(0., number(0.))

    def _check(self) -> None:
        if self.init is None:
            object.__setattr__(self, 'init', 'svd' if self.time == 'low_rank' else 'mean')
        if self.time == 'low_rank' and self.rank < 1:
            raise ValueError(f"time='low_rank' needs a rank of at least 1, such as rank=8; got {self.rank!r}.")
        if self.time != 'low_rank' and self.rank != 0:
            raise ValueError(f"rank applies only to time='low_rank'; got rank={self.rank!r} with time='{self.time}'.")
        if self.averaged and self.time == 'autonomous':
            raise ValueError("averaged applies to time='vectors' or 'low_rank'; an autonomous block has one value for "
                             'all layers. Leave it out.')
        if isinstance(self.boundaries, tuple):
            count = len(self.boundaries)
            if self.phases not in (1, count + 1):
                raise ValueError(f'{count} boundaries make {count + 1} phases; got phases={self.phases}.')
            object.__setattr__(self, 'phases', count + 1)
        if self.init in ('svd', 'svd_data') and self.time != 'low_rank':
            raise ValueError(f"init '{self.init}' fills the residuals of time='low_rank'; got time='{self.time}'.")
        if self.init == 'svd_data' and self.field != 'native':
            raise ValueError("init 'svd_data' fits the base's own layers, so it needs field='native'. Use 'svd'.")
        if self.adjoint and not self.adaptive:
            raise ValueError(
                f"adjoint needs an adaptive method ({', '.join(adaptive_methods())}); '{self.method}' has fixed steps. "
                'To save memory with fixed steps, use model.set_grad_checkpointing().')
        for name, unset in (('tokens', 1.), ('halting', None), ('averaged', False)):
            if self.adaptive and getattr(self, name) != unset:
                raise ValueError(f"{name} needs fixed steps, but '{self.method}' chooses its own. Use one of "
                                 f"{', '.join(METHODS)}.")

    @property
    def adaptive(self) -> bool:
        """Whether the method chooses its own steps."""
        return self.method not in METHODS

    @property
    def steps_and_end(self) -> tuple[int, float]:
        """Number K of steps and end time T.

        Raises:
            ValueError: One of them is None, so it is still to be taken from the base model.
        """
        if not isinstance(self.steps, int) or self.T is None:
            raise ValueError(
                f'steps and T are needed here; got {self.steps} and {self.T}. Set both: OdeConfig(steps=12, T=12).')
        return self.steps, self.T

    def converted_layers(self, depth: int) -> tuple[int, int]:
        """The first and the last converted layer of a sequence of `depth` layers."""
        return self.blocks or (0, depth - 1)

    def resolve(self, depth: int, stage: int = 0) -> 'OdeConfig':
        """The configuration of one stage, with steps and T filled in for `depth` converted layers."""
        steps = self.steps[stage] if isinstance(self.steps, tuple) else self.steps
        return replace(self, steps=depth if steps is None else steps, T=depth if self.T is None else self.T)

    def part(self, first: int, last: int) -> 'OdeConfig':
        """The settings of the steps from `first` up to but without `last`: tokens merge as fast, and nothing halts."""
        steps, T = self.steps_and_end
        share = (last - first) / steps
        return replace(self, steps=last - first, T=share * T, tokens=1. - share * (1. - self.tokens), halting=None)

    def to_args(self) -> dict[str, Any]:
        """The settings as `ode_*` keywords of `timm.create_model`, ready for JSON."""
        return {PREFIX + name: value for name, value in asdict(self).items()}

    @classmethod
    def from_args(cls, args: dict[str, Any], model: str) -> 'OdeConfig':
        """Build a configuration from `ode_*` keywords.

        Args:
            args: Keywords that all start with `ode_`.
            model: Name of the model, for error messages.

        Raises:
            TypeError: A keyword is unknown; the message names the closest match.
        """
        refuse_unknown(args, [PREFIX + name for name in cls.names()], model)
        return cls(**{name[len(PREFIX):]: value for name, value in args.items()})


DEFAULT = OdeConfig()
