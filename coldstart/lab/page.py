"""Plots of a replay on its page: load over time, and distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.bench.report import svg
from coldstart.bench.report.report import html_section
from coldstart.lab.records import METRICS

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 600
SHARES = np.linspace(0.0, 1.0, 201)
Series = dict[str, Any]


def plot(found: Mapping[str, Any], frame: DataFrame) -> Iterator[str]:
    """Yield the plots of the page of a live or simulated replay, as HTML."""
    loads = measure_load(frame, found["duration_s"])
    drawn = [svg.lines(series, "time (s)", unit, step=True) for unit, series in loads.items()]
    if drawn:
        yield html_section("Over time", "".join(drawn))
    known = {name: frame.loc[frame["ok"] | (name == "wait_s")].dropna(subset=[name]) for name in METRICS}
    drawn = [
        svg.lines({METRICS[name]: _quantiles(rows[name])}, f"{METRICS[name]} (s)", "share of requests (%)")
        for name, rows in known.items()
        if rows[name].gt(0).any()
    ]
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
