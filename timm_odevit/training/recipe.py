"""Recipes: what to train, on what data and how, in one YAML file, which may be anybody's."""
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..data.batches import DataConfig
from ..ode.config import OdeConfig
from ..saving.loading import check_args
from ..settings import Check, Settings, flag, integer, many, one_line, one_of, setting, suggest
from .config import FitConfig, LossConfig

FOLDER = Path(__file__).parent / 'recipes'
LONGEST = 50_000  # most characters that are read; our recipes have 1,000
FIT = [name for name in FitConfig.names() if name != 'seed']  # the recipe has its own
# the parts of a model that a stage may train, and what their parameters' names begin with or, if it has a dot, contain
PARTS: dict[str, tuple[str, ...]] = {
    'all': ('',),
    'blocks': ('.blocks.',),
    'shared': ('.shared.',),
    'tokens': ('cls_token', 'dist_token', 'reg_token'),
    'pos_embed': ('pos_embed',),
    'patch_embed': ('patch_embed.', 'stem.'),
    'norm': ('norm.', 'norm_pre.', 'fc_norm.'),
    'head': ('head.', 'head_dist.', 'attn_pool.'),
}
Section = dict[str, Any] | None


def _section(known: Sequence[str] | None = None) -> Check:
    def check(name: str, value: Any) -> Any:
        if value is not None and not isinstance(value, dict):
            raise ValueError(f'{name} must hold keys and values; got {value!r}.')
        for key in value or {}:
            if known is not None and key not in known:
                raise ValueError(
                    f"{name} has an unknown key '{key}'. {suggest(str(key), known)}Keys: {', '.join(known)}.")
        return _plain(value)  # a copy, in which tuples are lists as in YAML
    return check


def _parts(name: str, value: Any) -> tuple[str, ...]:
    parts = [value] if isinstance(value, str) else value or None
    return many(one_of(PARTS), f"a list of at least one part: {', '.join(PARTS)}")(name, parts)


def _stages(name: str, value: Any) -> tuple['Stage', ...]:
    stages = []
    for i, stage in enumerate(value if isinstance(value, (list, tuple)) else ()):
        with prefixed(f'{name}.{i}: '):
            stages.append(stage if isinstance(stage, Stage) else Stage(**_section(Stage.names())('it', stage) or {}))
    if not stages:
        raise ValueError(f'{name} must be a list of at least one stage, such as [{{task: trajectory}}].')
    return tuple(stages)


@contextmanager
def prefixed(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        raise ValueError(f'{where}{one_line(e)}') from e


@dataclass(frozen=True, repr=False)
class Stage(Settings):
    """One part of a training run.

    Attributes:
        task: 'trajectory' (TrajectoryDistillationTask); 'labels' (cross-entropy alone).
        train: Names, from PARTS, of the parts of the model that learn.
        loss: Settings of LossConfig; they override the recipe's.
        fit: Settings of FitConfig; they override the recipe's.
        scale_lr: Multiply lr by min(1, 3 * loss), with the loss of the first stage before training; a student that has
            nothing to learn is left as it is.
    """
    task: str = setting('trajectory', one_of(('trajectory', 'labels')))
    train: tuple[str, ...] = setting(('all',), _parts)
    loss: Section = setting(None, _section(LossConfig.names()))
    fit: Section = setting(None, _section(FIT))
    scale_lr: bool = setting(False, flag)

    def _check(self) -> None:
        if self.loss and self.task == 'labels':
            raise ValueError("loss is for the task 'trajectory'. Leave it out.")


@dataclass(frozen=True, repr=False)
class Recipe(Settings):
    """A training run.

    Attributes:
        ode: Settings of OdeConfig, by which the teacher (or `model`) becomes the student; None to train it as it is.
        model: timm name of the model, for training without a teacher.
        model_args: Keywords of timm.create_model for `model`.
        data: Settings of DataConfig.
        loss: Settings of LossConfig for all stages.
        fit: Settings of FitConfig for all stages.
        stages: The stages, in order, each with epochs or minutes; one with 0 epochs is left out.
        grad_checkpointing: Recompute activations in the backward pass, step by step.
        seed: Seed of the run.

    Raises ValueError if a key is unknown or a value out of range.

    Examples:
        >>> recipe = Recipe.load('three_blocks', ['ode.steps=12', 'stages.1.fit.epochs=20'])
        >>> print(recipe.to_yaml())
    """
    ode: Section = setting(None, _section(OdeConfig.names()))
    model: str | None = None
    model_args: Section = setting(None, _section())
    data: Section = setting(None, _section(DataConfig.names()))
    loss: Section = setting(None, _section(LossConfig.names()))
    fit: Section = setting(None, _section(FIT))
    stages: tuple[Stage, ...] = setting((), _stages)
    grad_checkpointing: bool = setting(False, flag)
    seed: int = setting(0, integer(0, most=2 ** 31))

    def _check(self) -> None:  # each of these refuses what is out of range
        check_args(self.model, {}, self.model_args or {})
        _ = self.config
        with prefixed('data.'):
            _ = self.batches
        for i, stage in enumerate(self.stages):
            with prefixed(f'stages.{i}: '):
                self.fit_of(stage), self.loss_of(stage)

    @property
    def batches(self) -> DataConfig:
        return DataConfig(**(self.data or {}))

    @property
    def config(self) -> OdeConfig:
        return OdeConfig(**(self.ode or {}))

    def loss_of(self, stage: Stage) -> LossConfig:
        return LossConfig(**{**(self.loss or {}), **(stage.loss or {})})

    def fit_of(self, stage: Stage) -> FitConfig:
        return FitConfig(**{**(self.fit or {}), **(stage.fit or {})})

    @property
    def embeds(self) -> bool:
        """Whether the outputs are embeddings in all stages, so that labels mean nothing."""
        return all(stage.task == 'trajectory' and self.loss_of(stage).embedding for stage in self.stages)

    @property
    def learns_labels(self) -> bool:
        """Whether a stage learns from the labels; if none does, they only judge, and may be missing."""
        return any(stage.task == 'labels' or self.loss_of(stage).task_weight > 0 for stage in self.stages)

    def counts_of(self, stage: Stage, own: int) -> tuple[tuple[int, ...], ...]:
        return self.loss_of(stage).counts(own) if stage.task == 'trajectory' else ((own,),)

    def trained_at(self, own: int, stage: int = -1) -> tuple[int, ...]:
        """The numbers of steps that a stage, or the last, trains, for a student that had `own` steps before."""
        return tuple(sorted({k for of in self.counts_of(self.stages[stage], own) for k in of}))

    def without_shares(self, own: int) -> 'Recipe':
        """With numbers of steps in place of shares; see `trained_at`."""
        stages = []
        for stage in self.stages:
            if stage.task == 'trajectory' and self.loss_of(stage).steps:
                steps = [list(of) if len(of) > 1 else of[0] for of in self.counts_of(stage, own)]
                stage = replace(stage, loss={**(stage.loss or {}), 'steps': steps})
            stages.append(stage)
        return replace(self, stages=tuple(stages))

    @classmethod
    def load(cls, name: str | Path, changes: Sequence[str] = ()) -> 'Recipe':
        """Read a YAML file, or the recipe of that name that comes with the package.

        Changes are such as 'stages.0.fit.lr=1e-3', with values in YAML; 'null' restores the default. Raises ValueError
        if there is no such recipe, it cannot be read, or something in it is unknown or out of range.
        """
        path = Path(name)
        if path.suffix not in ('.yaml', '.yml') and not path.is_file():
            path = FOLDER / f'{name}.yaml'
        if not path.is_file():
            known = builtin_recipes()
            raise ValueError(f"There is no recipe '{name}'. {suggest(str(name), known)}Give a .yaml file, or one of: "
                             f"{', '.join(known)}.")
        with open(path, 'rb') as file:
            return cls.from_dict(_parse(file.read(LONGEST + 1), str(name)), changes, str(name))

    @classmethod
    def from_dict(cls, tree: Any, changes: Sequence[str] = (), name: str = 'recipe') -> 'Recipe':
        """From the contents of a YAML file; see `load`."""
        tree = _section()(name, tree) or {}
        for change in changes:
            _change(tree, change)
        tree = _section(cls.names())(name, tree)
        with prefixed(f'{name}: '):
            stages, fit = _stages('stages', tree.get('stages')), _section(FIT)('fit', tree.get('fit')) or {}
            epochs = [{**fit, **(stage.fit or {})}.get('epochs') for stage in stages]
            used = {i: stage for i, stage in enumerate(stages) if epochs[i] != 0 or epochs[i] is False}
            if not used:
                raise ValueError('All stages have 0 epochs, so there is nothing to train.')
            for change in changes:
                _check_effect(change, tree, used)
            return cls(**{**tree, 'stages': tuple(used.values())})

    def to_yaml(self) -> str:
        """Without default values."""
        tree = {**self.changed(), 'stages': [stage.changed() for stage in self.stages]}
        return yaml.safe_dump(_plain(tree), sort_keys=False, default_flow_style=None, width=120)


def builtin_recipes() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob('*.yaml'))


def _check_effect(change: str, tree: dict[str, Any], stages: dict[int, Stage]) -> None:
    """Refuse a change of fit or loss that no stage would use."""
    section, _, key = change.partition('=')[0].strip().partition('.')
    users = {i: stage for i, stage in stages.items() if section == 'fit' or stage.task == 'trajectory'}
    if section in ('fit', 'loss') and key in (tree.get(section) or {}) and all(
            key in (getattr(stage, section) or {}) for stage in users.values()):
        own = ', '.join(f'stages.{i}.{section}.{key}' for i in users) or 'another'
        raise ValueError(f"'{change}' has no effect: no stage takes its {key} from there. Change {own}.")


class _Loader(yaml.SafeLoader):
    """Refuses aliases, of which a few lines can make gigabytes; reads 1e-3 as a number, as YAML 1.2 does."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f'it has the alias *{self.peek_event().anchor}, which no recipe needs')
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float', re.compile(r'[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$'), list('-+.0123456789'))
_Loader.add_implicit_resolver('tag:yaml.org,2002:null', re.compile('None$'), ['N'])


def _parse(text: str | bytes, name: str) -> Any:
    if len(text) > LONGEST:
        raise ValueError(f"'{name[:100]}' has more than {LONGEST:,} characters, so it is not a recipe.")
    try:
        return yaml.load(text, _Loader)
    except Exception as e:  # of many kinds, for values such as 2001-13-32
        raise ValueError(f"'{name[:100]}' is not valid YAML: {one_line(e)}") from None


def _change(tree: Any, change: str) -> None:
    """Make a change such as 'stages.0.fit.lr=1e-3', with a path of keys and indices; null removes an entry,
    None does not."""
    at, _, text = change.partition('=')
    value, (*path, last) = _parse(text, change), at.strip().split('.')
    try:
        if '=' not in change:
            raise ValueError
        for key in path:
            if isinstance(tree, dict) and tree.get(key) is None:
                tree[key] = {}
            tree = tree[int(key) if isinstance(tree, list) else key]
        if isinstance(tree, list):
            tree[int(last)] = value
        elif value is not None or 'None' in text:
            tree[last] = value
        else:
            tree.pop(last, None)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise ValueError(f"Expected a change to a recipe, such as fit.lr=1e-3; got '{change[:100]}', or there is no "
                         'such entry.') from None


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    tree = tree.tolist() if hasattr(tree, 'tolist') else tree  # NumPy's
    return [_plain(v) for v in tree] if isinstance(tree, (list, tuple)) else tree
