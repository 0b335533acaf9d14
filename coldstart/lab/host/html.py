"""HTML page of a replay on the simulated host: tables, residents and waiting requests over time, distribution of waits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from coldstart.bench.report import svg
from coldstart.bench.report.page import embed, items, page, section, table
from coldstart.lab.host.replay import HostReplay, rows, summary
from coldstart.lab.host.simulate import HostOutcome, Served

HEADERS = ("model", "requests", "hits", "wait mean (s)", "p90", "max")
MOST = 2000
"""Maximum number of points of a series; a longer series is sampled at equal steps."""

POINTS = 200
MOST_MODELS = 7
"""Number of models whose waits are drawn: those with the most requests."""


def render(replay: HostReplay) -> str:
    """Return the complete page; requires a replay with its series."""
    found, requests = replay.document, replay.outcome.requests
    often = sorted(found["models"], key=lambda name: -found["models"][name]["requests"])[:MOST_MODELS]
    waits = {"all": _waits(requests)} | {
        name: _waits([one for one in requests if one.model == name]) for name in often
    }
    waits = {name: points for name, points in waits.items() if points}
    parts = [
        items(summary(found)),
        table(HEADERS, rows(found)),
        _over_time(replay.outcome, replay.file.settings.memory),
    ]
    if any(value > 0 for points in waits.values() for value, _ in points):
        parts.append(section("Wait for a model", svg.lines(waits, "wait (s)", "share of requests (%)")))
    return page(f"trace-replay on a host, policy {found['policy']}", *parts, embed("host", found))


def _over_time(outcome: HostOutcome, memory: int) -> str:
    if not outcome.series:
        return ""
    # The replay ends with the last timer, long after the last change.
    last_s, *level = outcome.series[-1]
    end_s = min(outcome.end_s, 1.05 * last_s)
    series = np.asarray([*outcome.series, (end_s, *level)])
    if len(series) > MOST:
        steps = np.linspace(series[0, 0], series[-1, 0], MOST)
        series = series[np.searchsorted(series[:, 0], steps, side="right") - 1]
        series[:, 0] = steps
    time, residents, used, held = series.T
    plots = {
        "models": {"residents": residents},
        "GiB": {"used": used / 2**30, "limit": np.full(len(time), memory / 2**30)},
        "requests": {"waiting for a model": held},
    }
    drawn = [
        svg.lines(
            {name: zip(time, values, strict=True) for name, values in lines.items()},
            "time (s)",
            unit,
            step=True,
        )
        for unit, lines in plots.items()
    ]
    return section("Over time", "".join(drawn))


def _waits(served: Sequence[Served]) -> list[tuple[float, float]]:
    waited = [one.waited_s for one in served if one.waited_s < inf]
    shares = np.linspace(0.0, 1.0, POINTS + 1)
    return list(zip(np.quantile(waited, shares), 100 * shares, strict=True)) if waited else []
