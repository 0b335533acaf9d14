"""Report of a benchmark: a table with one row per mode, plots, and notes.

A ratio above 1 means a shorter start than that of vllm-warm. A steady-state ratio is the mode's value divided by that of
vllm-warm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coldstart.bench.measure import STAGES
from coldstart.bench.report import Plot, Report, Table, draw_bars
from coldstart.bench.run_order import WAKING_MODES

Document = Mapping[str, Any]


def format_seconds(value: float) -> str:
    """Format seconds with two decimals below 10, one decimal below 100, and none above."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _format_or_dash(form: str, *values: Any) -> str:
    return "-" if None in values else form.format(*values)


RATIO_FORMAT = "{0[ratio]:.3f} {0[verdict]}"
COLUMNS: Mapping[str, Callable[[Document], str]] = {
    "first token (s)": lambda one: format_seconds(one["first_token_s"]["median"]),
    "range": lambda one: " to ".join(format_seconds(one["first_token_s"][end]) for end in ("min", "max")),
    "n": lambda one: str(one["first_token_s"]["n"]),
    "CPU (s)": lambda one: format_seconds(one["cpu_s"]["median"]),
    "ratio": lambda one: _format_or_dash("{:.1f}x", one["ratio"]),
    "95 % interval": lambda one: _format_or_dash("{0[0]:.1f} to {0[1]:.1f}", one["ratio_ci95"]),
    "latency ratio": lambda one: _format_or_dash(RATIO_FORMAT, (one["steady"] or {}).get("latency_ratio")),
    "throughput ratio": lambda one: _format_or_dash(
        RATIO_FORMAT, (one["steady"] or {}).get("throughput_ratio")
    ),
    "PSS (MiB)": lambda one: f"{one['pss_bytes']['median'] / 2**20:.0f}",
}
"""Columns of the printed table, and the function that formats each cell."""
HEADERS, STAGE_HEADERS = ("mode", *COLUMNS), ("mode", *(f"{stage} (s)" for stage in STAGES))


def build_report(document: Document) -> Report:
    """Build the report of a benchmark, with one row per measured start."""
    samples = ((mode, one) for mode, found in document["modes"].items() for one in found.get("samples", ()))
    rows = [{"mode": mode, **one} for mode, one in samples]
    notes = [*list_notes(document), _describe_provenance(document)]
    title = f"Cold start of {document['model']}"
    return Report(title, document, rows, tabulate(document), notes, [*plot_starts(document)])


def tabulate(document: Document) -> list[Table]:
    """Return a table with a row per mode that ran and, if spans were reported, a table with the stages of each start."""
    ran = _list_measured(document)
    rows = [[_label(mode), *(cell(found) for cell in COLUMNS.values())] for mode, found in ran.items()]
    stages = [
        [_label(mode), *(format_seconds(found["stages"][stage]["median"]) for stage in STAGES)]
        for mode, found in ran.items()
        if found.get("stages")
    ]
    return [(HEADERS, rows), (STAGE_HEADERS, stages)] if stages else [(HEADERS, rows)]


def _label(mode: str) -> str:
    return f"{mode} (wake to first token)" if mode in WAKING_MODES else mode


def list_notes(document: Document) -> list[str]:
    """Return notes about tokens, the baseline, failures, and modes that could not run."""
    verdicts = {True: "identical in all modes", False: "NOT identical", None: "not compared"}
    compared = document.get("baseline", {}).get("modes", {})
    missing = {
        mode: found["unavailable"] for mode, found in document["modes"].items() if "unavailable" in found
    }
    return [
        f"greedy tokens: {verdicts[document['tokens_identical']]}",
        *(f"{mode} against the baseline: {_format_change(found)}" for mode, found in compared.items()),
        *(f"failed: {reason}" for reason in document["failures"]),
        *(f"{mode} could not run: {reason}" for mode, reason in missing.items()),
    ]


def _format_change(found: Document) -> str:
    interval = found["ci95_pct"]
    spread = f" ({interval[0]:+.1f} to {interval[1]:+.1f} %)" if interval else ""
    reason = f", {found['reason']}" if found["reason"] else ""
    return f"{found['verdict']}{reason}, {found['change_pct']:+.1f} %{spread}"


def _describe_provenance(document: Document) -> str:
    machine = document["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    return (
        f"measured {document['date']} on {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, kernel {machine['kernel']}; {versions}; "
        f"`{' '.join(document['command_line'])}`"
    )


def plot_starts(document: Document) -> Iterator[Plot]:
    """Yield a plot of the times to first token, and a timeline of the typical start of each mode."""
    ran = _list_measured(document)
    totals = {mode: found["first_token_s"] for mode, found in ran.items()}
    first = [(mode, of["min"], of["max"], 0, of["median"]) for mode, of in totals.items()]
    yield "From launch to the first token", draw_bars("median, and range in gray", first)
    for mode, found in ran.items():
        spans = sorted(found["timeline"], key=lambda span: span["start_s"])
        tracks = [*dict.fromkeys(span["track"] for span in spans)]
        rows = [
            (one["name"], one["start_s"], one["end_s"], tracks.index(one["track"]), None) for one in spans
        ]
        yield (
            f"Timeline of {mode}",
            draw_bars(f"seconds since launch; one color each for {', '.join(tracks)}", rows),
        )


def _list_measured(document: Document) -> Document:
    return {mode: found for mode, found in document["modes"].items() if "unavailable" not in found}
