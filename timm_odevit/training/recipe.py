"""Recipes: what to train, on what data and how, in one validated YAML file."""
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import yaml

from ..errors import suggest
from ..ode.config import OdeConfig
from .config import DataConfig, FitConfig, LossConfig
from .read_yaml import DEEPEST, parse_yaml, read_yaml

__all__ = ['FIT', 'Recipe', 'Stage', 'builtin_recipes']

FOLDER = Path(__file__).parent / 'recipes'
TASKS = ('stepwise', 'trajectory', 'labels')
FIT = [name for name in FitConfig.names() if name != 'seed']  # the recipe has its own
# the parts of a model that a stage may train, and what the names of their parameters contain
PARTS: Dict[str, Tuple[str, ...]] = {
    'all': ('',),
    'blocks': ('blocks.',),
    'base': ('blocks.shared.base.', '.base.'),
    'vectors': ('.vectors.',),
    'low_rank': ('.up.', '.down.'),
    'tokens': ('cls_token', 'dist_token', 'reg_token'),
    'pos_embed': ('pos_embed',),
    'patch_embed': ('patch_embed.', 'stem.'),
    'norm': ('norm.', 'norm_pre.', 'fc_norm.'),
    'head': ('head.', 'head_dist.', 'attn_pool.'),
}


@dataclass(frozen=True)
class Stage:
    """One part of a training run.

    Attributes:
        task: 'stepwise', each solver step from the teacher's state (StepwiseTask); 'trajectory', all steps, unrolled
            (TrajectoryDistillationTask); 'labels', cross-entropy alone, for any model (timm's ClassificationTask).
        train: Names, from PARTS, of the parts of the model that learn; the others are frozen.
        loss: Keywords of TrajectoryDistillationTask; they override the recipe's.
        fit: Keywords of `fit`; they override the recipe's.
    """
    task: str = 'trajectory'
    train: Tuple[str, ...] = ('all',)
    loss: Optional[Dict[str, Any]] = None
    fit: Optional[Dict[str, Any]] = None


@dataclass(frozen=True)
class Recipe:
    """A training run. Unknown keys are errors.

    Attributes:
        ode: Settings of OdeConfig for converting the teacher (`model`, without a teacher) to the student; None to train
            the model as it is.
        model: timm name of the model, for training without a teacher.
        model_args: Keywords of timm.create_model for `model`.
        data: batch_size, held_out, workers; padding, flip (arrays), reprob, auto_augment (folders); mixup, cutmix,
            smoothing, prob.
        loss: Keywords of TrajectoryDistillationTask for all stages.
        fit: Keywords of `fit` for all stages.
        stages: The stages, in order; each starts from the last weights of the previous one.
        grad_checkpointing: Recompute activations in the backward pass, step by step.
        cache: Views of each image for which the teacher's states are computed once and kept on disk; 0 for none.
        seed: Seed of the run.

    Raises:
        ValueError: A key is unknown or a value is out of range; the message says what is allowed.
    """
    ode: Optional[Dict[str, Any]] = None
    model: Optional[str] = None
    model_args: Optional[Dict[str, Any]] = None
    data: Optional[Dict[str, Any]] = None
    loss: Optional[Dict[str, Any]] = None
    fit: Optional[Dict[str, Any]] = None
    stages: Tuple[Stage, ...] = ()
    grad_checkpointing: bool = False
    cache: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ('ode', 'model_args', 'data', 'loss', 'fit'):
            object.__setattr__(self, name, _section(name, getattr(self, name)))
        _known('ode', self.ode, [f.name for f in fields(OdeConfig)])
        _known('data', self.data, DataConfig.names())
        _known('loss', self.loss, LossConfig.names())
        _known('fit', self.fit, FIT)
        try:
            DataConfig(**(self.data or {}))
        except ValueError as e:
            raise ValueError(f'data.{e}') from None
        if self.ode is not None:
            self.config  # noqa: B018 (raises if a setting is invalid)
        for name in ('cache', 'seed'):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f'{name} must be a whole number of at least 0; got {value!r}.')
        if not isinstance(self.grad_checkpointing, bool):
            raise ValueError(f'grad_checkpointing must be true or false; got {self.grad_checkpointing!r}.')
        if not isinstance(self.stages, (list, tuple)) or not self.stages:
            raise ValueError('stages must be a list of at least one stage, such as [{task: trajectory}].')
        object.__setattr__(self, 'stages', tuple(self._stage(i, stage) for i, stage in enumerate(self.stages)))
        if self.loss and all(stage.task != 'trajectory' for stage in self.stages):
            raise ValueError('loss applies only to stages with task trajectory, and there are none. Leave it out.')

    def _stage(self, number: int, given: Any) -> Stage:
        where = f'stages.{number}'
        if not isinstance(given, Stage):
            _known(where, _section(where, given), [f.name for f in fields(Stage)])
            given = Stage(**(given or {}))
        parts = [given.train] if isinstance(given.train, str) else given.train
        if not isinstance(parts, (list, tuple)):
            raise ValueError(f'{where}.train must be a list of parts; got {parts!r}. Allowed: {", ".join(PARTS)}.')
        stage = replace(
            given, train=tuple(parts),
            loss=_section(f'{where}.loss', given.loss), fit=_section(f'{where}.fit', given.fit))
        if stage.task not in TASKS:
            raise ValueError(f"{where}.task: unknown task '{stage.task}'. {suggest(str(stage.task), TASKS)}"
                             f"Allowed: {', '.join(TASKS)}.")
        if not stage.train:
            raise ValueError(f"{where}.train is empty. Allowed: {', '.join(PARTS)}.")
        if stage.task != 'trajectory' and stage.loss:
            raise ValueError(f"{where}.loss: task '{stage.task}' has no loss settings. Leave loss out.")
        for part in stage.train:
            if part not in PARTS:
                raise ValueError(f"{where}.train: unknown part '{part}'. {suggest(str(part), PARTS)}"
                                 f"Allowed: {', '.join(PARTS)}.")
        _known(f'{where}.loss', stage.loss, LossConfig.names())
        _known(f'{where}.fit', stage.fit, FIT)
        if 'epochs' not in {**(self.fit or {}), **(stage.fit or {})}:
            raise ValueError(f"{where}.fit.epochs is missing. Give the number of epochs here or in the recipe's fit.")
        try:
            self.fit_of(stage)
            if stage.task == 'trajectory':
                self.loss_of(stage)
        except ValueError as e:
            raise ValueError(f'{where}: {e}') from None
        return stage

    @property
    def config(self) -> OdeConfig:
        """The settings of the conversion."""
        return OdeConfig(**(self.ode or {}))

    def loss_of(self, stage: Stage) -> LossConfig:
        """The loss settings of a stage: the recipe's, overridden by its own."""
        return LossConfig(**{**(self.loss or {}), **(stage.loss or {})})

    def fit_of(self, stage: Stage) -> FitConfig:
        """The settings of `fit` for a stage: the recipe's, overridden by its own."""
        return FitConfig(**{**(self.fit or {}), **(stage.fit or {})})

    @classmethod
    def load(cls, name: Union[str, Path], changes: Sequence[str] = ()) -> 'Recipe':
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
        return cls.from_dict(read_yaml(path, str(name)), changes, str(name))

    @classmethod
    def from_dict(cls, tree: Any, changes: Sequence[str] = (), name: str = 'recipe') -> 'Recipe':
        """A recipe from the contents of a YAML file; see `load`."""
        tree = _section(name, tree) or {}
        for change in changes:
            key, equals, text = change.partition('=')
            shown = change if len(change) <= 100 else f'{change[:100]} ...'
            path = key.strip().split('.')
            if not equals:
                raise ValueError(f"Expected a change to a recipe, such as fit.lr=1e-3; got '{shown}'.")
            if len(path) > DEEPEST:
                raise ValueError(f"'{shown}' has {len(path)} levels, but a recipe has at most {DEEPEST}.")
            _set(tree, path, _number(parse_yaml(text, shown, 'has a value that is not valid YAML')), shown)
        _known(name, tree, [f.name for f in fields(cls)])
        try:
            recipe = cls(**_numbers(tree))
        except (TypeError, ValueError) as e:
            raise ValueError(f'{name}: {e}') from None
        for change in changes:
            section, _, key = change.partition('=')[0].strip().partition('.')
            if section in ('fit', 'loss') and key in (getattr(recipe, section) or {}):
                users = [stage for stage in recipe.stages if section == 'fit' or stage.task == 'trajectory']
                if all(key in (getattr(stage, section) or {}) for stage in users):
                    own = ', '.join(f'stages.{i}.{section}.{key}' for i, s in enumerate(recipe.stages) if s in users)
                    raise ValueError(f"'{change}' has no effect, because each stage sets its own {key}. Change {own}.")
        return recipe

    def to_yaml(self) -> str:
        """The recipe as YAML, without default values."""
        def tree(of: Any) -> Dict[str, Any]:
            return {f.name: getattr(of, f.name) for f in fields(of) if getattr(of, f.name) not in (None, f.default)}
        whole = tree(self)
        whole['stages'] = [tree(stage) for stage in self.stages]
        return yaml.safe_dump(_plain(whole), sort_keys=False, default_flow_style=None, width=120)


def builtin_recipes() -> List[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob('*.yaml'))


def _section(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f'{name} must hold keys and values; got {value!r}.')
    return _plain(value)  # a copy, in which tuples are lists as in YAML


def _known(name: str, given: Any, known: Sequence[str]) -> None:
    for key in given or {}:
        if key not in known:
            raise ValueError(f"{name} has an unknown key '{key}'. {suggest(str(key), known)}Keys: {', '.join(known)}.")


def _set(tree: Any, path: List[str], value: Any, change: str) -> None:
    *parents, last = path
    for name in parents:
        if isinstance(tree, list):
            tree = _item(tree, name, change)
        else:
            if tree.get(name) is None:
                tree[name] = {}
            tree = tree[name]
        if not isinstance(tree, (dict, list)):
            raise ValueError(f"'{change}': '{name}' has no keys below it.")
    if isinstance(tree, list):
        _item(tree, last, change)
        tree[int(last)] = value
    elif value is None:
        tree.pop(last, None)
    else:
        tree[last] = value


def _item(items: List[Any], name: str, change: str) -> Any:
    if not name.isdigit() or int(name) >= len(items):
        raise ValueError(f"'{change}': there is no entry '{name}'; the entries are 0 to {len(items) - 1}.")
    return items[int(name)]


def _numbers(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _numbers(v) for k, v in tree.items()}
    return [_numbers(v) for v in tree] if isinstance(tree, list) else _number(tree)


def _number(value: Any) -> Any:
    """Convert text such as 1e-3, which YAML 1.1 does not read as a number."""
    if not isinstance(value, str) or 'e' not in value.lower() or value[:1] not in '0123456789.-+':
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    return [_plain(v) for v in tree] if isinstance(tree, (list, tuple)) else tree
