"""Settings of training and of its loss, and the names of a run's files."""
from dataclasses import dataclass
from typing import Any

from timm.optim import list_optimizers

from ..hooks import AMP_DTYPES
from ..ode.config import LARGEST_STEPS
from ..settings import Settings, flag, integer, many, number, one_of, setting

LAST, BEST, START, HISTORY, RECIPE, RUN = 'last.pt', 'best', 'start', 'history.json', 'recipe.yaml', 'run.json'
YEAR = 525_600.  # in minutes
MINUTES = number(YEAR, open='(')
_weight = number()


@dataclass(frozen=True, repr=False)
class FitConfig(Settings):
    """Settings of `fit`; each is also a keyword of `fit` and a key of a recipe's `fit`.

    Attributes:
        epochs: Or else give minutes.
        minutes: Train for about so long, with about a fifth of it, at most, for validation.
        opt: timm optimizer.
        lr: Peak learning rate.
        weight_decay: Not applied to norms, biases and embeddings.
        sched: timm scheduler, stepped at every update; 'step' is a constant rate.
        warmup_epochs: Epochs of linear warm-up; with minutes, tenths of them.
        min_lr: Final learning rate.
        clip_grad: Maximum norm of the gradient; None for no clipping.
        accumulate: Batches per update; an incomplete last group is dropped.
        ema_decay: Decay of a moving average of the weights, which is then saved as best; None for none.
        amp: 'bfloat16' or 'float16'; None for full precision; 'auto' for the faster of None and bfloat16.
        compile: Compile the blocks of student and teacher by torch.compile: one graph for all layers and steps.
        seed: Seed of the run.

    Examples:
        >>> history = fit(TrajectoryDistillationTask(student, teacher), loader, config=FitConfig(epochs=10, lr=5e-4))
    """
    epochs: int | None = setting(None, integer(1, none='minutes'))
    minutes: float | None = setting(None, number(YEAR, open='(', none='epochs'))
    opt: str = setting('muon', lambda name, value: one_of(list_optimizers())(name, value))  # also if registered later
    lr: float = setting(1e-3, number())
    weight_decay: float = setting(0.05, number())
    sched: str = setting('cosine', one_of(('cosine', 'step')))
    warmup_epochs: float = setting(0, number())
    min_lr: float = setting(1e-6, number())
    clip_grad: float | None = setting(1., number(open='(', none='no clipping'))
    accumulate: int = setting(1, integer(1))
    ema_decay: float | None = setting(None, number(1., open=')', none='no moving average'))
    amp: str | None = setting(None, one_of([*filter(None, AMP_DTYPES), 'auto'], none='full precision'))
    compile: bool = setting(False, flag)
    seed: int = setting(0, integer(None))

    def _check(self) -> None:
        if (self.epochs is None) == (self.minutes is None):
            raise TypeError('fit needs epochs, such as epochs=1, or minutes, such as minutes=10, but not both.')


def _number_of_steps(name: str, k: Any) -> Any:
    if isinstance(k, str) and k.endswith('%'):
        number(10_000., open='(')(name, float(k[:-1]))
        return k
    return integer(1, most=LARGEST_STEPS)(name, k)


def _of_update(name: str, k: Any) -> Any:
    return many(_number_of_steps, '')(name, k or None) if isinstance(k, (tuple, list)) else _number_of_steps(name, k)


def _steps(name: str, value: Any) -> Any:
    allowed = (f"a list of whole numbers from 1 to {LARGEST_STEPS:,}, of shares such as '50%', or of several of them "
               'for an update, such as [[6, 1], [6, 3]]')
    return None if value is None else many(_of_update, allowed)(name, value) or None


@dataclass(frozen=True, repr=False)
class LossConfig(Settings):
    """Settings of the loss; each is also a keyword of TrajectoryDistillationTask and a key of a recipe's `loss`.

    Attributes:
        checkpoints: Where the teacher's layers lie in time: 'uniform', or by the 'distance' that each moves the state.
        trajectory_weight: Of the squared error of the states, relative to the teacher's variance.
        cls_weight: Share of the class token in the trajectory loss.
        register_weight: Share of the register tokens in the trajectory loss.
        patch_weight: Share of the patch tokens in the trajectory loss.
        steps: Numbers of steps, such as (6, 12), or shares of the student's own, such as ('50%', '200%'), of which each
            update draws one, so that K can be chosen after training; of ((6, 1), (6, 2)), it draws a pair and runs
            both. None for the student's own number.
        consistency_weight: Of the distance of an update's other outputs to its first, which does not learn.
        patch_drop: Share of the patches left out at random in each update, for teacher and student; give 0 in
            the last stage.
        corrupt: Share of the batches whose images lose contrast, get noise or are blurred, by random amounts.
        jasmin_weight: Of the JaSMin loss of the shared block's attention, at two of the states.
        kd_weight: Of the KL divergence between the logits or, for embeddings, of one minus their cosine plus their
            relative squared error.
        embedding: Compare the outputs as embeddings, not as logits; always so for models without classes.
        task_weight: Of the loss on the labels.
        exits: Relative times in (0, 1) at which norm and head are also applied, so that the student can stop there.
        exit_weight: Of kd_weight * KL + task_weight * cross-entropy, averaged over the exits.

    Examples:
        >>> task = TrajectoryDistillationTask(student, teacher, config=LossConfig(kd_weight=1., steps=(6, 12, 24)))
    """
    checkpoints: str = setting('uniform', one_of(('uniform', 'distance')))
    trajectory_weight: float = setting(1., _weight)
    cls_weight: float = setting(0.45, _weight)
    register_weight: float = setting(0.10, _weight)
    patch_weight: float = setting(0.45, _weight)
    steps: tuple[int | str | tuple[int | str, ...], ...] | None = setting(None, _steps)
    consistency_weight: float = setting(0., _weight)
    patch_drop: float = setting(0., number(1., open=')'))
    corrupt: float = setting(0., number(1.))
    jasmin_weight: float = setting(0., _weight)
    kd_weight: float = setting(0.1, _weight)
    embedding: bool = setting(False, flag)
    task_weight: float = setting(0., _weight)
    exits: tuple[float, ...] = setting(
        (), many(number(1., open='()'), 'relative times between 0 and 1, such as (0.5, 0.75)'))
    exit_weight: float = setting(0., _weight)

    def _check(self) -> None:
        if not any(weight > 0 for name, weight in self.weights.items() if name != 'consistency'):
            raise ValueError('All weights of the loss are 0 but that of consistency, so there is nothing to learn.')
        if (self.exit_weight > 0) != bool(self.exits) or (self.exits and not self.kd_weight + self.task_weight > 0):
            raise ValueError('exits and exit_weight go together, and need kd_weight or task_weight.')
        if self.consistency_weight > 0 and all(len(of) == 1 for of in self.of_updates):
            raise ValueError('consistency_weight needs several numbers of steps in an update, such as steps=[[6, 1]].')

    @property
    def of_updates(self) -> tuple[tuple[int | str, ...], ...]:
        return tuple(of if isinstance(of, tuple) else (of,) for of in self.steps or ())

    @property
    def weights(self) -> dict[str, float]:
        names = ('trajectory', 'jasmin', 'kd', 'task', 'exit', 'consistency')
        return {name: getattr(self, f'{name}_weight') for name in names}

    def counts(self, own: int) -> tuple[tuple[int, ...], ...]:
        """The numbers of steps that updates draw from, for a student with `own` steps."""
        def count(k: int | str) -> int:
            return int(_number_of_steps('steps', k if isinstance(k, int) else max(1, round(float(k[:-1]) / 100 * own))))
        return ((own,),) if self.steps is None else tuple(tuple(map(count, of)) for of in self.of_updates)
