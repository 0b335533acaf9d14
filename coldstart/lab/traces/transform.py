"""Transformations of traces: speed-up, duration, limit, token caps and mapping of rows to models, all streaming.

Invariant: only `limit` and `duration` change order and count of rows, by cutting the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, count, islice, takewhile
from random import Random

from coldstart.lab.traces.request import TraceError, TraceRequest

MODEL_MAPPINGS = ("round-robin", "zipf", "column")


def sort_by_arrival(rows: Iterable[TraceRequest], window: int = 4096) -> Iterator[TraceRequest]:
    """Sort by arrival within a sliding window: traces are nearly sorted, some of them by completion."""
    heap: list[tuple[float, int, TraceRequest]] = []
    for number, row in enumerate(rows):
        heappush(heap, (row.arrival_s, number, row))
        if len(heap) > window:
            yield heappop(heap)[2]
    while heap:
        yield heappop(heap)[2]


def speed_up(rows: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Divide every arrival time by `factor`."""
    if factor <= 0:
        raise TraceError(
            f"the speed-up must be above zero, got {factor}",
            hint="write --speedup 1, or another factor above 0",
        )
    return (replace(row, arrival_s=row.arrival_s / factor) for row in rows)


def cut(rows: Iterable[TraceRequest], duration_s: float | None, limit: int | None) -> Iterator[TraceRequest]:
    """Stop after `duration_s` seconds of trace time or `limit` rows, whichever comes first."""
    kept: Iterable[TraceRequest] = rows
    if duration_s is not None:
        kept = takewhile(lambda row: row.arrival_s <= duration_s, kept)
    return islice(kept, limit)


def cap_tokens(
    rows: Iterable[TraceRequest], prompt: int | None, output: int | None
) -> Iterator[TraceRequest]:
    """Limit lengths to the context of a small model."""
    for row in rows:
        longest = min(row.prompt_tokens, prompt or row.prompt_tokens)
        yield replace(
            row, prompt_tokens=longest, output_tokens=min(row.output_tokens, output or row.output_tokens)
        )


def map_models(
    rows: Iterable[TraceRequest], models: Sequence[str], mapping: str, seed: int, zipf_s: float = 1.0
) -> Iterator[TraceRequest]:
    """Assign one of `models` to each row: in turn, by a Zipf law (rank^-s), or by the values of the model column.

    'column' assigns the trace's names to `models` in order of appearance, and starts over after the last model.
    """
    if not models:
        return iter(rows)
    if mapping not in MODEL_MAPPINGS:
        raise TraceError(
            f"unknown model mapping {mapping!r}", hint=f"use one of: {', '.join(MODEL_MAPPINGS)}"
        )
    if mapping == "column":
        return _by_column(rows, models)
    return (
        replace(row, model=model)
        for row, model in zip(rows, _chosen(models, mapping, seed, zipf_s), strict=False)
    )


def _chosen(models: Sequence[str], mapping: str, seed: int, zipf_s: float) -> Iterator[str]:
    if mapping == "round-robin":
        yield from (models[i % len(models)] for i in count())
    weights = list(accumulate(rank**-zipf_s for rank in range(1, len(models) + 1)))
    random = Random(seed)
    while True:
        yield random.choices(models, cum_weights=weights)[0]


def _by_column(rows: Iterable[TraceRequest], models: Sequence[str]) -> Iterator[TraceRequest]:
    assigned: dict[str | None, str] = {}
    for row in rows:
        model = assigned.setdefault(row.model, models[len(assigned) % len(models)])
        yield replace(row, model=model)
