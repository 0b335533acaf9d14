"""A bench document as an HTML page with plots inside.

The document itself is embedded as JSON, so that a page found somewhere can be read by a program again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from coldstart.measure.report import markdown, rows, svg
from coldstart.measure.report.page import items, page, section, table

HARNESS = "harness"
REST = "everything else"


def render(document: Mapping[str, Any]) -> str:
    """The whole page."""
    title = f"Cold start of {document['model']}"
    measured = {mode: found for mode, found in document["modes"].items() if "unavailable" not in found}
    parts = [
        items([*rows.verdict(document), *rows.unavailable(document)]),
        table(rows.HEADERS, rows.rows(document)),
        section("From launch to the first token", svg.bars(title, _bars(measured))),
        section("Phases", svg.stacks("Phases", {mode: stack(found) for mode, found in measured.items()})),
        *[section(f"Timeline: {mode}", _timeline(mode, found)) for mode, found in measured.items()],
        section("The floor", items(f"{name}: {text}" for name, text in document["floor"]["method"].items())),
        f"<p>{escape(markdown.provenance(document))}</p>",
        f'<script type="application/json" id="bench">{_embedded(document)}</script>',
    ]
    return page(title, *parts)


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


def _embedded(document: Mapping[str, Any]) -> str:
    # "</script>" inside a string would end the element: escape every "<" the JSON way.
    return json.dumps(document).replace("<", "\\u003c")
