"""Benchmark document as an HTML page with plots.

The document is embedded as JSON, so that a program can read it back from the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from coldstart.bench.report import markdown, rows, svg
from coldstart.bench.report.page import embed, items, page, section, table


def render(document: Mapping[str, Any]) -> str:
    """Return the HTML page of a bench result."""
    measured = {mode: found for mode, found in document["modes"].items() if "unavailable" not in found}
    parts = [
        items([*rows.verdict(document), *rows.unavailable(document)]),
        table(rows.HEADERS, rows.rows(document)),
    ]
    if stages := rows.stages(document):
        parts.append(section("Stages", table(rows.STAGE_HEADERS, stages)))
    if measured:
        first = {mode: found["first_token_s"] for mode, found in measured.items()}
        ratios = {mode: f"({found['ratio']:.1f}x)" for mode, found in measured.items() if found["ratio"]}
        rounds = {
            mode: [(one["round"], one["first_token_s"]) for one in found["samples"]]
            for mode, found in measured.items()
        }
        timelines = [section(mode, svg.timeline(found["timeline"]), 3) for mode, found in measured.items()]
        parts += [
            section(
                "From launch to the first token", svg.ranges(first, "from launch to the first token", ratios)
            ),
            section("Round by round", svg.lines(rounds, "round", "time to the first token (s)")),
            section("Timelines", "".join(timelines)),
        ]
    parts += [
        section("The floor", items(f"{name}: {text}" for name, text in document["floor"]["method"].items())),
        f"<p>{escape(markdown.provenance(document))}</p>",
        embed("bench", document),
    ]
    return page(f"Cold start of {document['model']}", *parts)
