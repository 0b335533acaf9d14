"""Table of the scheduler's overhead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Part, Table, span

PAGE = "benchmarks/SCHEDULING.md"
Row = Mapping[str, Any]


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
PARTS = [
    Part(PAGE, "overhead", "scheduler_overhead", (overhead_conditions, OVERHEAD)),
]
