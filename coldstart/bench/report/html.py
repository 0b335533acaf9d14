"""Benchmark document as an HTML page with plots.

The document is embedded as JSON, so that a program can read it back from the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from coldstart.bench.report import markdown, plots, rows
from coldstart.bench.report.page import embedded, items, page, plot, section, table

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure

HARNESS = "harness"
REST = "everything else"


def render(document: Mapping[str, Any]) -> str:
    """Return the HTML page of a bench result."""
    measured = {mode: found for mode, found in document["modes"].items() if "unavailable" not in found}
    parts = [
        items([*rows.verdict(document), *rows.unavailable(document)]),
        table(rows.HEADERS, rows.rows(document)),
    ]
    if measured:
        first = plots.ranges([_range(*one) for one in measured.items()], "from launch to the first token")
        parts += [
            section("From launch to the first token", plot(first)),
            section("Phases", plot(plots.stacks({mode: stack(found) for mode, found in measured.items()}))),
            section("Round by round", plot(_rounds(measured))),
            section(
                "Timelines",
                "".join(plot(plots.timeline(found["timeline"]), mode) for mode, found in measured.items()),
            ),
        ]
    parts += [
        section("The floor", items(f"{name}: {text}" for name, text in document["floor"]["method"].items())),
        f"<p>{escape(markdown.provenance(document))}</p>",
        f'<script type="application/json" id="bench">{embedded(document)}</script>',
    ]
    return page(f"Cold start of {document['model']}", *parts)


def stack(found: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds by phase that add up to the median first token.

    These are the phases that the server reported and the rest. If reported phases overlap (their sum exceeds the
    start), these are the harness's own two phases, which never overlap.
    """
    own = {str(span["name"]) for span in found["timeline"] if span["track"] == HARNESS}
    medians = {name: summary["median"] for name, summary in found["phases"].items()}
    reported = {name: value for name, value in medians.items() if name not in own}
    rest = found["first_token_s"]["median"] - sum(reported.values())
    if reported and rest >= 0:
        return reported | {REST: rest}
    return {name: value for name, value in medians.items() if name in own}


def _range(mode: str, found: Mapping[str, Any]) -> plots.ValueRange:
    first, ratio = found["first_token_s"], found["ratio"]
    samples = [sample["first_token_s"] for sample in found.get("samples", ())]
    return plots.ValueRange(
        mode, first["median"], first["min"], first["max"], samples, f"{ratio:.1f}x" if ratio else ""
    )


def _rounds(measured: Mapping[str, Any]) -> Figure:
    series = [
        plots.Series(
            mode,
            [sample["round"] for sample in found["samples"]],
            [sample["first_token_s"] for sample in found["samples"]],
            step=False,
        )
        for mode, found in measured.items()
    ]
    return plots.over_time(series, "time to the first token (s)", time="round", may_be_log=True)
