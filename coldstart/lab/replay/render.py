"""A replay's result for people: a table of text."""

from __future__ import annotations

from collections.abc import Mapping

MARKS = ("mean", "p50", "p90", "p95", "p99", "max")
LABELS = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "normalized_s": "per token",
    "latency_s": "end to end",
    "client_lag_s": "client lag",
}


def rows(summary: Mapping[str, object]) -> list[list[str]]:
    """One row per metric: its label, then MARKS in seconds."""
    found = ((label, summary.get(name)) for name, label in LABELS.items())
    return [[label, *(f"{m[k]:.4g}" for k in MARKS)] for label, m in found if isinstance(m, Mapping)]


def text(summary: Mapping[str, object], ratios: Mapping[str, float] | None = None) -> str:
    """The table with its rates below, and the ratios against a baseline."""
    lines = [f"{'seconds':<12}" + "".join(f"{mark:>10}" for mark in MARKS)]
    lines += [f"{row[0]:<12}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows(summary)]
    lines.append(rates(summary))
    if ratios:
        lines.append("against the baseline (above 1 is better):")
        lines += [f"  {name:<22}{ratio:>8.2f}x" for name, ratio in ratios.items()]
    return "\n".join(lines)


def rates(summary: Mapping[str, object]) -> str:
    """Counts and rates in one line; SLO attainment and goodput where an SLO was given."""
    slo = summary["slo"]
    judged = (
        f", SLO attainment {slo['attainment']:.1%}, goodput {summary['goodput_per_s']:.3g} requests/s"
        if isinstance(slo, Mapping)
        else ""
    )
    return (
        f"{summary['completed']} of {summary['requests']} requests, {summary['failed']} failed; "
        f"{summary['requests_per_s']:.3g} requests/s, {summary['output_tokens_per_s']:.4g} tokens/s{judged}"
    )
