"""Load over time of a replay: waiting requests, running requests, arrivals and tokens per second.

Equations, at the edges t_0 = 0 .. t_n of equal bins: waiting(t) = #(due <= t) - #(first token <= t); running(t) =
#(first token <= t) - #(finished <= t). A request's first token counts when it came, the others are spread evenly
until its end. So tokens until t are the sum over requests of rate * (min(t, finished) - first token). Requests that
failed before a token are omitted. Memory does not grow with the trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.lab.replay.store import RecordStore

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 600
COLUMNS = ("due_s", "first_token_s", "finished_s", "output_tokens")
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Load:
    """Load over time.

    The times `time_s` are the n + 1 edges of n bins. `waiting` and `running` have one value for each edge; the rates have one
    value for each bin, per second.
    """

    time_s: Array
    waiting: Array
    running: Array
    arrivals_per_s: Array
    tokens_per_s: Array


def load_over_time(records: RecordStore, duration_s: float, bins: int = BINS) -> Load | None:
    """Return the load over time; None if no request was answered or the duration is 0."""
    if duration_s <= 0 or not records.completed:
        return None
    return _load(records.frames(COLUMNS), np.linspace(0.0, duration_s, bins + 1))


def _load(frames: Iterable[DataFrame], edges: Array) -> Load:
    due, first, end = (np.zeros(len(edges)) for _ in range(3))
    begun, begun_at, over, over_at = (np.zeros(len(edges)) for _ in range(4))
    for frame in frames:
        known = frame.astype("float64").dropna(subset=["first_token_s"])
        last = known["finished_s"].fillna(np.inf).to_numpy()
        start, more = known["first_token_s"].to_numpy(), known["output_tokens"].to_numpy() - 1
        length = last - start
        spread = np.isfinite(length) & (length > 0)
        rate = np.divide(more, length, out=np.zeros_like(length), where=spread)
        _add(due, edges, known["due_s"].to_numpy(), 1.0)
        # Tokens that arrived all at once count at the time of the first.
        _add(first, edges, start, 1.0)
        _add(begun, edges, start, rate)
        _add(begun_at, edges, start, rate * start - np.where(spread, 0.0, more))
        _add(end, edges, last, 1.0)
        _add(over, edges, last, rate)
        _add(over_at, edges, last, rate * np.where(spread, last, 0.0))
    due, first, end, begun, begun_at, over, over_at = (
        np.cumsum(one) for one in (due, first, end, begun, begun_at, over, over_at)
    )
    tokens = first + edges * (begun - over) - (begun_at - over_at)
    width = edges[1] - edges[0]
    return Load(edges, due - first, first - end, np.diff(due) / width, np.diff(tokens) / width)


def _add(sums: Array, edges: Array, at: Array, what: Array | float) -> None:
    """Add each value at the first edge that is not before its time; values after the last edge are ignored."""
    where = np.searchsorted(edges, at, side="left")
    inside = where < len(edges)
    np.add.at(sums, where[inside], np.broadcast_to(what, at.shape)[inside])
