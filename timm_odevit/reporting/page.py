"""The writer of pages, which need no network and no server: page.html draws what it is given."""
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ..files import to_json

__all__ = ['encodable', 'page', 'plotly_js']


def page(
        title: str, lead: str, footer: str, table: Sequence[Sequence[str]], charts: Sequence[dict[str, Any]],
        **more: Any,
) -> str:
    """A page as HTML: what it says above and below all else, a table with its heads, charts, and what page.html takes.

    Raises ImportError without plotly.
    """
    tree = {'text': [], 'notes': [], **more, 'footer': footer, 'table': table, 'first': charts}
    template = Template(files(__package__).joinpath('page.html').read_text(encoding='utf-8'))
    return encodable(template.substitute(  # no text can close the script
        title=escape(title), lead=escape(lead), page=to_json(tree).replace('<', '\\u003c'), plotly=plotly_js()))


def plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as e:
        raise ImportError('A page needs plotly. Type: pip install plotly') from e
    return str(get_plotlyjs())


def encodable(text: str) -> str:
    """A text that can be written as UTF-8; names of files may hold bytes in no encoding."""
    return text.encode(errors='replace').decode()
