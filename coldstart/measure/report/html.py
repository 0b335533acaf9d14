"""A bench document as one self-contained HTML page: no network, no script, plots inside.

The document itself is embedded as JSON, so that a page found somewhere can be read by a program again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from coldstart.measure.report import markdown, rows, svg

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:currentColor}
.whisker,.axis{stroke:currentColor;fill:none}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:13px}
.legend span{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
"""
HARNESS = "harness"
REST = "everything else"


def render(document: Mapping[str, Any]) -> str:
    """The whole page."""
    title = f"Cold start of {document['model']}"
    measured = {mode: found for mode, found in document["modes"].items() if "unavailable" not in found}
    parts = [
        f"<h1>{escape(title)}</h1>",
        _list([*rows.verdict(document), *rows.unavailable(document)]),
        _table(document),
        _section("From launch to the first token", svg.bars(title, _bars(measured))),
        _section("Phases", svg.stacks("Phases", {mode: stack(found) for mode, found in measured.items()})),
        *[_section(f"Timeline: {mode}", _timeline(mode, found)) for mode, found in measured.items()],
        _section("The floor", _list(f"{name}: {text}" for name, text in document["floor"]["method"].items())),
        f"<p>{escape(markdown.provenance(document))}</p>",
        f'<script type="application/json" id="bench">{_embedded(document)}</script>',
    ]
    return _page(title, "\n".join(parts))


def stack(found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase that add up to the median first token.

    The phases that the server reported, and the rest; where they overlap (their sum is longer than the
    start), the harness's own two, which never do.
    """
    own = {str(span["name"]) for span in found["timeline"] if span["track"] == HARNESS}
    medians = {name: summary["median"] for name, summary in found["phases"].items()}
    reported = {name: value for name, value in medians.items() if name not in own}
    rest = found["first_token_s"]["median"] - sum(reported.values())
    if reported and rest >= 0:
        return reported | {REST: rest}
    return {name: value for name, value in medians.items() if name in own}


def _bars(measured: Mapping[str, Any]) -> list[svg.Bar]:
    return [_bar(mode, found["first_token_s"], found["ratio"]) for mode, found in measured.items()]


def _bar(mode: str, first: Mapping[str, float], ratio: float | None) -> svg.Bar:
    faster = f", {ratio:.1f}x" if ratio else ""
    note = f"{rows.seconds(first['median'])} s{faster}"
    return svg.Bar(mode, first["median"], first["min"], first["max"], note)


def _timeline(mode: str, found: Mapping[str, Any]) -> str:
    return svg.timeline(f"Timeline of {mode}", found["timeline"])


def _table(document: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows.HEADERS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows.rows(document)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _embedded(document: Mapping[str, Any]) -> str:
    # "</script>" inside a string would end the element: escape every "<" the JSON way.
    return json.dumps(document).replace("<", "\\u003c")


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )
