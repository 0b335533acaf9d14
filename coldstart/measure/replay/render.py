"""A replay's result for people: a table, and CSV with one row per request."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from typing import TextIO

from coldstart.measure.replay.record import RequestRecord
from coldstart.measure.replay.store import METRICS

MARKS = ("mean", "p50", "p90", "p95", "p99", "max")
LABELS = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "normalized_s": "per token",
    "latency_s": "end to end",
    "client_lag_s": "client lag",
}
CSV_FIELDS = ("number", "model", "target", "due_s", "sent_s", "first_token_s", "finished_s")
CSV_COUNTS = ("prompt_tokens", "wanted_tokens", "output_tokens", "error")


def rows(summary: Mapping[str, object]) -> list[list[str]]:
    """One row per metric: its label, then MARKS in seconds."""
    found = ((label, summary.get(name)) for name, label in LABELS.items())
    return [[label, *(f"{m[k]:.4g}" for k in MARKS)] for label, m in found if isinstance(m, Mapping)]


def text(summary: Mapping[str, object], ratios: Mapping[str, float] | None = None) -> str:
    """The table with its rates below, and the ratios against a baseline."""
    lines = [f"{'seconds':<12}" + "".join(f"{mark:>10}" for mark in MARKS)]
    lines += [f"{row[0]:<12}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows(summary)]
    lines.append(_rates(summary))
    if ratios:
        lines.append("against the baseline (above 1 is better):")
        lines += [f"  {name:<22}{ratio:>8.2f}x" for name, ratio in ratios.items()]
    return "\n".join(lines)


def _rates(summary: Mapping[str, object]) -> str:
    slo = summary["slo"]
    attainment = slo["attainment"] if isinstance(slo, Mapping) else 0.0
    return (
        f"{summary['completed']} of {summary['requests']} requests, {summary['failed']} failed; "
        f"{summary['requests_per_s']:.3g} requests/s, {summary['output_tokens_per_s']:.4g} tokens/s, "
        f"SLO attainment {attainment:.1%}, goodput {summary['goodput_per_s']:.3g} requests/s"
    )


def write_csv(records: Iterable[RequestRecord], out: TextIO) -> None:
    """All records as CSV, the derived metrics last."""
    columns = (*CSV_FIELDS, *CSV_COUNTS, *METRICS)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(record, name) for name in columns] for record in records)
