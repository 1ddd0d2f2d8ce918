"""Settings of training, of its loss and of its data."""
import math
from dataclasses import dataclass
from typing import Any

from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

from ..data.config import DataConfig
from ..evaluation.accuracy import AMP_DTYPES
from ..settings import Settings, flag, integer, many, number, one_of, setting, suggest

__all__ = ['CalibrationConfig', 'DataConfig', 'FitConfig', 'LossConfig']

SCHEDS = ('cosine', 'tanh', 'step', 'poly')  # timm's schedulers that depend only on the update count
_amp = one_of([name for name in AMP_DTYPES if name], none='full precision')
_weight = number(0.)
COMPILED = 'patch_drop works by hooks, which a compiled model may miss. Use one of the two.'
_EPOCHS = 'two whole numbers, one of which may be 0, such as (8, 2), or None to use minutes'


def _epochs(name: str, value: Any) -> Any:
    found = None if value is None else many(integer(0), _EPOCHS)(name, value)
    if found is not None and (len(found) != 2 or max(found) < 1):
        raise ValueError(f'{name} must be {_EPOCHS}; got {value!r}.')
    return found


@dataclass(frozen=True, repr=False)
class FitConfig(Settings):
    """Settings of `fit`; each is also a keyword of `fit` and a key of a recipe's `fit`.

    Attributes:
        epochs: Number of epochs.
        opt: timm optimizer. After 200 updates, muon is 8.4 points ahead of adamw (hub/lab/ingredients.md).
        lr: Peak learning rate. For residuals of low rank, 5e-4 is as good as 1e-3; 2e-3 and 3e-3 cost 2 and 7 points
            (hub/lab/minutes.md). One block without residuals learns with 2e-3.
        weight_decay: Weight decay; not applied to norms, biases and embeddings.
        sched: timm scheduler, stepped at every update.
        warmup_epochs: Epochs of linear warm-up.
        min_lr: Final learning rate.
        clip_grad: Maximum norm of the gradient; None for no clipping.
        layer_decay: Factor on the learning rate for each layer further from the head, with the shared blocks as one
            layer; None for one rate.
        accumulate: Batches per update, whose gradients are averaged; an incomplete last group is dropped.
        ema_decay: Decay of a moving average of the weights, which is then validated and saved as best; None for no
            average. An average that the task still has from an earlier `fit` is dropped.
        amp: Mixed precision: 'bfloat16' or 'float16'; None for full precision.
        compile: Call the task's `compile` (torch.compile) before the first update.
        seed: Seed of the run.

    Raises:
        ValueError: A setting is out of range; the message names what is allowed.

    Examples:
        >>> config = FitConfig(epochs=10, lr=5e-4, ema_decay=0.99)
        >>> history = fit(TrajectoryDistillationTask(student, teacher), loader, config=config)
    """
    epochs: int = setting(check=integer(1))
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
    amp: str | None = setting(None, _amp)
    compile: bool = setting(False, flag)
    seed: int = setting(0, integer(None))

    def _check(self) -> None:
        known = [str(name) for name in list_optimizers()]
        if self.opt not in known:
            raise ValueError(f"Unknown opt '{self.opt}'. {suggest(str(self.opt), known)}See "
                             'timm.optim.list_optimizers().')
        try:
            made = create_optimizer_v2(nn.Linear(2, 2, device='meta'), opt=self.opt, lr=self.lr, weight_decay=0.)
        except Exception as e:  # each may lack something else: a package, a GPU, an argument
            raise ValueError(f"opt '{self.opt}' cannot be used here: {type(e).__name__} {e}".strip()) from e
        if getattr(made, 'is_second_order', False):
            raise ValueError(f"opt '{self.opt}' needs second derivatives, which are not computed. Use another.")


def _count_or_share(k: Any) -> bool:
    return (type(k) is int and k >= 1) or (type(k) is float and 0 < k < math.inf)


@dataclass(frozen=True, repr=False)
class LossConfig(Settings):
    """Settings of the loss; each is also a keyword of TrajectoryDistillationTask and a key of a recipe's `loss`.

    Attributes:
        checkpoints: Where the teacher's layers lie in time: 'uniform'; or 'distance', by how far each layer moves the
            state of the images in `calibration`, as in the paper, which gains nothing (hub/lab/ingredients.md).
        checkpoint_temperature: Temperature of the softmax over the distances, in units of their mean.
        trajectory_weight: Weight of the squared error relative to the teacher's variance, averaged over
            checkpoints.
        cls_weight: Share of the class token in the trajectory loss.
        register_weight: Share of the register tokens in the trajectory loss.
        patch_weight: Share of the patch tokens in the trajectory loss.
        steps: Numbers of steps, such as (6, 8, 12, 16, 24), or shares of the student's own number, such as
            (0.5, 0.67, 1.0, 1.33, 2.0), rounded; each update draws one, all of them in turn, so that K can be chosen
            after training. In ((6, 1), (6, 2), (6, 3)), each update draws a pair and runs both. None for the student's
            own number.
        consistency_weight: Weight of the distance between the outputs with the second, third, ... number of steps of an
            update and those with the first, which it does not train.
        patch_drop: Share of the patches left out at random in each update, the same ones for teacher and student; the
            last updates should see all. With half of them, twice as many images fit into the same time
            (hub/lab/minutes.md).
        jasmin_weight: Weight of the JaSMin loss of the shared block's attention, recomputed at two of the states.
        kd_weight: Weight of the KL divergence between the logits or, for embeddings, of one minus their cosine plus
            their squared error relative to the teacher's variance. Early in training, 0.1 gains 8.4 points over 1
            (hub/lab/ingredients.md); raise it towards the end.
        kd_temperature: Temperature of both models' logits in the KL divergence.
        embedding: Compare the models' outputs as embeddings, not as logits; always so for models without classes.
        task_weight: Weight of the loss on the labels.
        exits: Relative times in (0, 1) at which norm and head are also applied, so that the student can stop there.
        exit_weight: Weight of kd_weight * KL + task_weight * cross-entropy, averaged over the exits.

    Raises:
        ValueError: A setting is out of range; the message names what is allowed.

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
    steps: tuple[float | tuple[float, ...], ...] | None = None
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
            raise ValueError('All weights of the loss are 0, so there is nothing to learn. Set one of them above 0.')
        if self.embedding and self.task_weight > 0:
            raise ValueError('task_weight compares classes, but embedding=True takes the outputs as embeddings. Set '
                             'task_weight=0, or embedding=False.')
        if self.exits and not (self.kd_weight > 0 or self.task_weight > 0):
            raise ValueError('exits are trained by kd_weight and task_weight, but both are 0. Set one of them above 0.')
        if (self.exit_weight > 0) != bool(self.exits):
            raise ValueError('exits and exit_weight go together, such as exits=(0.5, 0.75), exit_weight=0.5.')
        if self.steps is not None:
            listed = isinstance(self.steps, (tuple, list)) and self.steps
            object.__setattr__(self, 'steps', tuple(tuple(k) if isinstance(k, list) else k for k in self.steps)
                               if listed else self.steps)
            if not listed or not all(of and all(map(_count_or_share, of)) for of in self.of_updates):
                raise ValueError("steps must be a list of whole numbers of at least 1, or of shares of the student's "
                                 "own number of steps, such as [0.5, 1.0, 2.0], or of several of these for one update, "
                                 f'such as [[6, 1], [6, 3]]; got {self.steps!r}.')
        if self.consistency_weight > 0 and all(len(of) == 1 for of in self.of_updates):
            raise ValueError('consistency_weight compares the numbers of steps of one update. Give several, such as '
                             'steps=[[6, 1], [6, 2], [6, 3]].')

    @property
    def of_updates(self) -> tuple[tuple[float, ...], ...]:
        """`steps`, with a tuple for each update that may be drawn."""
        return tuple(of if isinstance(of, tuple) else (of,) for of in self.steps or ())

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the parts of the loss, by name."""
        names = ('trajectory', 'jasmin', 'kd', 'task', 'exit', 'consistency')
        return {name: getattr(self, f'{name}_weight') for name in names}

    @property
    def token_weights(self) -> tuple[float, float, float]:
        """The weights of class token, registers and patches."""
        return self.cls_weight, self.register_weight, self.patch_weight

    def counts(self, own: int) -> tuple[tuple[int, ...], ...] | None:
        """The numbers of steps that updates draw from, for a student with `own` steps; None to use only its own."""
        if self.steps is None:
            return None
        return tuple(tuple(k if isinstance(k, int) else max(1, round(k * own)) for k in of) for of in self.of_updates)


@dataclass(frozen=True, repr=False)
class CalibrationConfig(Settings):
    """Settings of `calibrate_`; each is also a keyword of `calibrate_`.

    Attributes:
        minutes: Minutes to spend, half of them on each part; a few updates are tried to find how many fit. None for 5.
        epochs: Epochs of the first part (each step on its own) and of the second (unrolled), such as (8, 2), instead of
            minutes. None for minutes.
        batch_size: Images per update.
        lr: Peak learning rate of the first part (AdamW), on a cosine schedule. None for 3e-3 * min(1, 3 * loss), with
            the loss of the first part before training.
        unrolled_lr: Peak learning rate of the second part (Muon). None for 1e-3 * min(1, 3 * loss), with the same loss.
        amp: Mixed precision: 'bfloat16' or 'float16'; None for full precision.
        seed: Seed for the order of the images.

    Raises:
        ValueError: A setting is out of range; the message names what is allowed.

    Examples:
        >>> config = CalibrationConfig(epochs=(8, 2), batch_size=32)
        >>> history = calibrate_(student, teacher, images, config=config)
    """
    minutes: float | None = setting(None, number(0., open='(', none='5'))
    epochs: tuple[int, int] | None = setting(None, _epochs)
    batch_size: int = setting(16, integer(1))
    lr: float | None = setting(None, number(0., none='chosen by what there is to learn'))
    unrolled_lr: float | None = setting(None, number(0., none='chosen by what there is to learn'))
    amp: str | None = setting(None, _amp)
    seed: int = setting(0, integer(None))

    def _check(self) -> None:
        if self.epochs is not None and self.minutes is not None:
            raise ValueError(f'Give minutes or epochs, not both; got minutes={self.minutes!r}, epochs={self.epochs!r}.')
        if self.epochs is None and self.minutes is None:
            object.__setattr__(self, 'minutes', 5.)
