"""Reports of trace-replay: document, tables and plots of one replay, and the comparison of several.

A comparison has a row for each system and rate: medians over the rounds, their range, and the paired ratio to the first system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.bench import stats
from coldstart.bench.report import Plot, Point, Report, Shown, lines
from coldstart.lab.records import MARKS, METRICS, Limits, Replay, summarize, tabulate

if TYPE_CHECKING:
    from pandas import DataFrame

SHARES = np.linspace(0.0, 1.0, 201)
COMPARED = {
    "ttft_mean_s": ("TTFT mean (s)", "ttft_s", "mean"),
    "ttft_p95_s": ("TTFT p95 (s)", "ttft_s", "p95"),
    "tpot_mean_s": ("TPOT (s)", "tpot_s", "mean"),
    "normalized_mean_s": ("per token (s)", "normalized_s", "mean"),
    "cold_share": ("waited for a start", "cold_share", None),
    "attainment": ("in SLO", "slo", "attainment"),
    "goodput_per_s": ("goodput (requests/s)", "goodput_per_s", None),
}
"""Metrics of a comparison: label, and members of the document of a replay."""
MEETS = 0.95  # share of the requests within the SLO from which on a rate meets it (FastServe, section 6.2)


@dataclass(frozen=True, slots=True)
class Run:
    """One replay: the system that it ran on, its arrival rate if rates are swept, its round, its requests and its result."""

    name: str
    rate: float | None
    round: int
    frame: DataFrame
    document: Mapping[str, Any]

    @classmethod
    def from_replay(cls, name: str, rate: float | None, number: int, replay: Replay, limits: Limits) -> Run:
        """Summarize a replay; without `limits` its own SLO is judged."""
        frame = tabulate(replay.records)
        causes = frame["error"].value_counts().head(5)
        document = {
            "ended": replay.ended,
            **summarize(frame, limits or replay.limits, replay.duration_s),
            **({"counts": replay.counts} if replay.counts else {}),
            "causes": [{"error": cause, "requests": int(count)} for cause, count in causes.items()],
        }
        for key, value in (("round", number), ("rate", rate), ("name", name)):
            frame.insert(0, key, value)
        return cls(name, rate, number, frame, document)


def report(kind: str, runs: Sequence[Run], rows: Mapping[str, Any], *, compares: bool) -> Report:
    """Return the report of one replay, or a comparison; `rows` describes the rows of the trace."""
    from pandas import concat

    frame, last = concat(run.frame for run in runs), runs[-1].document
    document: dict[str, Any] = {"schema_version": 1, "kind": kind}
    if not compares:
        document |= {**last, "rows": rows}
        tables, notes, plots = list_tables(last), list_rates(last), list[Any]()
    else:
        compared, notes, plots = compare(runs), [], []
        replays = [{"name": one.name, "rate": one.rate, "round": one.round, **one.document} for one in runs]
        document |= {"ended": last["ended"], "compared": compared, "replays": replays, "rows": rows}
        tables = [tabulate_comparison(compared)]
        if runs[0].rate is not None:
            document["highest_rate"] = best = find_highest_rates(compared)
            label = f"highest rate with {MEETS:.0%} of the requests within the SLO"
            notes = [f"{name}: {label}: {rate or 'none'}, in requests/s" for name, rate in best.items()]
            plots = [*plot_rates(compared)]
        notes.append("medians over the rounds, with half of their range in percent")
        notes.append(f"x: ratio to {runs[0].name}; ?: its 95 % interval contains 1")
    plots += plot_distributions(frame)
    cells = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return Report(f"trace-replay, {kind}", document, cells, tables, notes, plots)


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each system at each rate, with each of COMPARED; of the complete replays alone."""
    systems: dict[tuple[str, float | None], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        if run.document["ended"] == "complete":
            systems.setdefault((run.name, run.rate), {})[run.round] = run.document
    rows = []
    for (name, rate), documents in systems.items():
        row: dict[str, Any] = {"name": name, "rate": rate, "rounds": len(documents)}
        both = documents, systems.get((runs[0].name, rate), {})
        for metric in COMPARED:
            own, first = ({number: _find(one, metric) for number, one in of.items()} for of in both)
            known = None not in own.values()
            row[metric] = {**stats.summarize([*own.values()]), **_ratio(own, first)} if known else None
        rows.append(row)
    return rows


def _find(document: Mapping[str, Any], metric: str) -> Any:
    _, member, mark = COMPARED[metric]
    return document[member] and document[member][mark] if mark else document[member]


def _ratio(own: Mapping[int, float], first: Mapping[int, float]) -> dict[str, Any]:
    """Return the ratio of medians of common rounds, with its 95 % interval if there are enough; None of zeros."""
    known = all(value and value > 0 for value in (*own.values(), *first.values()))
    found = stats.paired_ratio(own, first) if known else None
    enough = len(own.keys() & first.keys()) >= stats.MIN_SAMPLES
    return {"ratio": found and found[0], "ratio_ci95": found[1] if found and enough else None}


def find_highest_rates(compared: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the highest rate at which each system meets the SLO; None: at none."""
    best: dict[str, float | None] = dict.fromkeys(row["name"] for row in compared)
    for row in compared:
        if row["attainment"] and row["attainment"]["median"] >= MEETS:
            best[row["name"]] = max(best[row["name"]] or 0.0, row["rate"])
    return best


def tabulate_comparison(compared: Sequence[Mapping[str, Any]]) -> Shown:
    """Return the table for people: each median, half of the range in percent, and the ratio to the first system."""
    metrics = [metric for metric in COMPARED if any(row[metric] for row in compared)]
    rates = ["rate"] if any(row["rate"] is not None for row in compared) else []
    rows = [
        [row["name"], *(f"{row[name]:g}" for name in rates), *(_cell(name, row[name]) for name in metrics)]
        for row in compared
    ]
    return ["name", *rates, *(COMPARED[metric][0] for metric in metrics)], rows


def _cell(metric: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    median, spread = found["median"], (found["max"] - found["min"]) / 2
    text = _format(metric, median)
    text += f" ±{spread / median:.0%}" if found["n"] > 1 and median else ""
    low, high = found["ratio_ci95"] or (0.0, 0.0)
    noise = "?" * (low <= 1 <= high != low)
    return text if found["ratio"] in (None, 1) else f"{text} {found['ratio']:.2f}x{noise}"


def list_tables(summary: Mapping[str, Any]) -> list[Shown]:
    """Return the metrics in seconds, and a row for each model if there are several."""
    found = ((label, summary.get(name)) for name, label in METRICS.items())
    metrics = [[label, *(f"{marks[mark]:.4g}" for mark in MARKS)] for label, marks in found if marks]
    models = [
        [name, *(_format(metric, _find(one, metric)) for metric in COMPARED)]
        for name, one in summary.get("models", {}).items()
    ]
    of_models = [(["model", *(label for label, *_ in COMPARED.values())], models)] if models else []
    return [(("seconds", *MARKS), metrics), *of_models]


def list_rates(summary: Mapping[str, Any]) -> list[str]:
    """Return a line with the counts and rates of a replay, and one with those of a simulation."""
    rates = {**summary, "SLO attainment": _find(summary, "attainment")}
    plain = (
        {k: v for k, v in of.items() if isinstance(v, int | float | str)}
        for of in (rates, summary.get("counts", {}))
    )
    return [
        ", ".join(f"{k.replace('_', ' ')} {_format(k, v)}" for k, v in found.items())
        for found in plain
        if found
    ]


def _format(name: str, value: float | str | None) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.1%}" if name in ("attainment", "cold_share", "SLO attainment") else f"{value:.4g}"


def plot_rates(compared: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    """Yield a plot of each metric by rate, with a line for each system."""
    for metric, (label, *_) in COMPARED.items():
        series: dict[str, list[Point]] = {}
        for row in (row for row in compared if row[metric]):
            series.setdefault(row["name"], []).append((row["rate"], row[metric]["median"]))
        if series:
            yield label, lines(series, "requests per second", label)


def plot_distributions(frame: DataFrame) -> Iterator[Plot]:
    """Yield a plot of each metric with a line for each system, over all its rounds."""
    for metric, label in METRICS.items():
        known = frame[frame["ok"] | (metric == "wait_s")].dropna(subset=[metric])
        if (known[metric] > 0).any():
            values = known.groupby("name", sort=False)[metric]
            series = {name: [*zip(of.quantile(SHARES), 100 * SHARES, strict=True)] for name, of in values}
            drawn = lines(series, f"{label} (s)", "share of requests (%)", wide=True)
            yield f"Distribution: {label}", drawn
