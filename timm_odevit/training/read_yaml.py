"""Read untrusted YAML safely."""
import re
from pathlib import Path
from typing import Any

import yaml

from ..settings import one_line

__all__ = ['DEEPEST', 'parse_yaml', 'read_yaml']

LONGEST, DEEPEST = 50_000, 50  # most characters and levels that are read; our recipes have 2,200 and 4


def read_yaml(path: str | Path, name: str | None = None) -> Any:
    """Read a YAML file, whatever it holds, within seconds and with a few times its size in memory.

    Args:
        path: The file.
        name: Name of the file in messages; by default its path.

    Raises:
        ValueError: It is not YAML, or has what no recipe needs: aliases, duplicate keys, many levels, long text.
    """
    name = name or str(path)
    try:
        with open(path, encoding='utf-8') as f:
            text = f.read(LONGEST + 1)
    except UnicodeDecodeError as e:
        raise ValueError(f"'{name}' is not valid YAML: {e}") from None
    return parse_yaml(text, name, 'is not valid YAML')


class _UnwantedError(Exception):
    """Something that recipes do not need, and that makes small files huge or endless."""

    def __init__(self, what: str, mark: Any, advice: str = '') -> None:
        super().__init__(f'{what} (line {mark.line + 1}).{advice}')


class _Loader(yaml.SafeLoader):
    """Refuses aliases, duplicate keys and more than `DEEPEST` levels; reads 1e-3 as a number, as YAML 1.2 does."""
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _UnwantedError(f'has the alias *{event.anchor}', event.start_mark, ' Write out what it stands for.')
        if self.depth == DEEPEST:
            raise _UnwantedError(f'has more than {DEEPEST} levels', event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _UnwantedError(f"has the key '{key.value}' twice", key.start_mark, ' Leave one out.')
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float', re.compile(r'[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+'), list('-+.0123456789'))


def parse_yaml(text: str, name: str, wrong: str) -> Any:
    if len(text) > LONGEST:
        raise ValueError(f"'{name}' has more than {LONGEST:,} characters, so it is not a recipe.")
    try:
        return yaml.load(text, _Loader)
    except _UnwantedError as e:
        raise ValueError(f"'{name}' {e}") from None
    except yaml.MarkedYAMLError as e:
        line = f' (line {e.problem_mark.line + 1})' if e.problem_mark else ''
        raise ValueError(f"'{name}' {wrong}: {', '.join(filter(None, (e.context, e.problem)))}{line}.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as e:  # PyYAML's, for values such as 2001-13-32
        raise ValueError(f"'{name}' {wrong}: {one_line(e)}") from None
