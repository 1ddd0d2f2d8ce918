"""OdeConfig: the settings that turn a stack of transformer blocks into an ODE; frozen, validated, serialisable."""
from dataclasses import dataclass, replace
from typing import Any

from ..settings import Settings, integer, many, number, one_of, refuse_unknown, setting
from .fields import FIELDS
from .methods import METHODS

PREFIX = 'ode_'
LARGEST_STEPS = 10_000  # each is a module
ADAPTIVE = ('adaptive_heun', 'bosh3', 'dopri5', 'dopri8', 'fehlberg2')  # torchdiffeq publishes no list


def _steps(name: str, value: Any) -> Any:
    each = integer(1, none='the number of converted layers', most=LARGEST_STEPS)
    if isinstance(value, (list, tuple)) and value:
        return tuple(each(name, steps) for steps in value)
    return each(name, value)


def _blocks(name: str, value: Any) -> Any:
    allowed = 'the first and the last layer to convert, such as (3, 9)'
    layers = None if value is None else many(integer(0), allowed)(name, value)
    if layers is not None and (len(layers) != 2 or layers[0] > layers[1]):
        raise ValueError(f'{name} must be {allowed}; got {value!r}.')
    return layers


@dataclass(frozen=True, repr=False)
class OdeConfig(Settings):
    """Settings of an ODE-ViT, also keywords of the `odevit_*` models, with the prefix `ode_`.

    One unit of time is one transformer block of the base model.

    Attributes:
        field: Vector field: 'native', the base model's own sub-layers, or 'lipschitz', the paper's.
        method: Integration method: euler, midpoint, heun2, rk4, lie_trotter, strang, or an adaptive one of torchdiffeq,
            such as dopri5.
        steps: Number K of steps on [0, T], or of the states that an adaptive method reports; None for the number of
            converted layers; one number per stage for a model with stages (Swin).
        T: End time, in blocks of the base model; None for the number of converted layers.
        phases: Number P of shared blocks, one per span of consecutive layers; K is at least P.
        init: Initial weights: 'mean' of the blocks that a shared block replaces; or 'spectral', random, each matrix
            with spectral norm 1; what no layer can reset, such as BEiT's LayerScale, stays the first block's.
        blocks: First and last layer to convert, such as (3, 9); None for all.
        rtol: Relative tolerance of an adaptive method, dimensionless.
        atol: Absolute tolerance of an adaptive method, in units of the hidden state.
        tokens: Share of the patch tokens left at T: between steps, similar ones are merged, so their number falls
            linearly in t. Needs plain attention (no windows, RoPE or position bias).
        halting: 'entropy' lets an image leave the batch before the last step, in eval mode, if no step has a hook and
            the model does not call its blocks one by one, as BEiT and EVA do; None for no halting.
        halting_threshold: An image halts once the entropy of its classes, divided by log(classes), is at most this;
            see `calibrate_halting`.

    Raises ValueError for a setting that is out of range.

    Examples:
        >>> done = convert_(vit, OdeConfig(phases=3, steps=6))
        >>> model = timm.create_model('odevit_tiny', ode_steps=24, ode_method='rk4')

    Source: ODE-ViT, arXiv 2511.16501; phases: Raptor, arXiv 2512.19941; tokens: Token Merging, arXiv 2210.09461;
    halting by entropy: Loop-ViT, arXiv 2602.02156.
    """
    field: str = setting('native', one_of(FIELDS))
    method: str = setting('lie_trotter', lambda name, value: one_of((*METHODS, *ADAPTIVE))(name, value))
    steps: int | tuple[int, ...] | None = setting(None, _steps)
    T: float | None = setting(None, number(open='(', none='the number of converted layers'))
    phases: int = setting(1, integer(1))
    init: str = setting('mean', one_of(('mean', 'spectral')))
    blocks: tuple[int, int] | None = setting(None, _blocks)
    rtol: float = setting(1e-3, number(open='('))
    atol: float = setting(1e-3, number(open='('))
    tokens: float = setting(1., number(1., open='('))
    halting: str | None = setting(None, one_of(('entropy',), none='no halting'))
    halting_threshold: float = setting(0., number())

    def _check(self) -> None:
        saving = 'tokens' if self.tokens < 1 else 'halting' if self.halting else ''
        if saving and self.adaptive:
            raise ValueError(f"{saving} needs fixed steps, but '{self.method}' chooses its own. Use one of "
                             f"{', '.join(METHODS)}.")

    @property
    def adaptive(self) -> bool:
        return self.method not in METHODS

    @property
    def steps_and_end(self) -> tuple[int, float]:
        """K and T, which must be known."""
        if not isinstance(self.steps, int) or self.T is None:
            raise ValueError(f'steps and T are needed here; got {self.steps} and {self.T}. Set both.')
        return self.steps, self.T

    def resolve(self, depth: int, stage: int = 0) -> 'OdeConfig':
        """The settings of one stage, with steps and T filled in for `depth` converted layers."""
        steps = self.steps[stage] if isinstance(self.steps, tuple) else self.steps
        return replace(self, steps=depth if steps is None else steps, T=depth if self.T is None else self.T)

    def to_args(self) -> dict[str, Any]:
        """As `ode_*` keywords of `timm.create_model`."""
        return {PREFIX + name: value for name, value in vars(self).items()}

    @classmethod
    def from_args(cls, args: dict[str, Any], caller: str) -> 'OdeConfig':
        """From `ode_*` keywords; TypeError, in the caller's name, if one is unknown."""
        refuse_unknown(args, [PREFIX + name for name in cls.names()], caller)
        return cls(**{name.removeprefix(PREFIX): value for name, value in args.items()})


DEFAULT = OdeConfig()
