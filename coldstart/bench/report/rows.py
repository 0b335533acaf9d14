"""Table of a benchmark: one row of text per mode, the same in the terminal, in Markdown and on the page.

A ratio above 1 is a shorter start than vllm-warm's; the ratios of the steady state are this mode over vllm-warm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return one row per mode that ran, in the document's order."""
    return [_row(mode, found) for mode, found in document["modes"].items() if "unavailable" not in found]


def stages(document: Mapping[str, Any]) -> list[list[str]]:
    """Return one row of STAGE_HEADERS per mode whose processes reported spans: medians."""
    return [
        [mode, *(seconds(found["stages"][stage]["median"]) for stage in STAGES)]
        for mode, found in document["modes"].items()
        if found.get("stages")
    ]


def records(document: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return one row of COLUMNS per mode; unavailable modes have only the reason."""
    return [{"mode": mode, **_record(found)} for mode, found in document["modes"].items()]


def _record(found: Mapping[str, Any]) -> dict[str, object]:
    if "unavailable" in found:
        return {"unavailable": found["unavailable"]}
    first, steady, interval = (
        found["first_token_s"],
        found["steady"] or {},
        found["ratio_ci95"] or (None, None),
    )
    return {
        "first_token_s": first["median"],
        "first_token_min_s": first["min"],
        "first_token_max_s": first["max"],
        "runs": first["n"],
        "cpu_s": found["cpu_s"]["median"],
        "ratio": found["ratio"],
        "ratio_ci95_low": interval[0],
        "ratio_ci95_high": interval[1],
        "percent_of_floor": found["percent_of_floor"],
        "latency_ratio": (steady.get("latency_ratio") or {}).get("ratio"),
        "throughput_ratio": (steady.get("throughput_ratio") or {}).get("ratio"),
        "pss_bytes": found["pss_bytes"]["median"],
        "tokens_identical": found["tokens_identical"],
        **{f"{stage}_s": one["median"] for stage, one in found["stages"].items()},
    }


def unavailable(document: Mapping[str, Any]) -> list[str]:
    """Return one sentence per mode that could not run."""
    return [
        f"{mode} could not run: {found['unavailable']}"
        for mode, found in document["modes"].items()
        if "unavailable" in found
    ]


def verdict(document: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know besides the table: tokens, baseline, failures."""
    same = document["tokens_identical"]
    known = {True: "identical in all modes", False: "NOT identical", None: "not compared"}[same]
    compared = document.get("baseline", {}).get("modes", {})
    against = [f"{mode} against the baseline: {_change(found)}" for mode, found in compared.items()]
    return [f"greedy tokens: {known}", *against, *[f"failed: {why}" for why in document["failures"]]]


def seconds(value: float) -> str:
    """Format seconds: two decimals below 10, one below 100, else none."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(mode: str, found: Mapping[str, Any]) -> list[str]:
    first, cpu, steady = found["first_token_s"], found["cpu_s"], found["steady"] or {}
    interval = found["ratio_ci95"]
    return [
        mode,
        seconds(first["median"]),
        f"{seconds(first['min'])} to {seconds(first['max'])}",
        str(first["n"]),
        seconds(cpu["median"]),
        _number(found["ratio"], "x"),
        f"{interval[0]:.1f} to {interval[1]:.1f}" if interval else NONE,
        f"{found['percent_of_floor']:.0f}" if found["percent_of_floor"] else NONE,
        _steady(steady.get("latency_ratio")),
        _steady(steady.get("throughput_ratio")),
        f"{found['pss_bytes']['median'] / 2**20:.0f}",
    ]


def _number(value: float | None, unit: str = "") -> str:
    return NONE if value is None else f"{value:.1f}{unit}"


def _steady(found: Mapping[str, Any] | None) -> str:
    return NONE if found is None else f"{found['ratio']:.3f} {found['verdict']}"


def _change(found: Mapping[str, Any]) -> str:
    interval = found["ci95_pct"]
    spread = f" ({interval[0]:+.1f} to {interval[1]:+.1f} %)" if interval else ""
    reason = f", {found['reason']}" if found["reason"] else ""
    return f"{found['verdict']}{reason}, {found['change_pct']:+.1f} %{spread}"
