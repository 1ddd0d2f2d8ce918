"""The writer of pages, which need no network and no server: page.html draws what it is given."""
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

__all__ = ['page', 'plotly_js', 'printable']


def page(
        title: str, lead: str, footer: str, table: Sequence[Sequence[str]], charts: Sequence[dict[str, Any]],
        **more: Any,
) -> str:
    """A page as HTML; raises ImportError without plotly.

    Args:
        title: Its title.
        lead: What it says, above everything else.
        footer: What stands below everything else.
        table: The heads of a table, and its rows.
        charts: Charts with a kind, a title and what they show (about); page.html says what each kind draws.
        **more: Sentences above (text) and below the table (notes), which rows are pale, charts behind a heading and a
            sentence (more), and what the slider and the choice of an image show.
    """
    tree = {'text': [], 'notes': [], **more, 'footer': footer, 'table': table, 'first': charts}
    template = Template(files(__package__).joinpath('page.html').read_text(encoding='utf-8'))
    return printable(template.substitute(  # no text can close the script
        title=escape(title), lead=escape(lead), page=json.dumps(tree).replace('<', '\\u003c'), plotly=plotly_js()))


def plotly_js() -> str:
    """Plotly's JavaScript; raises ImportError, which says what to type, without it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as e:
        raise ImportError('A page needs plotly. Type: pip install plotly') from e
    return str(get_plotlyjs())


def printable(text: str) -> str:
    """A text that can be written as UTF-8; names of files may hold bytes in no encoding."""
    return text.encode(errors='replace').decode()
