"""One self-contained HTML page: no network, no script, everything that is text escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:currentColor}
figure{display:inline-block;width:26rem;margin:.5rem}
.whisker,.axis{stroke:currentColor;fill:none}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:13px}
.legend span{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
"""


def page(title: str, *parts: str) -> str:
    """The whole page; `parts` are HTML."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )


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
