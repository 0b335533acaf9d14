"""The requests of one run, scaled to a small model on one core: drawn lengths, or those of the Azure trace.

Load 1 is the measured rate that the first-come-first-served server with the batch cap sustains; a run at load x
contains some seconds of its work. Above load 1 the queue grows during the run, so that the length is part of the
workload. `burst` is half that rate with a third of all requests arriving at one instant. A trace retains its arrival
times with a scaled clock and contains bursts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from random import Random

from benchmarks.traces import azure_conversation
from coldstart.lab.plan import rearrive
from coldstart.lab.traces import TraceRequest

SECONDS = {"0.7": 3.0, "0.9": 3.5, "1.1": 10.0, "burst": 3.0}
"""Of work at load 1, where lengths are drawn; a trace has TRACE_SECONDS at every load."""

TRACE_SECONDS = 4.0
FEWEST, LONGEST_PROMPT, LONGEST_OUTPUT = 60, 256, 320
PROMPT_SHARE, OUTPUT_SHARE = 24, 8
"""The Azure trace's lengths are divided by these."""

LOADS = ("0.7", "0.9", "1.1", "burst")
WORKLOADS = ("skewed", "azure")


def lengths(workload: str, count: int, seed: int) -> list[TraceRequest]:
    """`count` requests; of a trace consecutive rows with their own arrival times, at a place that the seed chooses."""
    return _azure(count, seed) if workload == "azure" else _drawn(count, seed)


def request_count(workload: str, load: str, capacity: float, share: float = 1.0) -> int:
    """Return the number of requests of a run; `capacity` in requests/s is load 1, `share` shortens the run."""
    seconds = share * (TRACE_SECONDS if workload == "azure" else SECONDS[load])
    return max(FEWEST, round(seconds * capacity))


def arriving(workload: str, load: str, capacity: float, seed: int, count: int) -> list[TraceRequest]:
    """The requests of one run, so many."""
    rows = lengths(workload, count, seed)
    if load == "burst":
        return _burst(rows, capacity, seed)
    rate = float(load) * capacity
    return _at_rate(rows, rate) if workload == "azure" else list(rearrive(rows, rate, 1.0, seed))


def _drawn(count: int, seed: int) -> list[TraceRequest]:
    """Log-normal prompts; `skewed` outputs are so too (sigma 1.6, coefficient of variation about 1.7)."""
    random = Random(f"lengths {seed}")

    def draw(median: float, sigma: float, longest: int) -> int:
        return max(1, min(longest, round(random.lognormvariate(log(median), sigma))))

    return [
        TraceRequest(0.0, draw(24, 0.8, LONGEST_PROMPT), draw(8, 1.6, LONGEST_OUTPUT)) for _ in range(count)
    ]


def _azure(count: int, seed: int) -> list[TraceRequest]:
    rows = azure_conversation()
    first = Random(f"rows {seed}").randrange(len(rows) - count)
    chosen = rows[first : first + count]
    return [
        replace(
            row,
            arrival_s=row.arrival_s - chosen[0].arrival_s,
            prompt_tokens=max(1, min(LONGEST_PROMPT, row.prompt_tokens // PROMPT_SHARE)),
            output_tokens=max(1, min(LONGEST_OUTPUT, row.output_tokens // OUTPUT_SHARE)),
        )
        for row in chosen
    ]


def _at_rate(rows: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The trace's own arrivals, the clock scaled so that their mean rate is `rate`."""
    factor = len(rows) / rate / max(rows[-1].arrival_s, 1e-9)
    return [replace(row, arrival_s=row.arrival_s * factor) for row in rows]


def _burst(rows: Sequence[TraceRequest], capacity: float, seed: int) -> list[TraceRequest]:
    third = len(rows) // 3
    spread = list(rearrive(rows[third:], capacity / 2, 1.0, seed))
    at_s = spread[len(spread) // 4].arrival_s
    together = [replace(row, arrival_s=at_s) for row in rows[:third]]
    return sorted([*spread, *together], key=lambda row: row.arrival_s)
