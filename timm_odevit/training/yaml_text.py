"""YAML that may be anybody's: read in bounded time and memory, and changed."""
import re
from pathlib import Path
from typing import Any

import yaml

from ..settings import one_line

__all__ = ['change_entry', 'read']

LONGEST, DEEPEST = 50_000, 50  # most characters and levels that are read; our recipes have 2,200 and 4


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
        keys = [key.value for key, _ in node.value]
        if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise yaml.MarkedYAMLError(problem=f"it has the key '{twice[0]}' twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float', re.compile(r'[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+'), list('-+.0123456789'))


def read(path: Path, name: str) -> Any:
    with open(path, 'rb') as file:
        return _parse(file.read(LONGEST + 1), name)


def _parse(text: str | bytes, name: str) -> Any:
    if len(text) > LONGEST:
        raise ValueError(f"'{name}' has more than {LONGEST:,} characters, so it is not a recipe.")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as e:
        problem = ', '.join(filter(None, (e.context, e.problem)))
        problem += f' (line {e.problem_mark.line + 1}).' if e.problem_mark else '.'
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as e:  # PyYAML's, for values such as 2001-13-32
        problem = one_line(e)
    raise ValueError(f"'{name}' is not valid YAML: {problem}")


def change_entry(tree: Any, change: str) -> None:
    """Make a change such as 'stages.0.fit.lr=1e-3', with a path of keys and indices; null removes an entry."""
    at, equals, text = change.partition('=')
    change, path = change if len(change) <= 100 else f'{change[:100]} ...', at.strip().split('.')
    if not equals:
        raise ValueError(f"Expected a change to a recipe, such as fit.lr=1e-3; got '{change}'.")
    if len(path) > DEEPEST:
        raise ValueError(f"'{change}' has {len(path)} levels, but a recipe has at most {DEEPEST}.")
    value = _parse(text, change)
    for name, below in zip(path, [*path[1:], None], strict=True):
        if isinstance(tree, list) and (not name.isdigit() or int(name) >= len(tree)):
            raise ValueError(f"'{change}': there is no entry '{name}'; the entries are 0 to {len(tree) - 1}.")
        if not isinstance(tree, (dict, list)):
            raise ValueError(f"'{change}': '{name}' is not a key, because the entry before it is a single value.")
        key: Any = int(name) if isinstance(tree, list) else name
        entries: Any = tree
        if below is not None:
            if isinstance(tree, dict) and tree.get(key) is None:
                entries[key] = {}
            tree = entries[key]
        elif value is None and isinstance(tree, dict):
            tree.pop(key, None)
        else:
            entries[key] = value
