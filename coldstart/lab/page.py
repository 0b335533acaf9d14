"""HTML pages of a replay: tables, load over time, and distributions."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.bench.report import svg
from coldstart.bench.report.page import embed, items, page, section, table
from coldstart.lab.host import HEADERS, HostReplay, list_rows, summary
from coldstart.lab.records import MARKS, METRICS, format_rates
from coldstart.lab.records import list_rows as list_metrics

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 600
SHARES = np.linspace(0.0, 1.0, 201)
MOST = 2000
"""Maximum number of points of a series; a longer series is sampled at equal steps."""
MOST_MODELS = 7
"""Number of models whose waits are drawn: those with the most requests."""
Series = dict[str, Any]


def render_replay(title: str, found: Mapping[str, Any], frame: DataFrame) -> str:
    """Return the page of a live replay or of one on the simulated server."""
    parts = [items([format_rates(found)]), table(("seconds", *MARKS), list_metrics(found))]
    plots = measure_load(frame, found["duration_s"])
    drawn = [svg.lines(series, "time (s)", unit, step=True) for unit, series in plots.items()]
    parts += [section("Over time", "".join(drawn))] if drawn else []
    known = {name: frame.loc[frame["ok"] | (name == "lag_s"), name].dropna() for name in METRICS}
    drawn = [
        svg.lines({METRICS[name]: _quantiles(values)}, f"{METRICS[name]} (s)", "share of requests (%)")
        for name, values in known.items()
        if values.gt(0).any()
    ]
    parts += [section("Distributions", "".join(drawn))] if drawn else []
    return page(title, *parts, embed("replay", found))


def measure_load(frame: DataFrame, duration_s: float) -> dict[str, Series]:
    """Return requests and rates over time, by unit; nothing if no request got a token.

    A request's first token counts when it came, and the others are spread evenly until its end.
    """
    known = frame.dropna(subset=["first_token_s"])
    if known.empty or duration_s <= 0:
        return {}
    edges = np.linspace(0.0, duration_s, BINS + 1)
    first, last = known["first_token_s"].to_numpy(), known["finished_s"].fillna(inf).to_numpy()
    due, begun, ended = (
        np.searchsorted(np.sort(values), edges, side="right")
        for values in (known["due_s"].to_numpy(), first, last)
    )
    length, more = last - first, known["output_tokens"].to_numpy() - 1
    # Tokens that arrived all at once count at the time of the first.
    rate = np.divide(more, length, out=np.zeros_like(length), where=length > 0)
    later = [
        float(
            (np.where(length > 0, rate * (np.clip(edge, first, last) - first), more * (first <= edge))).sum()
        )
        for edge in edges
    ]
    width = edges[1]
    return {
        "requests": {
            "waiting for a token": zip(edges, due - begun, strict=True),
            "being answered": zip(edges, begun - ended, strict=True),
        },
        "tokens per second": {"output tokens": zip(edges[1:], np.diff(begun + later) / width, strict=True)},
        "requests per second": {"arrivals": zip(edges[1:], np.diff(due) / width, strict=True)},
    }


def render_host(replay: HostReplay) -> str:
    """Return the page of a replay on the simulated host; requires a replay with its series."""
    found, requests = replay.document, replay.outcome.requests
    often = sorted(found["models"], key=lambda name: -found["models"][name]["requests"])[:MOST_MODELS]
    waits = {
        name: _quantiles(
            [one.waited_s for one in requests if one.waited_s < inf and name in ("all", one.model)]
        )
        for name in ("all", *often)
    }
    parts = [items(summary(found)), table(HEADERS, list_rows(found))]
    plots = _levels(replay) if replay.outcome.series else {}
    drawn = [svg.lines(series, "time (s)", unit, step=True) for unit, series in plots.items()]
    parts += [section("Over time", "".join(drawn))] if drawn else []
    if any(value > 0 for points in waits.values() for value, _ in points):
        parts.append(section("Wait for a model", svg.lines(waits, "wait (s)", "share of requests (%)")))
    return page(f"trace-replay on a host, policy {found['policy']}", *parts, embed("host", found))


def _levels(replay: HostReplay) -> dict[str, Series]:
    changes = replay.outcome.series or []
    # The replay ends with the last timer, long after the last change.
    last_s, *level = changes[-1]
    series = np.asarray([*changes, (min(replay.outcome.end_s, 1.05 * last_s), *level)])
    if len(series) > MOST:
        steps = np.linspace(series[0, 0], series[-1, 0], MOST)
        series = series[np.searchsorted(series[:, 0], steps, side="right") - 1]
        series[:, 0] = steps
    time, residents, used, held = series.T
    limit = np.full(len(time), replay.file.settings.memory / 2**30)
    return {
        "models": {"residents": zip(time, residents, strict=True)},
        "GiB": {"used": zip(time, used / 2**30, strict=True), "limit": zip(time, limit, strict=True)},
        "requests": {"waiting for a model": zip(time, held, strict=True)},
    }


def _quantiles(values: Any) -> list[tuple[float, float]]:
    """Return points (value, percent of the requests up to it); none without values."""
    return list(zip(np.quantile(values, SHARES), 100 * SHARES, strict=True)) if len(values) else []
