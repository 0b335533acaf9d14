"""One HTML page that stands alone: its plots' library and data are inside, and it may ask the network for nothing.

Invariant: everything that is text is escaped; a policy in the page itself forbids every request, whatever a text says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;background:#fff;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
h2{margin-top:2rem}h3{margin-bottom:.2rem}
"""
PLOT = '<div class="plot"'
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
_DRAW = "for(const s of document.querySelectorAll('script.plot'))Bokeh.embed.embed_item(JSON.parse(s.textContent));"
_numbers = count(1)


def page(title: str, *parts: str) -> str:
    """The whole page; `parts` are HTML. The library is inside only where a part is a plot."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    script = f"<script>{library()}</script>" if PLOT in body else ""
    draw = f"<script>{_DRAW}</script>" if script else ""
    return f"{head(title, _POLICY)}{script}</head><body>\n{body}\n{draw}</body></html>\n"


def head(title: str, policy: str, style: str = STYLE) -> str:
    """The beginning of a page, up to and without the end of its head."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style>'
    )


@cache
def library(*more: str) -> str:
    """The plots' JavaScript as Bokeh's wheel has it, with its licence; `more` names further bundles, such as "api".

    Read from the wheel without importing it, which takes a second and 50 MB. Raises FileNotFoundError without Bokeh.
    """
    spec = find_spec("bokeh")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("Bokeh is not installed")
    files = Path(spec.submodule_search_locations[0]) / "server" / "static" / "js"
    names = ["bokeh.min.js", *(f"bokeh-{name}.min.js" for name in more)]
    return "\n".join((files / name).read_text(encoding="utf-8") for name in names)


def plot(figure: Figure, title: str = "") -> str:
    """A figure in place, below its title."""
    from bokeh.embed import json_item

    name = f"plot-{next(_numbers)}"
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    item: Any = json_item(figure, name)
    return f'{heading}{PLOT} id="{name}"></div><script class="plot" type="application/json">{embedded(item)}</script>'


def embedded(document: Any) -> str:
    """JSON as it may stand inside a script element: "</script>" in a string would end it, so every "<" is escaped."""
    return json.dumps(document).replace("<", "\\u003c")


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def items(texts: Iterable[str]) -> str:
    """A list of text."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def section(title: str, content: str) -> str:
    """A heading and the HTML below it."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"
