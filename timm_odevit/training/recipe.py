"""Recipes: what to train, on what data and how, in one validated YAML file."""
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ..data.config import DataConfig
from ..ode.config import GONE, OdeConfig
from ..settings import Check, Settings, flag, integer, one_of, setting, suggest
from .config import COMPILED, FitConfig, LossConfig
from .yaml_text import change_entry, read

__all__ = ['FIT', 'FOLDER', 'PARTS', 'Recipe', 'Stage', 'builtin_recipes']

FOLDER = Path(__file__).parent / 'recipes'
TASKS = ('stepwise', 'trajectory', 'labels')
FIT = [name for name in FitConfig.names() if name != 'seed']  # the recipe has its own
# the parts of a model that a stage may train, and what the names of their parameters contain
PARTS: dict[str, tuple[str, ...]] = {
    'all': ('',),
    'blocks': ('.blocks.',),
    'shared': ('.shared.',),
    'base': ('.base.',),
    'vectors': ('.vectors.',),
    'low_rank': ('.up.', '.down.'),
    'tokens': ('cls_token', 'dist_token', 'reg_token'),
    'pos_embed': ('pos_embed',),
    'patch_embed': ('patch_embed.', 'stem.'),
    'norm': ('norm.', 'norm_pre.', 'fc_norm.'),
    'head': ('head.', 'head_dist.', 'attn_pool.'),
}


def _section(known: Sequence[str] | None = None) -> Check:
    """Keys and values, of which the keys are known; or None."""
    def check(name: str, value: Any) -> Any:
        if value is not None and not isinstance(value, dict):
            raise ValueError(f'{name} must hold keys and values; got {value!r}.')
        for key in value or {}:
            if known is not None and key not in known:
                raise ValueError(
                    f"{name} has an unknown key '{key}'. {suggest(str(key), known)}Keys: {', '.join(known)}.")
        return _plain(value)  # a copy, in which tuples are lists as in YAML
    return check


def _loss(name: str, value: Any) -> Any:
    """Settings of the loss; in recipes of earlier versions, the share 200 % is 2.0."""
    def translated(k: Any) -> Any:
        return [translated(each) for each in k] if isinstance(k, list) else (
            f'{100 * k:.12g}%' if isinstance(k, float) else k)
    loss = _section(LossConfig.names())(name, value)
    return loss if not loss or 'steps' not in loss else {**loss, 'steps': translated(loss['steps'])}


def _parts(name: str, value: Any) -> tuple[str, ...]:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(f"{name} must be a list of at least one part; got {parts!r}. Parts: {', '.join(PARTS)}.")
    return tuple(one_of(tuple(PARTS))('part', part) for part in parts)


def _stages(name: str, value: Any) -> tuple['Stage', ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f'{name} must be a list of at least one stage, such as [{{task: trajectory}}].')
    stages = []
    for i, stage in enumerate(value):
        try:
            stages.append(stage if isinstance(stage, Stage) else Stage(
                **_section(Stage.names())(f'{name}.{i}', stage) or {}))
        except ValueError as e:
            at = '' if str(e).startswith(f'{name}.{i}') else f"{name}.{i}{'.' if str(e)[0].islower() else ': '}"
            raise ValueError(f'{at}{e}') from None
    return tuple(stages)


@dataclass(frozen=True, repr=False)
class Stage(Settings):
    """One part of a training run.

    Attributes:
        task: 'stepwise' (StepwiseTask); 'trajectory' (TrajectoryDistillationTask); 'labels', cross-entropy alone, for
            any model (timm's ClassificationTask).
        train: Names, from PARTS, of the parts of the model that learn.
        loss: Settings of LossConfig; they override the recipe's.
        fit: Settings of FitConfig; they override the recipe's.
        scale_lr: Multiply lr by min(1, 3 * loss), with the loss of the first stage before training; a student that has
            nothing to learn is left as it is.
    """
    task: str = setting('trajectory', one_of(TASKS))
    train: tuple[str, ...] = setting(('all',), _parts)
    loss: dict[str, Any] | None = setting(None, _loss)
    fit: dict[str, Any] | None = setting(None, _section(FIT))
    scale_lr: bool = setting(False, flag)

    def _check(self) -> None:
        if self.task != 'trajectory' and self.loss:
            raise ValueError(f"loss: task '{self.task}' has no loss settings. Leave loss out.")


@dataclass(frozen=True, repr=False)
class Recipe(Settings):
    """A training run.

    Attributes:
        ode: Settings of OdeConfig for converting the teacher (`model`, without one) to the student; None to train the
            model as it is.
        model: timm name of the model, for training without a teacher.
        model_args: Keywords of timm.create_model for `model`.
        data: Settings of DataConfig.
        loss: Settings of LossConfig for all stages.
        fit: Settings of FitConfig for all stages.
        stages: The stages, in order, all in epochs or all in minutes; each starts from the last weights of the one
            before. In a file, one with 0 epochs is left out.
        adapt: Leave out what the student cannot do: a stepwise stage if its steps do not end at the teacher's layers,
            patch_drop, other numbers of steps; and weight_decay where blocks depend on time.
        grad_checkpointing: Recompute activations in the backward pass, step by step.
        seed: Seed of the run.

    Raises:
        ValueError: A key is unknown or a value is out of range; the message says what is allowed.

    Examples:
        >>> recipe = Recipe.load('low_rank', ['ode.rank=8', 'stages.1.fit.epochs=20'])
        >>> print(recipe.to_yaml())
    """
    ode: dict[str, Any] | None = setting(None, _section([*OdeConfig.names(), *GONE]))
    model: str | None = None
    model_args: dict[str, Any] | None = setting(None, _section())
    data: dict[str, Any] | None = setting(None, _section(DataConfig.names()))
    loss: dict[str, Any] | None = setting(None, _loss)
    fit: dict[str, Any] | None = setting(None, _section(FIT))
    stages: tuple[Stage, ...] = setting((), _stages)
    adapt: bool = setting(False, flag)
    grad_checkpointing: bool = setting(False, flag)
    seed: int = setting(0, integer(0))

    def _check(self) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"model must be a timm model's name; got {self.model!r}.")
        try:
            self.batches  # noqa: B018 (raises if a setting is invalid, as does the next)
        except ValueError as e:
            raise ValueError(f'data.{e}') from None
        self.config  # noqa: B018
        for i, stage in enumerate(self.stages):
            asked = {**(self.fit or {}), **(stage.fit or {})}
            if asked.get('epochs') is None and asked.get('minutes') is None:
                raise ValueError(f"stages.{i}.fit.epochs is missing. Give it here or in the recipe's fit.")
            try:
                if stage.task == 'trajectory' and self.loss_of(stage).patch_drop and self.fit_of(stage).compile:
                    raise ValueError(COMPILED)
                if (self.fit_of(stage).epochs is None) != (self.fit_of(self.stages[0]).epochs is None):
                    raise ValueError('All stages need epochs, or all minutes.')
            except ValueError as e:
                raise ValueError(f'stages.{i}: {e}') from None
        if self.loss and all(stage.task != 'trajectory' for stage in self.stages):
            raise ValueError('loss applies only to stages with task trajectory, and there are none.')

    @property
    def batches(self) -> DataConfig:
        return DataConfig(**(self.data or {}))

    @property
    def config(self) -> OdeConfig:
        return OdeConfig.from_args(self.ode or {}, 'ode', prefix='')

    def loss_of(self, stage: Stage) -> LossConfig:
        return LossConfig(**{**(self.loss or {}), **(stage.loss or {})})

    def fit_of(self, stage: Stage) -> FitConfig:
        return FitConfig(**{**(self.fit or {}), **(stage.fit or {})})

    @property
    def embeds(self) -> bool:
        """Whether the outputs are embeddings, to which labels mean nothing."""
        return any(self.loss_of(stage).embedding for stage in self.stages)

    def trained_at(self, own: int) -> tuple[int, ...]:
        """The numbers of steps that the last stage trains, for a student that had `own` steps before training."""
        last = self.stages[-1]
        counts = self.loss_of(last).counts(own) if last.task == 'trajectory' else None
        return tuple(sorted({k for of in counts or ((own,),) for k in of}))

    def without_shares(self, own: int) -> 'Recipe':
        """The recipe with numbers of steps in place of shares; see `trained_at`."""
        def counted(loss: dict[str, Any] | None) -> dict[str, Any] | None:
            counts = LossConfig(steps=(loss or {}).get('steps')).counts(own)
            return loss if counts is None else {
                **(loss or {}), 'steps': [list(of) if len(of) > 1 else of[0] for of in counts]}
        stages = tuple(replace(stage, loss=counted(stage.loss)) for stage in self.stages)
        return replace(self, loss=counted(self.loss), stages=stages)

    @classmethod
    def load(cls, name: str | Path, changes: Sequence[str] = ()) -> 'Recipe':
        """Read a recipe.

        Args:
            name: Path of a YAML file, or the name of one that comes with the package: see `builtin_recipes()`.
            changes: Changes such as 'ode.field=lipschitz' or 'stages.0.fit.lr=1e-3', with values in YAML; 'null'
                restores the default.

        Raises:
            ValueError: There is no such recipe, it cannot be read, or something in it is unknown or out of range.
        """
        path = Path(name)
        if path.suffix not in ('.yaml', '.yml') and not path.is_file():
            path = FOLDER / f'{name}.yaml'
        if not path.is_file():
            known = builtin_recipes()
            raise ValueError(f"There is no recipe '{name}'. {suggest(str(name), known)}Give a .yaml file, or one of: "
                             f"{', '.join(known)}.")
        return cls.from_dict(read(path, str(name)), changes, str(name))

    @classmethod
    def from_dict(cls, tree: Any, changes: Sequence[str] = (), name: str = 'recipe') -> 'Recipe':
        """A recipe from the contents of a YAML file; see `load`."""
        tree = _section()(name, tree) or {}
        for change in changes:
            change_entry(tree, change)
        tree = _section(cls.names())(name, tree)
        try:
            stages = _stages('stages', tree.get('stages'))
            fit = _section(FIT)('fit', tree.get('fit')) or {}
            epochs = [{**fit, **(stage.fit or {})}.get('epochs') for stage in stages]
            used = {i: stage for i, stage in enumerate(stages) if epochs[i] != 0 or epochs[i] is False}
            if not used:
                raise ValueError('All stages have 0 epochs, so there is nothing to train. Give one of them some.')
            for change in changes:
                _check_effect(change, tree, used)
            return cls(**{**tree, 'stages': tuple(used.values())})
        except (TypeError, ValueError) as e:
            raise ValueError(f'{name}: {e}') from None

    def to_yaml(self) -> str:
        """The recipe as YAML, without default values."""
        def changed(of: Any) -> dict[str, Any]:
            return {f.name: getattr(of, f.name) for f in fields(of) if getattr(of, f.name) not in (None, f.default)}
        tree = {**changed(self), 'stages': [changed(stage) for stage in self.stages]}
        return yaml.safe_dump(_plain(tree), sort_keys=False, default_flow_style=None, width=120)


def builtin_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob('*.yaml'))


def _check_effect(change: str, tree: dict[str, Any], stages: dict[int, Stage]) -> None:
    """Refuse a change of the recipe's fit or loss that no stage would use."""
    section, _, key = change.partition('=')[0].strip().partition('.')
    if section not in ('fit', 'loss') or key not in (tree.get(section) or {}):
        return
    users = {i: stage for i, stage in stages.items() if section == 'fit' or stage.task == 'trajectory'}
    if not users:
        raise ValueError(f"'{change}' has no effect, because all stages with task trajectory have 0 epochs.")
    if all(key in (getattr(stage, section) or {}) for stage in users.values()):
        own = ', '.join(f'stages.{i}.{section}.{key}' for i in users)
        raise ValueError(f"'{change}' has no effect, because each stage sets its own {key}. Change {own}.")


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    return [_plain(v) for v in tree] if isinstance(tree, (list, tuple)) else tree
