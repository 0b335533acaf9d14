"""Self-contained HTML page with inline SVG: it makes no network request and runs no script.

Invariant: all text is escaped; a content security policy in the page forbids every request, whatever a text contains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#222;--line:#8886}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--text:#e6e6e6}}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere;
background:var(--page);color:var(--text)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
h2{margin-top:2rem}h3{margin-bottom:.2rem}
figure{margin:0;max-width:48rem}svg{width:100%;overflow:visible;fill:var(--text);font-size:11px}
.grid{stroke:var(--line)}.y{text-anchor:end}.x{text-anchor:middle}
figcaption span{margin-right:1rem;display:inline-block}
figcaption i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
"""


def page(title: str, *parts: str) -> str:
    """Return the complete page; `parts` are HTML."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def embed(name: str, document: Any) -> str:
    """Return a script element with the document as JSON. Each "<" is escaped, because "</script>" would end the element."""
    text = json.dumps(document).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


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


def section(title: str, content: str, level: int = 2) -> str:
    """Return a heading of this level with the HTML below it."""
    return f"<section><h{level}>{escape(title)}</h{level}>{content}</section>"
