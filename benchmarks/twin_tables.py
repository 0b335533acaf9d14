"""The simulated engine against vLLM's scheduler classes, and what simulating costs, as SCHEDULING.md has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scheduling_tables import filled, table

NAMES = {
    "evictions": "evictions",
    "recomputed_tokens": "tokens computed again",
    "loaded_per_evicted": "loaded per evicted block",
    "mean_running": "mean running",
    "latency_s": "mean latency",
}


def parts() -> dict[str, str]:
    """Each marked part of SCHEDULING.md by its name."""
    return {
        "twin": filled("scheduler-twin", "python benchmarks/scheduler_twin.py", twin),
        "counts": filled("scheduling-counts", "python benchmarks/calibration_counts.py", counts),
        "simulator-cost": filled("simulator-cost", "python benchmarks/simulator_cost.py", cost),
    }


def twin(result: Mapping[str, Any]) -> Iterator[str]:
    """Relative errors of the counts, one line per trace and system."""
    rows = ((name, *(_error(found[count]) for count in NAMES)) for name, found in result["errors"].items())
    yield from table(("trace, system", *NAMES.values()), rows)
    yield ""
    yield (
        f"- {result['identical_runs']} of {result['runs']} runs are identical in every count; the largest error is "
        f"{result['worst_error']:.1%}; within {result['limit']:.0%} everywhere: {'yes' if result['met'] else '**no**'}."
    )


def counts(result: Mapping[str, Any]) -> Iterator[str]:
    """Relative errors of the sums over repetitions, one line per trace, scheduler and load."""
    names = list(NAMES)[:4]
    found = result["errors"].items()
    yield from table(
        ("trace, scheduler, load", *(NAMES[name] for name in names)),
        ((key, *(_error(errors[name]) for name in names)) for key, errors in found),
    )
    yield ""
    for load in ("at once", "1.1"):
        each = [e for key, errors in found if key.endswith(load) for e in errors.values() if e is not None]
        near = sum(abs(e) <= result["limit"] for e in each)
        within = f"{near} of {len(each)} counts within {result['limit']:.0%}"
        yield f"- load {load}: {within}, the farthest {max(each, key=abs):+.1%}"


def cost(result: Mapping[str, Any]) -> Iterator[str]:
    """CPU seconds by policy and requests."""
    head = ("policy", "requests", "CPU seconds", "iterations", "microseconds an iteration")
    rows = result["rows"]
    yield from table(
        head,
        (
            (r["policy"], r["requests"], f"{r['cpu_s']:.1f}", r["iterations"], f"{r['us_per_iteration']:.0f}")
            for r in rows
        ),
    )


def _error(error: float | None) -> str:
    return "none on either side" if error is None else f"{error:+.1%}"
