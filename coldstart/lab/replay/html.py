"""A replay as an HTML page: the tables, the load over time, and the distribution of every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coldstart.bench.report import plots
from coldstart.bench.report.page import embedded, items, plot, section, table
from coldstart.bench.report.page import page as html
from coldstart.lab.replay.metrics import percentile
from coldstart.lab.replay.render import LABELS, MARKS, rates, rows
from coldstart.lab.replay.series import load_over_time
from coldstart.lab.replay.store import LAG, METRICS, RecordStore

POINTS = 200

Runs = Mapping[str, RecordStore]


def page(title: str, summaries: Mapping[str, Mapping[str, Any]], runs: Runs) -> str:
    """Tables, time series and distributions of one or more named runs."""
    parts = [
        section(name, items([rates(found)]) + table(("seconds", *MARKS), rows(found)))
        for name, found in summaries.items()
    ]
    for name, records in runs.items():
        parts.append(_load(name, records, summaries[name]["duration_s"]))
    figures = "".join(_distribution(name, runs) for name in (*METRICS, LAG))
    parts.append(section("Distributions", figures) if figures else "")
    parts.append(f'<script type="application/json" id="replay">{embedded(dict(summaries))}</script>')
    return html(title, *parts)


def _load(name: str, records: RecordStore, duration_s: float) -> str:
    load = load_over_time(records, duration_s)
    if load is None:
        return ""
    requests = [
        plots.Series("waiting for a token", load.time_s, load.waiting),
        plots.Series("being answered", load.time_s, load.running),
    ]
    tokens = [plots.Series("output tokens", load.time_s[1:], load.tokens_per_s)]
    arrivals = [plots.Series("arrivals", load.time_s[1:], load.arrivals_per_s)]
    return section(
        f"Over time: {name}",
        plot(plots.over_time(requests, "requests"), "Queue and requests under way")
        + plot(plots.over_time(tokens, "tokens per second"), "Output tokens")
        + plot(plots.over_time(arrivals, "requests per second"), "Arrivals"),
    )


def _distribution(metric: str, runs: Runs) -> str:
    values = {name: _points(found) for name, records in runs.items() if (found := records.column(metric))}
    if not any(value > 0 for points in values.values() for value, _ in points):
        return ""
    label = LABELS.get(metric, LABELS["client_lag_s"])
    return plot(plots.distributions(values, label), label)


def _points(ordered: Sequence[float]) -> list[tuple[float, float]]:
    return [(percentile(ordered, 100 * i / POINTS), i / POINTS) for i in range(POINTS + 1)]
