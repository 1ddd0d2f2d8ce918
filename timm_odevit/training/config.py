"""Settings of training, of its loss and of a calibration."""
from dataclasses import dataclass
from typing import Any

from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

from ..hooks import AMP_DTYPES
from ..ode.config import LARGEST_STEPS
from ..settings import Settings, flag, integer, many, number, one_of, setting, shown, suggest

__all__ = ['MINUTES', 'CalibrationConfig', 'FitConfig', 'LossConfig']

SCHEDS = ('cosine', 'tanh', 'step', 'poly')  # timm's schedulers that depend only on the update count
YEAR = 525_600.  # in minutes
MINUTES = number(0., YEAR, open='(')
COMPILED = 'patch_drop works by hooks, which a compiled model may miss. Use one of the two.'
_DTYPES = [name for name in AMP_DTYPES if name]
_EPOCHS = 'two whole numbers, one of which may be 0, such as (8, 2), or None to use minutes'
_weight = number(0.)


def _epochs(name: str, value: Any) -> Any:
    epochs = None if value is None else many(integer(0), _EPOCHS)(name, value)
    if epochs is not None and (len(epochs) != 2 or max(epochs) < 1):
        raise ValueError(f'{name} must be {_EPOCHS}; got {value!r}.')
    return epochs


@dataclass(frozen=True, repr=False)
class FitConfig(Settings):
    """Settings of `fit`; each is also a keyword of `fit` and a key of a recipe's `fit`.

    Attributes:
        epochs: Number of epochs; or else give minutes.
        minutes: Train for about so long, validation included: the time of an update is measured, and the updates that
            fit make at least 10 epochs, of at most one pass over the data or ten seconds each.
        opt: timm optimizer. After 200 updates, muon is 8.4 points ahead of adamw (hub/lab/ingredients.md).
        lr: Peak learning rate. For residuals of low rank, at most 1e-3 (hub/lab/minutes.md); one block without
            residuals learns with 2e-3.
        weight_decay: Weight decay; not applied to norms, biases and embeddings.
        sched: timm scheduler, stepped at every update.
        warmup_epochs: Epochs of linear warm-up; with minutes, tenths of them.
        min_lr: Final learning rate.
        clip_grad: Maximum norm of the gradient; None for no clipping.
        layer_decay: Factor on the learning rate for each layer further from the head; None for one rate.
        accumulate: Batches per update; an incomplete last group is dropped.
        ema_decay: Decay of a moving average of the weights, which is then validated and saved as best; None for none.
        amp: Mixed precision: 'bfloat16' or 'float16'; None for full precision; 'auto' for the faster of None and
            bfloat16.
        compile: Use torch.compile.
        seed: Seed of the run.

    Examples:
        >>> config = FitConfig(epochs=10, lr=5e-4, ema_decay=0.99)
        >>> history = fit(TrajectoryDistillationTask(student, teacher), loader, config=config)
    """
    epochs: int | None = setting(None, integer(1, none='minutes'))
    minutes: float | None = setting(None, number(0., YEAR, open='(', none='epochs'))
    opt: str = 'muon'
    lr: float = setting(1e-3, number(0.))
    weight_decay: float = setting(0.05, number(0.))
    sched: str = setting('cosine', one_of(SCHEDS))
    warmup_epochs: float = setting(0, number(0.))
    min_lr: float = setting(1e-6, number(0.))
    clip_grad: float | None = setting(1., number(0., open='(', none='no clipping'))
    layer_decay: float | None = setting(None, number(0., 1., open='(', none='one rate'))
    accumulate: int = setting(1, integer(1))
    ema_decay: float | None = setting(None, number(0., 1., open=')', none='no moving average'))
    amp: str | None = setting(None, one_of([*_DTYPES, 'auto'], none='full precision'))
    compile: bool = setting(False, flag)
    seed: int = setting(0, integer(None))

    def _check(self) -> None:
        if self.epochs is None and self.minutes is None:
            raise TypeError('fit needs epochs, such as epochs=1, or minutes, such as minutes=10.')
        if self.epochs is not None and self.minutes is not None:
            raise ValueError(f'Give epochs or minutes, not both; got epochs={self.epochs}, minutes={self.minutes:g}.')
        known = [str(name) for name in list_optimizers()]
        if self.opt not in known:
            raise ValueError(f"Unknown opt '{self.opt}'. {suggest(str(self.opt), known)}See "
                             'timm.optim.list_optimizers().')
        optimizer = create_optimizer_v2(nn.Linear(2, 2, device='meta'), opt=self.opt, lr=self.lr)  # or its own error
        if getattr(optimizer, 'is_second_order', False):
            raise ValueError(f"opt '{self.opt}' needs second derivatives, which are not computed. Use another.")


def _number_of_steps(k: Any) -> Any:
    """A number of steps, or a share of the student's own as text."""
    if isinstance(k, float) and 0 < k < 1:
        return f'{100 * k:.12g}%'  # as earlier versions wrote it
    if isinstance(k, float):
        raise ValueError(f"; got {k:g}, which could be a number or a share. Write {k:.0f}, or '{100 * k:g}%'.")
    if isinstance(k, str) and k.endswith('%'):
        number(0., 10_000., open='(')('share', float(k[:-1]))
        return k
    if integer(1)('steps', k) > LARGEST_STEPS:
        raise ValueError
    return int(k)


def _steps(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        if not value or not isinstance(value, (tuple, list)) or () in value or [] in value:
            raise ValueError
        return tuple(tuple(map(_number_of_steps, k)) if isinstance(k, (tuple, list)) else _number_of_steps(k)
                     for k in value)
    except ValueError as e:
        found = str(e) if str(e).startswith('; got') else f'; got {shown(value)}.'
        raise ValueError(f'{name} must be a list of whole numbers from 1 to {LARGEST_STEPS:,}, of shares of the '
                         "student's own number, such as ['50%', '100%', '200%'], or of several of them for an update, "
                         f'such as [[6, 1], [6, 3]]{found}') from None


@dataclass(frozen=True, repr=False)
class LossConfig(Settings):
    """Settings of the loss; each is also a keyword of TrajectoryDistillationTask and a key of a recipe's `loss`.

    Attributes:
        checkpoints: Where the teacher's layers lie in time: 'uniform'; or 'distance', by how far each moves the state
            of the images in `calibration`, as in the paper, which gains nothing (hub/lab/ingredients.md).
        checkpoint_temperature: Temperature of the softmax over the distances, in units of their mean.
        trajectory_weight: Weight of the squared error of the states, relative to the teacher's variance.
        cls_weight: Share of the class token in the trajectory loss.
        register_weight: Share of the register tokens in the trajectory loss.
        patch_weight: Share of the patch tokens in the trajectory loss.
        steps: Numbers of steps, such as (6, 8, 12, 16, 24), or shares of the student's own number, such as
            ('50%', '100%', '200%'), rounded; each update draws one, all of them in turn, so that K can be chosen after
            training. In ((6, 1), (6, 2), (6, 3)), it draws a pair and runs both. None for the student's own number.
        consistency_weight: Weight of the distance between the outputs with the other numbers of steps of an update and
            those with the first, which it does not train.
        patch_drop: Share of the patches left out at random in each update, the same for teacher and student; the last
            updates should see all. Half of them take half of the time (hub/lab/minutes.md).
        jasmin_weight: Weight of the JaSMin loss of the shared block's attention, recomputed at two of the states.
        kd_weight: Weight of the KL divergence between the logits or, for embeddings, of one minus their cosine plus
            their relative squared error. Early in training, 0.1 gains 8.4 points over 1 (hub/lab/ingredients.md); raise
            it towards the end.
        kd_temperature: Temperature of both models' logits in the KL divergence.
        embedding: Compare the outputs as embeddings, not as logits; always so for models without classes.
        task_weight: Weight of the loss on the labels.
        exits: Relative times in (0, 1) at which norm and head are also applied, so that the student can stop there.
        exit_weight: Weight of kd_weight * KL + task_weight * cross-entropy, averaged over the exits.

    Examples:
        >>> config = LossConfig(kd_weight=1., steps=(6, 8, 12, 16, 24))    # K can then be chosen after training
        >>> task = TrajectoryDistillationTask(student, teacher, config=config)
    """
    checkpoints: str = setting('uniform', one_of(('uniform', 'distance')))
    checkpoint_temperature: float = setting(1., number(0., open='('))
    trajectory_weight: float = setting(1., _weight)
    cls_weight: float = setting(0.45, _weight)
    register_weight: float = setting(0.10, _weight)
    patch_weight: float = setting(0.45, _weight)
    steps: tuple[int | str | tuple[int | str, ...], ...] | None = setting(None, _steps)
    consistency_weight: float = setting(0., _weight)
    patch_drop: float = setting(0., number(0., 1., open=')'))
    jasmin_weight: float = setting(0., _weight)
    kd_weight: float = setting(0.1, _weight)
    kd_temperature: float = setting(1., number(0., open='('))
    embedding: bool = setting(False, flag)
    task_weight: float = setting(0., _weight)
    exits: tuple[float, ...] = setting(
        (), many(number(0., 1., open='()'), 'relative times between 0 and 1, such as (0.5, 0.75)'))
    exit_weight: float = setting(0., _weight)

    def _check(self) -> None:
        if not any(weight > 0 for weight in self.weights.values()):
            raise ValueError('All weights of the loss are 0, so there is nothing to learn.')
        if self.embedding and self.task_weight > 0:
            raise ValueError('task_weight compares classes, but embedding=True takes the outputs as embeddings.')
        if self.exits and not (self.kd_weight > 0 or self.task_weight > 0):
            raise ValueError('exits are trained by kd_weight and task_weight, but both are 0.')
        if (self.exit_weight > 0) != bool(self.exits):
            raise ValueError('exits and exit_weight go together, such as exits=(0.5, 0.75), exit_weight=0.5.')
        single = [of for of in self.of_updates if len(of) == 1]
        if self.consistency_weight > 0 and len(single) == len(self.of_updates):
            raise ValueError('consistency_weight compares the numbers of steps of one update. Give several, such as '
                             'steps=[[6, 1], [6, 2], [6, 3]].')
        if single and self.consistency_weight > 0 and sum(self.weights.values()) == self.consistency_weight:
            raise ValueError(f'consistency_weight alone trains nothing in updates with one number of steps, such as '
                             f'[{single[0][0]}]. Set another weight too.')

    @property
    def of_updates(self) -> tuple[tuple[int | str, ...], ...]:
        """`steps`, with a tuple for each update."""
        return tuple(of if isinstance(of, tuple) else (of,) for of in self.steps or ())

    @property
    def weights(self) -> dict[str, float]:
        names = ('trajectory', 'jasmin', 'kd', 'task', 'exit', 'consistency')
        return {name: getattr(self, f'{name}_weight') for name in names}

    def counts(self, own: int) -> tuple[tuple[int, ...], ...] | None:
        """The numbers of steps that updates draw from, for a student with `own` steps; None for only those."""
        if self.steps is None:
            return None
        counts = tuple(tuple(k if isinstance(k, int) else max(1, round(float(k[:-1]) / 100 * own)) for k in of)
                       for of in self.of_updates)
        if max(map(max, counts)) > LARGEST_STEPS:
            raise ValueError(f'steps={self.steps} of {own} are more than {LARGEST_STEPS:,} steps. Give smaller shares.')
        return counts


@dataclass(frozen=True, repr=False)
class CalibrationConfig(Settings):
    """Settings of `calibrate_`; each is also a keyword of `calibrate_`.

    Attributes:
        minutes: Minutes to spend, half of them on each part. None for 5.
        epochs: Epochs of the first part (each step on its own) and of the second (unrolled), such as (8, 2), instead of
            minutes.
        batch_size: Images per update.
        lr: Peak learning rate of the first part (AdamW), on a cosine schedule. None for 3e-3 * min(1, 3 * loss), with
            the loss of the first part before training.
        unrolled_lr: That of the second part (Muon). None for 1e-3 * min(1, 3 * loss), with the same loss.
        amp: Mixed precision: 'bfloat16' or 'float16'; None for full precision.
        seed: Seed for the order of the images.

    Examples:
        >>> config = CalibrationConfig(epochs=(8, 2), batch_size=32)
        >>> history = calibrate_(student, teacher, images, config=config)
    """
    minutes: float | None = setting(None, number(0., YEAR, open='(', none='5'))
    epochs: tuple[int, int] | None = setting(None, _epochs)
    batch_size: int = setting(16, integer(1))
    lr: float | None = setting(None, number(0., none='chosen by what there is to learn'))
    unrolled_lr: float | None = setting(None, number(0., none='chosen by what there is to learn'))
    amp: str | None = setting(None, one_of(_DTYPES, none='full precision'))
    seed: int = setting(0, integer(None))

    def _check(self) -> None:
        if self.epochs is not None and self.minutes is not None:
            raise ValueError(f'Give minutes or epochs, not both; got minutes={self.minutes!r}, epochs={self.epochs!r}.')
