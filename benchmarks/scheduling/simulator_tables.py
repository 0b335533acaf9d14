"""Tables of the simulator beside vLLM's scheduler classes, and of the scheduler's overhead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, span

PAGE = "benchmarks/SCHEDULING.md"
Row = Mapping[str, Any]


def twins(result: Row) -> Iterator[Row]:
    """Yield for each scheduler the largest relative error of each of the simulator's counts over all traces."""
    systems: dict[str, list[Row]] = {}
    for name, found in result["errors"].items():
        systems.setdefault(name.partition(", ")[2], []).append(found)
    for name, rows in systems.items():
        yield {"name": name, **{count: _largest(row[count] for row in rows) for count in rows[0]}}


def _largest(errors: Iterable[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{max(known, key=abs):+.1%}" if known else "none on either side"


def overhead_conditions(result: Row) -> str:
    """Return how the overhead was measured."""
    rounds, cores = len(result["rows"][0]["rounds"]["ours"]), result["machine"]["cores"]
    took = span((row["iteration_us"] / 1e3 for row in result["rows"]), ".0f", "")
    return (
        f"Microseconds of CPU for one step (schedule and update), medians of {rounds} rounds on {cores} shared cores."
        f" Iterations of {took} ms, by the profile of {result['profile']['model']} ({result['profile']['note']})."
    )


def over_stock(row: Row) -> str:
    """Return the ratio to vLLM's scheduler with its range."""
    return f"{row['ratio']:.2f} ({span(row['ratios'], unit='')})"


def phase(row: Row) -> str:
    """Return the phase, with the slots of the model runner where they differ from the batch."""
    return f"{row['phase']}, {row['slots']} slots" if row["slots"] else str(row["phase"])


TWINS = Table(
    twins,
    {
        "scheduler": "{name}",
        "evictions": "{evictions}",
        "tokens computed again": "{recomputed_tokens}",
        "loaded per evicted block": "{loaded_per_evicted}",
        "mean running": "{mean_running}",
        "mean latency": "{latency_s}",
    },
)
OVERHEAD = Table(
    "rows",
    {
        "running": "{running}",
        "waiting": "{waiting}",
        "phase": phase,
        "stock": "{stock_us:.0f}",
        "ours": "{ours_us:.0f}",
        "ratio": over_stock,
        "our code": "{own_us:.0f}",
        "5 % of an iteration": lambda row: f"{row['iteration_us'] / 20:.0f}",
    },
)
TWIN_VERDICT = (
    "{identical_runs} of {runs} runs are identical in every count; "
    "largest error {worst_error:.1%}, limit {limit:.0%}."
)
PARTS = [
    Part(PAGE, "twin", "scheduler-twin", (TWINS, TWIN_VERDICT)),
    Part(PAGE, "overhead", "scheduler_overhead", (overhead_conditions, OVERHEAD)),
]
