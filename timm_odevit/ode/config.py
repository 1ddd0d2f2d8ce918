"""OdeConfig: the settings that turn a stack of transformer blocks into an ODE; frozen, validated, serialisable."""
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..settings import Settings, flag, integer, many, number, one_of, refuse_unknown, setting
from .fields import Field, LipschitzField, NativeField
from .halting import HALTING
from .methods import METHODS

__all__ = ['DEFAULT', 'FIELDS', 'GONE', 'HALTING', 'LARGEST_STEPS', 'PREFIX', 'OdeConfig', 'adaptive_methods']

FIELDS: dict[str, type[Field]] = {'lipschitz': LipschitzField, 'native': NativeField}
PREFIX = 'ode_'
LARGEST_STEPS = 10_000  # each is a module
GONE = ('averaged',)  # settings of earlier versions, which saved files may still have


def adaptive_methods() -> list[str]:
    """Names of the adaptive methods of the installed torchdiffeq, which this imports."""
    from torchdiffeq._impl.odeint import SOLVERS  # torchdiffeq publishes no list of its methods
    from torchdiffeq._impl.solvers import AdaptiveStepsizeODESolver
    return sorted(name for name, cls in SOLVERS.items() if issubclass(cls, AdaptiveStepsizeODESolver))


def _method(name: str, value: Any) -> str:
    return value if value in list(METHODS) else one_of([*METHODS, *adaptive_methods()])(name, value)


def _steps(name: str, value: Any) -> Any:
    check = integer(1, none='the number of converted layers')
    if isinstance(value, (list, tuple)) and value:
        check = many(integer(1), 'whole numbers of at least 1, one per stage')
    value = check(name, value)
    if value is not None and max(value if isinstance(value, tuple) else (value,)) > LARGEST_STEPS:
        raise ValueError(f'{name} must be at most {LARGEST_STEPS:,}; got {value}.')
    return value


def _boundaries(name: str, value: Any) -> Any:
    if value == 'uniform':
        return value
    allowed = "'uniform', or strictly increasing layers, each at least 1, such as (7, 10)"
    layers = many(integer(1), allowed)(name, [value] if isinstance(value, int) else value)
    if list(layers) != sorted(set(layers)):
        raise ValueError(f'{name} must be {allowed}; got {value!r}.')
    return layers


def _blocks(name: str, value: Any) -> Any:
    allowed = 'the first and the last layer to convert, such as (3, 9)'
    layers = value if value is None else many(integer(0), allowed)(name, value)
    if layers is not None and (len(layers) != 2 or layers[0] > layers[1]):
        raise ValueError(f'{name} must be {allowed}; got {value!r}.')
    return layers


@dataclass(frozen=True, repr=False)
class OdeConfig(Settings):
    """Settings of an ODE-ViT.

    One unit of time is one transformer block of the base model. Every setting is also a keyword of the `odevit_*`
    models, with the prefix `ode_`.

    Attributes:
        field: Vector field: 'native', the base model's own sub-layers, or 'lipschitz', the paper's.
        method: Integration method: euler, midpoint, heun2, rk4, lie_trotter, strang, or an adaptive method of the
            installed torchdiffeq, such as dopri5.
        steps: Number K of steps on [0, T]; None for the number of converted layers; one number per stage for a model
            with stages (Swin). An adaptive method chooses its own steps; K is then the number of states it reports.
        T: End time, in blocks of the base model; None for the number of converted layers.
        time: How the shared block depends on t: 'autonomous', not at all; 'low_rank', its vectors (norms, biases,
            LayerScale) have a value per layer, each matrix a residual of rank `rank` per layer, and a step uses their
            mean over its interval.
        rank: Rank of the residuals of 'low_rank'; 0 for vectors only.
        phases: Number of shared blocks, one per span of consecutive layers.
        boundaries: First layer of each span except the first, such as (7, 10); 'uniform' for spans of equal length.
        init: Initial weights of a shared block: 'mean' of the blocks that it replaces; 'svd', the mean, and each
            layer's residual from it truncated to `rank`; 'svd_data', the same, fitted to the layer's inputs by least
            squares; 'spectral', random, each matrix with spectral norm 1. None for 'svd' with a rank, else 'mean'.
        blocks: First and last layer to convert, such as (3, 9); None for all.
        rtol: Relative tolerance of an adaptive method, dimensionless.
        atol: Absolute tolerance of an adaptive method, in units of the hidden state.
        adjoint: Backpropagate through an adaptive solution by the adjoint method (arXiv 1806.07366): its memory does
            not grow with the number of evaluations; at the default tolerance, gradients are wrong by 2 to 3 %
            (hub/RESULTS.md).
        tokens: Share of the patch tokens left at T. Between steps, similar tokens are merged, so their number falls
            linearly in t; in the state, they have equal values. Needs plain attention (no windows, RoPE or position
            bias).
        halting: Rule by which an image leaves the batch before the last step: 'entropy' of the class probabilities
            after each step, for which norm and head run there, or 'acceleration' of the state; None for no halting.
            Images halt only in eval mode, if the model runs all blocks in one call and no step has a hook.
        halting_threshold: An image halts once its score is at most this; dimensionless; see `calibrate_halting`.

    Raises:
        ValueError: A setting is out of range; the message names what is allowed.

    Examples:
        >>> paper = OdeConfig(field='lipschitz', method='euler', init='spectral')
        >>> done = convert_(vit, OdeConfig(time='low_rank', rank=8, steps=6))
        >>> model = timm.create_model('odevit_tiny', ode_steps=24, ode_method='rk4')

    Source: ODE-ViT, arXiv 2511.16501; low_rank: Relaxed Recursive Transformers, arXiv 2410.20672; phases: Raptor,
    arXiv 2512.19941; tokens: Token Merging, arXiv 2210.09461; halting by entropy: Loop-ViT, arXiv 2602.02156.
    """
    field: str = setting('native', one_of(tuple(FIELDS)))
    method: str = setting('lie_trotter', _method)
    steps: int | tuple[int, ...] | None = setting(None, _steps)
    T: float | None = setting(None, number(0., open='(', none='the number of converted layers'))
    time: str = setting('autonomous', one_of(('autonomous', 'low_rank')))
    rank: int = setting(0, integer(0))
    phases: int = setting(1, integer(1))
    boundaries: str | tuple[int, ...] = setting('uniform', _boundaries)
    init: str | None = setting(
        None, one_of(('mean', 'spectral', 'svd', 'svd_data'), none="'svd' with a rank, else 'mean'"))
    blocks: tuple[int, int] | None = setting(None, _blocks)
    rtol: float = setting(1e-3, number(0., open='('))
    atol: float = setting(1e-3, number(0., open='('))
    adjoint: bool = setting(False, flag)
    tokens: float = setting(1., number(0., 1., open='('))
    halting: str | None = setting(None, one_of(tuple(HALTING), none='no halting'))
    halting_threshold: float = setting(0., number(0.))

    def _check(self) -> dict[str, Any]:
        if self.rank and self.time != 'low_rank':
            raise ValueError(f"rank applies only to time='low_rank'; got rank={self.rank!r} with time='{self.time}'.")
        phases = self.phases if self.boundaries == 'uniform' else len(self.boundaries) + 1
        if self.phases not in (1, phases):
            raise ValueError(f'{phases - 1} boundaries make {phases} phases; got phases={self.phases}.')
        init = self.init or ('svd' if self.rank else 'mean')
        if init in ('svd', 'svd_data') and self.time != 'low_rank':
            raise ValueError(f"init '{init}' fills the residuals of time='low_rank'; got time='{self.time}'.")
        if init == 'svd_data' and not FIELDS[self.field].fits_layers:
            raise ValueError("init 'svd_data' fits the base's own layers, so it needs field='native'. Use 'svd'.")
        if self.adjoint and not self.adaptive:
            raise ValueError(
                f"adjoint needs an adaptive method ({', '.join(adaptive_methods())}); '{self.method}' has fixed steps. "
                'To save memory with fixed steps, use model.set_grad_checkpointing().')
        if self.adaptive and (self.tokens < 1 or self.halting is not None):
            raise ValueError(f"{'tokens' if self.tokens < 1 else 'halting'} needs fixed steps, but '{self.method}' "
                             f"chooses its own. Use one of {', '.join(METHODS)}.")
        return {'phases': phases, 'init': init}

    @property
    def adaptive(self) -> bool:
        """Whether the method chooses its own steps."""
        return self.method not in METHODS

    @property
    def steps_and_end(self) -> tuple[int, float]:
        """Number K of steps and end time T; ValueError if one of them is still to be taken from the base model."""
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
        """The settings as `ode_*` keywords of `timm.create_model`."""
        return {PREFIX + name: value for name, value in asdict(self).items()}

    @classmethod
    def from_args(cls, args: Mapping[str, Any], caller: str, prefix: str = PREFIX) -> 'OdeConfig':
        """Build a configuration from keywords with a prefix ('' in recipes), also as earlier versions saved them.

        Those called low_rank of rank 0 'vectors', and could leave out the mean over a step (`averaged`). TypeError, in
        the name of the caller, for an unknown keyword.
        """
        values = {name.removeprefix(prefix): value for name, value in args.items()}
        for name in GONE:
            values.pop(name, None)
        refuse_unknown([prefix + name for name in values], [prefix + name for name in cls.names()], caller)
        if values.get('time') == 'vectors':
            values['time'] = 'low_rank'
        return cls(**values)


DEFAULT = OdeConfig()
