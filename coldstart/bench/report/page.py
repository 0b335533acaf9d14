"""Self-contained HTML page: it includes the plotting library and the data, and makes no network request.

Invariant: all text is escaped; a content security policy in the page forbids every request, whatever a text contains.
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
:root{color-scheme:light dark;--page:#fff;--text:#222;--line:#8886}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--text:#e6e6e6}}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere;
background:var(--page);color:var(--text)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
h2{margin-top:2rem}h3{margin-bottom:.2rem}
"""
PLOT = '<div class="plot"'
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
PAINT = """
// Colours of the page for a plot; Bokeh draws on a canvas, which style sheets do not reach.
function paint(plot) {
  const style = getComputedStyle(document.body), text = style.color, line = style.getPropertyValue("--line");
  Object.assign(plot, {background_fill_color: null, border_fill_color: null, outline_line_color: line});
  if (plot.title) plot.title.text_color = text;
  for (const part of [...plot.left, ...plot.right, ...plot.above, ...plot.below, ...plot.center]) {
    const colours = {axis_label_text_color: text, major_label_text_color: text, label_text_color: text, axis_line_color: line,
      major_tick_line_color: line, minor_tick_line_color: null, grid_line_color: line};
    for (const [name, colour] of Object.entries(colours)) if (name in part) part[name] = colour;
    if ("label_text_color" in part) Object.assign(part, {background_fill_color: null, border_line_color: null});
  }
}
"""
_DRAW = f"""{PAINT}
const paintAll = () => Bokeh.documents.forEach(one => one.roots().forEach(paint));
for (const one of document.querySelectorAll("script.plot")) Bokeh.embed.embed_item(JSON.parse(one.textContent)).then(paintAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);
"""
_numbers = count(1)


def page(title: str, *parts: str) -> str:
    """Return the complete page; `parts` are HTML. The library is included only if a part is a plot."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    script = f"<script>{library()}</script>" if PLOT in body else ""
    draw = f"<script>{_DRAW}</script>" if script else ""
    return f"{head(title, _POLICY)}{script}</head><body>\n{body}\n{draw}</body></html>\n"


def head(title: str, policy: str, style: str = STYLE) -> str:
    """Return the beginning of a page: everything before `</head>`."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style>'
    )


@cache
def library(*more: str) -> str:
    """Return the plotting JavaScript of Bokeh's wheel with its licence; `more` names further bundles, such as "api".

    It is read from the wheel without importing Bokeh, which takes a second and 50 MB. Raises FileNotFoundError
    without Bokeh.
    """
    spec = find_spec("bokeh")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("Bokeh is not installed")
    files = Path(spec.submodule_search_locations[0]) / "server" / "static" / "js"
    names = ["bokeh.min.js", *(f"bokeh-{name}.min.js" for name in more)]
    return "\n".join((files / name).read_text(encoding="utf-8") for name in names)


def plot(figure: Figure, title: str = "") -> str:
    """Return the HTML of a figure below its title."""
    from bokeh.embed import json_item

    name = f"plot-{next(_numbers)}"
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    item: Any = json_item(figure, name)
    return f'{heading}{PLOT} id="{name}"></div><script class="plot" type="application/json">{embedded(item)}</script>'


def embedded(document: Any) -> str:
    """Return JSON that is safe inside a script element: "</script>" in a string would end it, so every "<" is escaped."""
    return json.dumps(document).replace("<", "\\u003c")


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of text."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    # A wide table scrolls by itself, by keyboard too.
    start = '<div class="scroll" tabindex="0" role="region" aria-label="Table">'
    return f"{start}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def items(texts: Iterable[str]) -> str:
    """Return a list of text."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def section(title: str, content: str) -> str:
    """Return a heading with the HTML below it."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"
