"""Recipes: what to train, on what data and how, in one validated YAML file."""
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ..ode.config import GONE, OdeConfig
from ..settings import Check, Settings, flag, integer, one_line, one_of, setting, suggest
from .config import COMPILED, DataConfig, FitConfig, LossConfig

__all__ = ['FIT', 'FOLDER', 'Recipe', 'Stage', 'builtin_recipes']

FOLDER = Path(__file__).parent / 'recipes'
LONGEST, DEEPEST = 50_000, 50  # most characters and levels that are read; our recipes have 2,200 and 4
TASKS = ('stepwise', 'trajectory', 'labels')
FIT = [name for name in FitConfig.names() if name != 'seed']  # the recipe has its own
# the parts of a model that a stage may train, and what the names of their parameters contain
PARTS: dict[str, tuple[str, ...]] = {
    'all': ('',),
    'blocks': ('.blocks.',),
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


def _name(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a timm model's name; got {value!r}. In quotes, YAML takes it for text.")
    return value


def _parts(name: str, value: Any) -> tuple[str, ...]:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(f"{name} must be a list of at least one part; got {parts!r}. Parts: {', '.join(PARTS)}.")
    return tuple(one_of(tuple(PARTS))('part', part) for part in parts)


def _stages(name: str, value: Any) -> tuple['Stage', ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f'{name} must be a list of at least one stage, such as [{{task: trajectory}}].')
    found = []
    for i, given in enumerate(value):
        keywords = given if isinstance(given, Stage) else _section(Stage.names())(f'{name}.{i}', given) or {}
        try:
            found.append(keywords if isinstance(keywords, Stage) else Stage(**keywords))
        except ValueError as e:
            raise ValueError(f"{name}.{i}{'.' if str(e)[0].islower() else ': '}{e}") from None
    return tuple(found)


@dataclass(frozen=True, repr=False)
class Stage(Settings):
    """One part of a training run.

    Attributes:
        task: 'stepwise', each solver step from the teacher's state (StepwiseTask); 'trajectory', all steps, unrolled
            (TrajectoryDistillationTask); 'labels', cross-entropy alone, for any model (timm's ClassificationTask).
        train: Names, from PARTS, of the parts of the model that learn; the others are frozen.
        loss: Keywords of TrajectoryDistillationTask; they override the recipe's.
        fit: Keywords of `fit`; they override the recipe's.
    """
    task: str = setting('trajectory', one_of(TASKS))
    train: tuple[str, ...] = setting(('all',), _parts)
    loss: dict[str, Any] | None = setting(None, _section(LossConfig.names()))
    fit: dict[str, Any] | None = setting(None, _section(FIT))

    def _check(self) -> None:
        if self.task != 'trajectory' and self.loss:
            raise ValueError(f"loss: task '{self.task}' has no loss settings. Leave loss out.")


@dataclass(frozen=True, repr=False)
class Recipe(Settings):
    """A training run. Unknown keys are errors.

    Attributes:
        ode: Settings of OdeConfig for converting the teacher (`model`, without a teacher) to the student; None to train
            the model as it is.
        model: timm name of the model, for training without a teacher.
        model_args: Keywords of timm.create_model for `model`.
        data: Settings of the data; see DataConfig.
        loss: Keywords of TrajectoryDistillationTask for all stages.
        fit: Keywords of `fit` for all stages.
        stages: The stages, in order; each starts from the last weights of the previous one. One with 0 epochs is left
            out.
        grad_checkpointing: Recompute activations in the backward pass, step by step.
        seed: Seed of the run.

    Raises:
        ValueError: A key is unknown or a value is out of range; the message says what is allowed.

    Examples:
        >>> recipe = Recipe.load('low_rank', ['ode.rank=8', 'stages.1.fit.epochs=20'])
        >>> print(recipe.to_yaml())
    """
    ode: dict[str, Any] | None = setting(None, _section([*OdeConfig.names(), *GONE]))
    model: str | None = setting(None, _name)
    model_args: dict[str, Any] | None = setting(None, _section())
    data: dict[str, Any] | None = setting(None, _section(DataConfig.names()))
    loss: dict[str, Any] | None = setting(None, _section(LossConfig.names()))
    fit: dict[str, Any] | None = setting(None, _section(FIT))
    stages: tuple[Stage, ...] = setting((), _stages)
    grad_checkpointing: bool = setting(False, flag)
    seed: int = setting(0, integer(0))

    def _check(self) -> None:
        try:
            self.batches  # noqa: B018 (raises if a setting is invalid)
        except ValueError as e:
            raise ValueError(f'data.{e}') from None
        if self.ode is not None:
            self.config  # noqa: B018 (likewise)
        used = []
        for i, stage in enumerate(self.stages):
            epochs = {**(self.fit or {}), **(stage.fit or {})}.get('epochs')
            if epochs is None:
                raise ValueError(
                    f"stages.{i}.fit.epochs is missing. Give the number of epochs here or in the recipe's fit.")
            if epochs == 0 and type(epochs) is int:
                continue
            used.append(stage)
            try:
                compiled = self.fit_of(stage).compile
                if stage.task == 'trajectory' and self.loss_of(stage).patch_drop and compiled:
                    raise ValueError(COMPILED)
            except ValueError as e:
                raise ValueError(f'stages.{i}: {e}') from None
        if not used:
            raise ValueError('All stages have 0 epochs, so there is nothing to train. Set fit.epochs to at least 1 in '
                             'one of them.')
        if self.loss and all(stage.task != 'trajectory' for stage in self.stages):
            raise ValueError('loss applies only to stages with task trajectory, and there are none. Leave it out.')
        object.__setattr__(self, 'stages', tuple(used))

    @property
    def batches(self) -> DataConfig:
        """The settings of the data."""
        return DataConfig(**(self.data or {}))

    @property
    def config(self) -> OdeConfig:
        """The settings of the conversion."""
        return OdeConfig.from_args(self.ode or {}, 'ode', prefix='')

    def loss_of(self, stage: Stage) -> LossConfig:
        """The loss settings of a stage: the recipe's, overridden by its own."""
        return LossConfig(**{**(self.loss or {}), **(stage.loss or {})})

    def fit_of(self, stage: Stage) -> FitConfig:
        """The settings of `fit` for a stage: the recipe's, overridden by its own."""
        return FitConfig(**{**(self.fit or {}), **(stage.fit or {})})

    @property
    def embeds(self) -> bool:
        """Whether the outputs are embeddings, so that the labels of the data mean nothing to the model."""
        return any(self.loss_of(stage).embedding for stage in self.stages)

    def trained_at(self, own: int) -> tuple[int, ...]:
        """The numbers of steps that the last stage trains, for a student that had `own` steps before training."""
        last = self.stages[-1]
        counts = self.loss_of(last).counts(own) if last.task == 'trajectory' else None
        return tuple(sorted({k for of in counts or ((own,),) for k in of}))

    def without_shares(self, own: int) -> 'Recipe':
        """The recipe with numbers of steps in place of shares, for a student that had `own` steps before training."""
        def counted(loss: dict[str, Any] | None) -> dict[str, Any] | None:
            counts = LossConfig(steps=(loss or {}).get('steps')).counts(own)
            return loss if counts is None else {
                **(loss or {}), 'steps': [list(of) if len(of) > 1 else of[0] for of in counts]}
        stages = tuple(replace(stage, loss=counted(stage.loss)) for stage in self.stages)
        return replace(self, loss=counted(self.loss), stages=stages)

    def with_epochs(self, epochs: Sequence[float]) -> 'Recipe':
        """The recipe with other numbers of epochs, at least 1, of which as large a share warms up."""
        stages = list(self.stages)
        for i, (stage, count) in enumerate(zip(stages, epochs, strict=False)):
            fit, n = self.fit_of(stage), max(1, int(count))
            warmup = {'warmup_epochs': fit.warmup_epochs * n / fit.epochs} if fit.warmup_epochs else {}
            stages[i] = replace(stage, fit={**(stage.fit or {}), 'epochs': n, **warmup})
        return replace(self, stages=tuple(stages))

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
        with open(path, 'rb') as f:
            return cls.from_dict(_parse(f.read(LONGEST + 1), str(name)), changes, str(name))

    @classmethod
    def from_dict(cls, tree: Any, changes: Sequence[str] = (), name: str = 'recipe') -> 'Recipe':
        """A recipe from the contents of a YAML file; see `load`."""
        tree = _section()(name, tree) or {}
        for change in changes:
            key, equals, text = change.partition('=')
            shown = change if len(change) <= 100 else f'{change[:100]} ...'
            path = key.strip().split('.')
            if not equals:
                raise ValueError(f"Expected a change to a recipe, such as fit.lr=1e-3; got '{shown}'.")
            if len(path) > DEEPEST:
                raise ValueError(f"'{shown}' has {len(path)} levels, but a recipe has at most {DEEPEST}.")
            _set(tree, path, _parse(text, shown), shown)
        tree = _section(cls.names())(name, tree)
        try:
            recipe = cls(**tree)
        except (TypeError, ValueError) as e:
            raise ValueError(f'{name}: {e}') from None
        kept = [i for i, given in enumerate(tree['stages'])  # stages of 0 epochs are gone
                if {**(recipe.fit or {}), **((given or {}).get('fit') or {})}['epochs'] != 0]
        for change in changes:
            section, _, key = change.partition('=')[0].strip().partition('.')
            if section in ('fit', 'loss') and key in (getattr(recipe, section) or {}):
                users = {i: stage for i, stage in zip(kept, recipe.stages, strict=True)
                         if section == 'fit' or stage.task == 'trajectory'}
                if not users:
                    raise ValueError(f"'{change}' has no effect, because all stages with task trajectory have 0 epochs."
                                     ' Leave it out.')
                if all(key in (getattr(stage, section) or {}) for stage in users.values()):
                    own = ', '.join(f'stages.{i}.{section}.{key}' for i in users)
                    raise ValueError(f"'{change}' has no effect, because each stage sets its own {key}. Change {own}.")
        return recipe

    def to_yaml(self) -> str:
        """The recipe as YAML, without default values."""
        def changed(of: Any) -> dict[str, Any]:
            return {f.name: getattr(of, f.name) for f in fields(of) if getattr(of, f.name) not in (None, f.default)}
        tree = {**changed(self), 'stages': [changed(stage) for stage in self.stages]}
        return yaml.safe_dump(_plain(tree), sort_keys=False, default_flow_style=None, width=120)


def builtin_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob('*.yaml'))


def _set(tree: Any, path: list[str], value: Any, change: str) -> None:
    """Set the entry at a path of keys and indices; None removes it."""
    for name, below in zip(path, [*path[1:], None], strict=True):
        if isinstance(tree, list) and (not name.isdigit() or int(name) >= len(tree)):
            raise ValueError(f"'{change}': there is no entry '{name}'; the entries are 0 to {len(tree) - 1}.")
        if not isinstance(tree, (dict, list)):
            raise ValueError(f"'{change}': '{name}' is not a key, because the entry before it is a single value.")
        key: Any = int(name) if isinstance(tree, list) else name
        if below is not None:
            if isinstance(tree, dict) and tree.get(key) is None:
                tree[key] = {}
            tree = tree[key]
        elif value is None and isinstance(tree, dict):
            tree.pop(key, None)
        else:
            tree[key] = value


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    return [_plain(v) for v in tree] if isinstance(tree, (list, tuple)) else tree


class _Loader(yaml.SafeLoader):
    """Refuses aliases, deep nesting and repeated keys; reads 1e-3 as a number, as YAML 1.2 does."""
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self.depth += 1
        if isinstance(event, yaml.AliasEvent) or self.depth > DEEPEST:
            what = f'more than {DEEPEST} levels' if self.depth > DEEPEST else f'the alias *{event.anchor}'
            raise yaml.MarkedYAMLError(problem=f'it has {what}, which no recipe needs', problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next((key for i, key in enumerate(keys) if key in keys[:i]), keys[-1])
            raise yaml.MarkedYAMLError(problem=f"it has the key '{twice}' twice", problem_mark=node.start_mark)
        return found


_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float', re.compile(r'[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+'), list('-+.0123456789'))


def _parse(text: str | bytes, name: str) -> Any:
    """Parse YAML, whatever it holds, within seconds and with a few times its size in memory."""
    if len(text) > LONGEST:
        raise ValueError(f"'{name}' has more than {LONGEST:,} characters, so it is not a recipe.")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as e:
        found = ', '.join(filter(None, (e.context, e.problem)))
        found += f' (line {e.problem_mark.line + 1}).' if e.problem_mark else '.'
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as e:  # PyYAML's, for values such as 2001-13-32
        found = one_line(e)
    raise ValueError(f"'{name}' is not valid YAML: {found}")
