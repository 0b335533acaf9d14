"""HTML page of a replay: tables, load over time, and the distribution of every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coldstart.bench.report import svg
from coldstart.bench.report.page import embed, items, section, table
from coldstart.bench.report.page import page as html
from coldstart.lab.replay.metrics import percentile
from coldstart.lab.replay.render import LABELS, MARKS, rates, rows
from coldstart.lab.replay.series import load_over_time
from coldstart.lab.replay.store import LAG, METRICS, RecordStore

POINTS = 200


def page(title: str, found: Mapping[str, Any], records: RecordStore) -> str:
    """Return the page of a replay with tables, time series and distributions."""
    parts = [
        items([rates(found)]),
        table(("seconds", *MARKS), rows(found)),
        _load(records, found["duration_s"]),
    ]
    values = {name: records.column(name) for name in (*METRICS, LAG)}
    drawn = [_distribution(name, known) for name, known in values.items() if known and known[-1] > 0]
    parts += [section("Distributions", "".join(drawn))] if drawn else []
    return html(title, *parts, embed("replay", found))


def _load(records: RecordStore, duration_s: float) -> str:
    load = load_over_time(records, duration_s)
    if load is None:
        return ""
    time, later = load.time_s, load.time_s[1:]
    states = {
        "waiting for a token": zip(time, load.waiting, strict=True),
        "being answered": zip(time, load.running, strict=True),
    }
    tokens = {"output tokens": zip(later, load.tokens_per_s, strict=True)}
    arrivals = {"arrivals": zip(later, load.arrivals_per_s, strict=True)}
    plots = {"requests": states, "tokens per second": tokens, "requests per second": arrivals}
    drawn = [svg.lines(series, "time (s)", unit, step=True) for unit, series in plots.items()]
    return section("Over time", "".join(drawn))


def _distribution(metric: str, ordered: Sequence[float]) -> str:
    label = LABELS.get(metric, LABELS["client_lag_s"])
    points = [(percentile(ordered, 100 * i / POINTS), 100 * i / POINTS) for i in range(POINTS + 1)]
    return svg.lines({label: points}, f"{label} (s)", "share of requests (%)")
