"""Reports of trace-replay: document, tables and plots of one replay, and the comparison of several.

A comparison has a row for each system and rate: medians over the rounds, their range, and the ratio to the first system, whose
interval pairs the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.bench.report import svg
from coldstart.bench.report.report import Report, Shown, flatten, html_section
from coldstart.bench.stats import MIN_SAMPLES, paired_ratio
from coldstart.bench.stats import summarize as summarize_samples
from coldstart.lab.records import MARKS, METRICS, Limits, Replay, summarize, tabulate

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 600
SHARES = np.linspace(0.0, 1.0, 201)
Series = dict[str, Any]
COLUMNS = (
    "number", "model", "target", "due_s", "sent_s", "first_token_s", "finished_s", "prompt_tokens", "wanted_tokens",
    "output_tokens", "cold", "error", "ttft_s", "tpot_s", "normalized_s", "latency_s",
)  # fmt: skip
"""Columns of the exported table."""
COMPARED = {
    "ttft_mean_s": ("TTFT mean (s)", "ttft_s", "mean"),
    "ttft_p95_s": ("TTFT p95 (s)", "ttft_s", "p95"),
    "tpot_mean_s": ("TPOT (s)", "tpot_s", "mean"),
    "normalized_mean_s": ("per token (s)", "normalized_s", "mean"),
    "attainment": ("in SLO", "slo", "attainment"),
    "goodput_per_s": ("goodput (requests/s)", "goodput_per_s", None),
}
"""Metrics of a comparison: label, and members of the document of a replay."""
MEETS = 0.95
"""Share of the requests within the SLO from which on a rate meets it (FastServe, section 6.2)."""


@dataclass(frozen=True, slots=True)
class Run:
    """One replay: the system that it ran on, its arrival rate if rates are swept, its round, and its result."""

    name: str
    rate: float | None
    round: int
    replay: Replay
    frame: DataFrame
    document: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, rate: float | None, number: int, replay: Replay, limits: Limits) -> Run:
        """Summarize a replay; without `limits` its own SLO is judged."""
        frame = tabulate(replay.records)
        causes = frame["error"].value_counts().head(_CAUSES)
        document = {
            "ended": replay.ended,
            **summarize(frame, limits or replay.limits, replay.duration_s),
            **({"counts": replay.counts} if replay.counts else {}),
            "causes": [{"error": cause, "requests": int(count)} for cause, count in causes.items()],
        }
        return cls(name, rate, number, replay, frame, document)


# Number of causes of failed requests in the result.
_CAUSES = 5


def report(kind: str, runs: Sequence[Run], rows: Mapping[str, Any], *, compares: bool) -> Report:
    """Return the report of one replay, or a comparison; `rows` describes the rows of the trace."""
    title, head = f"trace-replay, {kind}", {"schema_version": 1, "kind": kind}
    last = runs[-1]
    if not compares:
        return Report(
            title,
            {**head, **last.document, "rows": rows},
            COLUMNS,
            partial(list_records, last.frame),
            partial(list_tables, last.document),
            list_rates(last.document),
            partial(plot, last),
        )
    compared, is_sweep = compare(runs), last.rate is not None
    names = [*dict.fromkeys(run.name for run in runs)]
    best = find_highest_rates(compared) if is_sweep else {}
    document = {
        **head,
        "ended": last.document["ended"],
        "compared": compared,
        **({"highest_rate": best} if is_sweep else {}),
        "replays": [{"name": one.name, "rate": one.rate, "round": one.round, **one.document} for one in runs],
        "rows": rows,
    }
    flat = [dict(flatten(row)) for row in compared]
    columns = dict.fromkeys(name for row in flat for name in row)
    notes = [f"{name}: {_describe_rate(rate)}" for name, rate in best.items()]
    if any(row["rounds"] > 1 for row in compared):
        notes.append("medians over the rounds, with half of their range in percent")
    if len(names) > 1:
        notes.append(f"x: ratio to {names[0]}; ?: its 95 % interval contains 1")
    plots = partial(_plot_rates, compared) if is_sweep else partial(_plot_distributions, runs)
    return Report(
        title, document, columns, lambda: flat, lambda: [tabulate_comparison(compared)], notes, plots
    )


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each system at each rate, with each of COMPARED; of the complete replays alone."""

    def sample(name: str, rate: float | None, member: str, mark: str | None) -> dict[int, float]:
        of = (run for run in runs if (run.name, run.rate, run.replay.ended) == (name, rate, "complete"))
        found = {run.round: run.document[member] for run in of}
        return {
            number: value[mark] if mark else value for number, value in found.items() if value is not None
        }

    rows = []
    for name, rate in dict.fromkeys((run.name, run.rate) for run in runs):
        row: dict[str, Any] = {
            "name": name,
            "rate": rate,
            "rounds": len(sample(name, rate, "requests", None)),
        }
        for metric, (_, member, mark) in COMPARED.items():
            own, first = (sample(one, rate, member, mark) for one in (name, runs[0].name))
            row[metric] = {**summarize_samples([*own.values()]), **_ratio(own, first)} if own else None
        rows.append(row)
    return rows


def _ratio(own: Mapping[int, float], first: Mapping[int, float]) -> dict[str, Any]:
    """Return the ratio of medians of common rounds, with its 95 % interval if there are enough; None of zeros."""
    known = all(value > 0 for value in (*own.values(), *first.values()))
    found = paired_ratio(own, first) if known else None
    enough = len(own.keys() & first.keys()) >= MIN_SAMPLES
    return {"ratio": found and found[0], "ratio_ci95": found[1] if found and enough else None}


def find_highest_rates(compared: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the highest rate at which each system meets the SLO; None: at none."""
    best: dict[str, float | None] = {}
    for row in compared:
        meets = row["attainment"] and row["attainment"]["median"] >= MEETS
        best[row["name"]] = max(best.get(row["name"]) or 0.0, row["rate"]) if meets else best.get(row["name"])
    return best


def _describe_rate(best: float | None) -> str:
    found = "no rate" if best is None else f"at most {best:g} requests/s"
    return f"{found} with {MEETS:.0%} of the requests within the SLO"


def tabulate_comparison(compared: Sequence[Mapping[str, Any]]) -> Shown:
    """Return the table for people: each median, half of the range in percent, and the ratio to the first system."""
    metrics = [metric for metric in COMPARED if any(row[metric] for row in compared)]
    rates = ["rate"] if any(row["rate"] is not None for row in compared) else []
    rows = [
        [
            row["name"],
            *(f"{row[name]:g}" for name in rates),
            *(_cell(metric, row[metric]) for metric in metrics),
        ]
        for row in compared
    ]
    return ["name", *rates, *(COMPARED[metric][0] for metric in metrics)], rows


def _cell(metric: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    median, spread = found["median"], (found["max"] - found["min"]) / 2
    text = f"{median:.1%}" if metric == "attainment" else f"{median:.4g}"
    text += f" ±{spread / median:.0%}" if found["n"] > 1 and median else ""
    low, high = found["ratio_ci95"] or (inf, inf)
    is_noise = low <= 1 <= high and low < high
    return text if found["ratio"] in (None, 1) else f"{text} {found['ratio']:.2f}x{'?' * is_noise}"


def list_records(frame: DataFrame) -> list[dict[str, object]]:
    """Return the rows of the exported table; an unknown value is None."""
    cells = frame[[*COLUMNS]].astype(object)
    return [dict(row) for row in cells.where(cells.notna(), None).to_dict("records")]


MODEL_COLUMNS = ("model", "requests", "failed", "cold", "TTFT mean", "p90", "p99", "in SLO")


def list_tables(summary: Mapping[str, Any]) -> list[Shown]:
    """Return the metrics in seconds, and a row of MODEL_COLUMNS for each model if there are several."""
    found = ((label, summary.get(name)) for name, label in METRICS.items())
    metrics = [[label, *(f"{marks[mark]:.4g}" for mark in MARKS)] for label, marks in found if marks]
    models = []
    for name, one in summary.get("models", {}).items():
        ttft = [f"{(one['ttft_s'] or {}).get(mark, 0.0):.4g}" for mark in ("mean", "p90", "p99")]
        shares = (one["cold_share"], one["slo"] and one["slo"]["attainment"])
        cold, met = ("-" if share is None else f"{share:.1%}" for share in shares)
        models.append([name, str(one["requests"]), str(one["failed"]), cold, *ttft, met])
    tables: list[Shown] = [(("seconds", *MARKS), metrics)]
    return [*tables, (MODEL_COLUMNS, models)] if models else tables


def list_rates(summary: Mapping[str, Any]) -> list[str]:
    """Return lines with counts and rates, SLO attainment and goodput if an SLO was given, and counts of a simulation."""
    slo, cold = summary["slo"], summary["cold_share"]
    judged = f", SLO attainment {slo['attainment']:.1%}, goodput " if slo else ""
    judged += f"{summary['goodput_per_s']:.3g} requests/s" if slo else ""
    waited = "" if cold is None else f", {cold:.1%} waited for a start"
    rates = (
        f"{summary['completed']} of {summary['requests']} requests, {summary['failed']} failed{waited}; "
        f"{summary['requests_per_s']:.3g} requests/s, {summary['output_tokens_per_s']:.4g} tokens/s{judged}"
    )
    counts = {
        name.replace("_", " "): f"{value:.4g}" if isinstance(value, float) else value
        for name, value in summary.get("counts", {}).items()
    }
    return [rates, ", ".join(f"{name} {value}" for name, value in counts.items())] if counts else [rates]


def plot(run: Run) -> Iterator[str]:
    """Yield the plots of the page of one replay, as HTML."""
    loads = measure_load(run.frame, run.replay.duration_s)
    drawn = [svg.lines(series, "time (s)", unit, step=True) for unit, series in loads.items()]
    if drawn:
        yield html_section("Over time", "".join(drawn))
    yield from _plot_distributions([run])


def _plot_rates(compared: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a plot of each metric by rate, with a line for each system."""
    for metric, (label, *_) in COMPARED.items():
        lines: dict[str, list[svg.Point]] = {}
        for row in compared:
            if row[metric]:
                lines.setdefault(row["name"], []).append((row["rate"], row[metric]["median"]))
        if lines:
            yield html_section(label, svg.lines(lines, "requests per second", label), 3)


def _plot_distributions(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a plot of each metric with a line for each system, over all its rounds."""
    drawn = []
    for metric, label in METRICS.items():
        known: dict[str, list[float]] = {}
        for run in runs:
            rows = run.frame.loc[run.frame["ok"] | (metric == "wait_s")]
            known.setdefault(run.name, []).extend(rows[metric].dropna())
        if any(value > 0 for values in known.values() for value in values):
            lines = {name: _quantiles(values) for name, values in known.items()}
            drawn.append(svg.lines(lines, f"{label} (s)", "share of requests (%)"))
    if drawn:
        yield html_section("Distributions", "".join(drawn))


def measure_load(frame: DataFrame, duration_s: float) -> dict[str, Series]:
    """Return requests and arrivals over time, by unit; nothing if no request got a token."""
    known = frame.dropna(subset=["first_token_s"])
    if known.empty or duration_s <= 0:
        return {}
    edges = np.linspace(0.0, duration_s, BINS + 1)
    times = known["due_s"], known["first_token_s"], known["finished_s"].fillna(inf)
    due, begun, ended = (np.searchsorted(np.sort(values), edges, side="right") for values in times)
    return {
        "requests": {
            "waiting for a token": zip(edges, due - begun, strict=True),
            "being answered": zip(edges, begun - ended, strict=True),
        },
        "requests per second": {"arrivals": zip(edges[1:], np.diff(due) / edges[1], strict=True)},
    }


def _quantiles(values: Any) -> list[tuple[float, float]]:
    """Return points (value, percent of the requests up to it); none without values."""
    return list(zip(np.quantile(values, SHARES), 100 * SHARES, strict=True)) if len(values) else []
