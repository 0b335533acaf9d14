"""Report of a benchmark document: one row per mode, its plots, and what a reader must know besides.

A ratio above 1 is a shorter start than vllm-warm's; the ratios of the steady state are this mode over vllm-warm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coldstart.bench.report import svg
from coldstart.bench.report.report import Report, Shown, html_items, html_section
from coldstart.bench.stages import STAGES

HEADERS = (
    "mode", "first token (s)", "range", "n", "CPU (s)", "ratio", "95 % interval", "% of floor", "latency ratio",
    "throughput ratio", "PSS (MiB)",
)  # fmt: skip
COLUMNS = (
    "mode", "unavailable", "first_token_s", "first_token_min_s", "first_token_max_s", "runs", "cpu_s", "ratio",
    "ratio_ci95_low", "ratio_ci95_high", "percent_of_floor", "latency_ratio", "throughput_ratio", "pss_bytes",
    "tokens_identical", *(f"{stage}_s" for stage in STAGES),
)  # fmt: skip
"""Columns of the exported table: one row per mode, medians unless the name says otherwise."""

STAGE_HEADERS = ("mode", *(f"{stage} (s)" for stage in STAGES))
NONE = "-"
Document = Mapping[str, Any]


def report(document: Document) -> Report:
    """Return the report of a benchmark."""
    notes = [*list_notes(document), _describe_provenance(document)]
    title = f"Cold start of {document['model']}"
    return Report(
        title,
        document,
        COLUMNS,
        lambda: list_rows(document),
        lambda: tabulate(document),
        notes,
        lambda: _plots(document),
    )


def list_rows(document: Document) -> list[dict[str, object]]:
    """Return one row of COLUMNS per mode; unavailable modes have only the reason."""
    return [{"mode": mode, **_row(found)} for mode, found in document["modes"].items()]


def _row(found: Document) -> dict[str, object]:
    if "unavailable" in found:
        return {"unavailable": found["unavailable"]}
    first, steady = found["first_token_s"], found["steady"] or {}
    low, high = found["ratio_ci95"] or (None, None)
    return {
        **{
            f"first_token{end}_s": first[key]
            for end, key in (("", "median"), ("_min", "min"), ("_max", "max"))
        },
        "runs": first["n"],
        "cpu_s": found["cpu_s"]["median"],
        "ratio": found["ratio"],
        "ratio_ci95_low": low,
        "ratio_ci95_high": high,
        "percent_of_floor": found["percent_of_floor"],
        **{name: (steady.get(name) or {}).get("ratio") for name in ("latency_ratio", "throughput_ratio")},
        "pss_bytes": found["pss_bytes"]["median"],
        "tokens_identical": found["tokens_identical"],
        **{f"{stage}_s": one["median"] for stage, one in found["stages"].items()},
    }


def tabulate(document: Document) -> list[Shown]:
    """Return the tables for people, one row per mode that ran: HEADERS, and STAGE_HEADERS where spans were reported."""
    ran = {mode: found for mode, found in document["modes"].items() if "unavailable" not in found}
    tables: list[Shown] = [(HEADERS, [[mode, *_cells(found)] for mode, found in ran.items()])]
    stages = [
        [mode, *(seconds(found["stages"][stage]["median"]) for stage in STAGES)]
        for mode, found in ran.items()
        if found.get("stages")
    ]
    return [*tables, (STAGE_HEADERS, stages)] if stages else tables


def _cells(found: Document) -> Iterator[str]:
    first, interval, steady = found["first_token_s"], found["ratio_ci95"], found["steady"] or {}
    yield seconds(first["median"])
    yield f"{seconds(first['min'])} to {seconds(first['max'])}"
    yield str(first["n"])
    yield seconds(found["cpu_s"]["median"])
    yield NONE if found["ratio"] is None else f"{found['ratio']:.1f}x"
    yield f"{interval[0]:.1f} to {interval[1]:.1f}" if interval else NONE
    yield f"{found['percent_of_floor']:.0f}" if found["percent_of_floor"] else NONE
    for name in ("latency_ratio", "throughput_ratio"):
        one = steady.get(name)
        yield NONE if one is None else f"{one['ratio']:.3f} {one['verdict']}"
    yield f"{found['pss_bytes']['median'] / 2**20:.0f}"


def list_notes(document: Document) -> list[str]:
    """Return what a reader must know besides the table: tokens, baseline, failures, modes that could not run."""
    known = {True: "identical in all modes", False: "NOT identical", None: "not compared"}
    compared = document.get("baseline", {}).get("modes", {})
    return [
        f"greedy tokens: {known[document['tokens_identical']]}",
        *(f"{mode} against the baseline: {_change(found)}" for mode, found in compared.items()),
        *(f"failed: {why}" for why in document["failures"]),
        *(
            f"{mode} could not run: {found['unavailable']}"
            for mode, found in document["modes"].items()
            if "unavailable" in found
        ),
    ]


def _change(found: Document) -> str:
    interval = found["ci95_pct"]
    spread = f" ({interval[0]:+.1f} to {interval[1]:+.1f} %)" if interval else ""
    reason = f", {found['reason']}" if found["reason"] else ""
    return f"{found['verdict']}{reason}, {found['change_pct']:+.1f} %{spread}"


def seconds(value: float) -> str:
    """Format seconds: two decimals below 10, one below 100, else none."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _describe_provenance(document: Document) -> str:
    machine = document["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    return (
        f"measured {document['date']} on {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, kernel {machine['kernel']}; {versions}; "
        f"`{' '.join(document['command_line'])}`"
    )


def _plots(document: Document) -> Iterator[str]:
    measured = {mode: found for mode, found in document["modes"].items() if "unavailable" not in found}
    if measured:
        first = {mode: found["first_token_s"] for mode, found in measured.items()}
        ratios = {mode: f"({found['ratio']:.1f}x)" for mode, found in measured.items() if found["ratio"]}
        rounds = {
            mode: [(one["round"], one["first_token_s"]) for one in found["samples"]]
            for mode, found in measured.items()
        }
        label = "from launch to the first token"
        yield html_section("From launch to the first token", svg.ranges(first, label, ratios))
        yield html_section("Round by round", svg.lines(rounds, "round", "time to the first token (s)"))
        drawn = (html_section(mode, svg.timeline(found["timeline"]), 3) for mode, found in measured.items())
        yield html_section("Timelines", "".join(drawn))
    method = document["floor"]["method"].items()
    yield html_section("The floor", html_items(f"{name}: {text}" for name, text in method))
