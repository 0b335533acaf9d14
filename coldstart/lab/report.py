"""Reports of `coldstart trace-replay`: the JSON, tables and plots of one replay or of a comparison.

A comparison has a row per system and rate: medians over the rounds, their range, and the paired ratio to the first system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.bench import stats
from coldstart.bench.report import Plot, Point, Report, Table, draw_lines
from coldstart.lab.records import METRICS, STATISTICS, Replay, SloLimits, summarize, tabulate

if TYPE_CHECKING:
    from pandas import DataFrame

QUANTILES = np.linspace(0.0, 1.0, 201)
COMPARISON_METRICS = {
    "ttft_mean_s": ("TTFT mean (s)", "ttft_s", "mean"),
    "ttft_p95_s": ("TTFT p95 (s)", "ttft_s", "p95"),
    "tpot_mean_s": ("TPOT (s)", "tpot_s", "mean"),
    "normalized_mean_s": ("per token (s)", "normalized_s", "mean"),
    "cold_share": ("waited for a start", "cold_share", None),
    "attainment": ("in SLO", "slo", "attainment"),
    "goodput_per_s": ("goodput (requests/s)", "goodput_per_s", None),
}
"""Metrics of a comparison: label, and the field and subfield of a replay's JSON."""
ATTAINMENT_GOAL = 0.95  # a rate meets the SLO if this share of requests does (FastServe, section 6.2)


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay: the system under test, the arrival rate in a sweep, the round, the requests and the summary."""

    name: str
    rate: float | None
    round: int
    frame: DataFrame
    document: Mapping[str, Any]

    @classmethod
    def from_replay(
        cls, name: str, rate: float | None, number: int, replay: Replay, limits: SloLimits
    ) -> ReplayRun:
        """Summarize a replay against the SLO `limits`, or against the replay's own SLO if `limits` is empty."""
        frame = tabulate(replay.records)
        causes = frame["error"].value_counts().head(5)
        document = {
            "ended": replay.end_reason,
            **summarize(frame, limits or replay.limits, replay.duration_s),
            **({"counts": replay.counts} if replay.counts else {}),
            "causes": [{"error": cause, "requests": int(count)} for cause, count in causes.items()],
        }
        for key, value in (("round", number), ("rate", rate), ("name", name)):
            frame.insert(0, key, value)
        return cls(name, rate, number, frame, document)


def report(kind: str, runs: Sequence[ReplayRun], rows: Mapping[str, Any], *, is_comparison: bool) -> Report:
    """Build the report of the last replay or, if `is_comparison` is set, of all replays. `rows` describes the trace's rows."""
    from pandas import concat

    frame, last = concat(run.frame for run in runs), runs[-1].document
    document: dict[str, Any] = {"schema_version": 1, "kind": kind}
    if not is_comparison:
        document |= {**last, "rows": rows}
        tables, notes, plots = tabulate_metrics(last), format_totals(last), list[Any]()
    else:
        compared, notes, plots = compare_runs(runs), [], []
        replays = [{"name": one.name, "rate": one.rate, "round": one.round, **one.document} for one in runs]
        document |= {"ended": last["ended"], "compared": compared, "replays": replays, "rows": rows}
        tables = [tabulate_comparison(compared)]
        if runs[0].rate is not None:
            document["highest_rate"] = best = find_highest_rates(compared)
            label = f"highest rate with {ATTAINMENT_GOAL:.0%} of the requests within the SLO"
            notes = [f"{name}: {label}: {rate or 'none'}, in requests/s" for name, rate in best.items()]
            plots = [*plot_rates(compared)]
        notes.append("medians over the rounds, with half of their range in percent")
        notes.append(f"x: ratio to {runs[0].name}; ?: its 95 % interval contains 1")
    plots += plot_distributions(frame)
    cells = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return Report(f"trace-replay, {kind}", document, cells, tables, notes, plots)


def compare_runs(runs: Sequence[ReplayRun]) -> list[dict[str, Any]]:
    """Return a row with all COMPARISON_METRICS for each system and rate. Only complete replays are compared."""
    systems: dict[tuple[str, float | None], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        if run.document["ended"] == "complete":
            systems.setdefault((run.name, run.rate), {})[run.round] = run.document
    rows = []
    for (name, rate), documents in systems.items():
        row: dict[str, Any] = {"name": name, "rate": rate, "rounds": len(documents)}
        both = documents, systems.get((runs[0].name, rate), {})
        for metric in COMPARISON_METRICS:
            samples, first = ({number: _get_metric(one, metric) for number, one in of.items()} for of in both)
            known = None not in samples.values()
            row[metric] = (
                {**stats.summarize([*samples.values()]), **_compute_ratio(samples, first)} if known else None
            )
        rows.append(row)
    return rows


def _get_metric(document: Mapping[str, Any], metric: str) -> Any:
    _, member, mark = COMPARISON_METRICS[metric]
    return document[member] and document[member][mark] if mark else document[member]


def _compute_ratio(samples: Mapping[int, float], first: Mapping[int, float]) -> dict[str, Any]:
    """Return the ratio of `samples` to `first` over common rounds, and its 95% interval if there are enough rounds."""
    known = all(value and value > 0 for value in (*samples.values(), *first.values()))
    found = stats.paired_ratio(samples, first) if known else None
    enough = len(samples.keys() & first.keys()) >= stats.MIN_SAMPLES
    return {"ratio": found and found[0], "ratio_ci95": found[1] if found and enough else None}


def find_highest_rates(compared: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the highest rate at which each system meets the SLO, or None for a system that never meets it."""
    best: dict[str, float | None] = dict.fromkeys(row["name"] for row in compared)
    for row in compared:
        if row["attainment"] and row["attainment"]["median"] >= ATTAINMENT_GOAL:
            best[row["name"]] = max(best[row["name"]] or 0.0, row["rate"])
    return best


def tabulate_comparison(compared: Sequence[Mapping[str, Any]]) -> Table:
    """Format a comparison as a table with each median, half its range in percent, and the ratio to the first system."""
    metrics = [metric for metric in COMPARISON_METRICS if any(row[metric] for row in compared)]
    rates = ["rate"] if any(row["rate"] is not None for row in compared) else []
    rows = [
        [
            row["name"],
            *(f"{row[name]:g}" for name in rates),
            *(_format_cell(name, row[name]) for name in metrics),
        ]
        for row in compared
    ]
    return ["name", *rates, *(COMPARISON_METRICS[metric][0] for metric in metrics)], rows


def _format_cell(metric: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    median, spread = found["median"], (found["max"] - found["min"]) / 2
    text = _format_value(metric, median)
    text += f" ±{spread / median:.0%}" if found["n"] > 1 and median else ""
    low, high = found["ratio_ci95"] or (0.0, 0.0)
    noise = "?" * (low <= 1 <= high != low)
    return text if found["ratio"] in (None, 1) else f"{text} {found['ratio']:.2f}x{noise}"


def tabulate_metrics(summary: Mapping[str, Any]) -> list[Table]:
    """Return a table of latencies in seconds and, if there are several models, a table with one row per model."""
    found = ((label, summary.get(name)) for name, label in METRICS.items())
    metrics = [[label, *(f"{marks[mark]:.4g}" for mark in STATISTICS)] for label, marks in found if marks]
    models = [
        [name, *(_format_value(metric, _get_metric(one, metric)) for metric in COMPARISON_METRICS)]
        for name, one in summary.get("models", {}).items()
    ]
    of_models = [(["model", *(label for label, *_ in COMPARISON_METRICS.values())], models)] if models else []
    return [(("seconds", *STATISTICS), metrics), *of_models]


def format_totals(summary: Mapping[str, Any]) -> list[str]:
    """Return a line with a replay's counts and rates, and one with a simulation's counts."""
    rates = {**summary, "SLO attainment": _get_metric(summary, "attainment")}
    plain = (
        {k: v for k, v in of.items() if isinstance(v, int | float | str)}
        for of in (rates, summary.get("counts", {}))
    )
    return [
        ", ".join(f"{k.replace('_', ' ')} {_format_value(k, v)}" for k, v in found.items())
        for found in plain
        if found
    ]


def _format_value(name: str, value: float | str | None) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.1%}" if name in ("attainment", "cold_share", "SLO attainment") else f"{value:.4g}"


def plot_rates(compared: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    """Yield a plot for each metric with its median by arrival rate, one line per system."""
    for metric, (label, *_) in COMPARISON_METRICS.items():
        series: dict[str, list[Point]] = {}
        for row in (row for row in compared if row[metric]):
            series.setdefault(row["name"], []).append((row["rate"], row[metric]["median"]))
        if series:
            yield label, draw_lines(series, "requests per second", label)


def plot_distributions(frame: DataFrame) -> Iterator[Plot]:
    """Yield a plot for each metric with its distribution over all rounds, one line per system."""
    for metric, label in METRICS.items():
        known = frame[frame["ok"] | (metric == "wait_s")].dropna(subset=[metric])
        if (known[metric] > 0).any():
            values = known.groupby("name", sort=False)[metric]
            series = {
                name: [*zip(of.quantile(QUANTILES), 100 * QUANTILES, strict=True)] for name, of in values
            }
            drawn = draw_lines(series, f"{label} (s)", "share of requests (%)", allow_log=True)
            yield f"Distribution: {label}", drawn
