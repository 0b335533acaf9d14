"""Tables of the calibration of the simulator and of the scheduler's overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.tables import Part, Table, listed, span, yes

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


def errors(result: Row) -> Iterator[Row]:
    """Yield the errors of the simulated means with iteration times corrected by the pace of the machine."""
    for cell in result["cells"]:
        for source in ("paced", "bundle-paced"):
            by_metric = cell["error"][source]
            single = {f"{metric}_single": cell["single"][source][metric] for metric in by_metric}
            live = {f"{metric}_live": 1e3 * value for metric, value in cell["live"].items()}
            yield {**cell, "source": source, **by_metric, **single, **live}


def error_verdicts(result: Row) -> str:
    """Return for each source of iteration times whether all errors keep to the limit."""
    kinds = {"means": "met", "medians of single runs": "met_by_median"}
    return "\n".join(
        f"- Within {result['limit']:.0%} everywhere, by {kind}: "
        f"{listed(f'{source} {yes(holds)}' for source, holds in result[key].items())}."
        for kind, key in kinds.items()
    )


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


def ceilings(result: Row) -> str:
    """Return where each limit on the overhead holds."""
    limits: dict[str, Callable[[Row], bool]] = {
        "Within twice stock": lambda row: row["ours_us"] <= 2 * row["stock_us"],
        "Within 5 % of an iteration, a whole step of ours": lambda row: row["ours_us"] <= _share(row),
        "The same, a whole step of stock": lambda row: row["stock_us"] <= _share(row),
        "The same, what ours adds to stock": lambda row: row["ours_us"] - row["stock_us"] <= _share(row),
    }
    return "\n".join(f"- {name}: {_where(result['rows'], holds)}." for name, holds in limits.items())


def _share(row: Row) -> float:
    return 0.05 * float(row["iteration_us"])


def _where(rows: Sequence[Row], holds: Callable[[Row], bool]) -> str:
    """Return the places where it holds, by the shorter of the two lists."""
    inside, outside = [row for row in rows if holds(row)], [row for row in rows if not holds(row)]
    if not outside or not inside:
        return "everywhere" if inside else "nowhere"
    few = len(inside) < len(outside)
    return f"only with {_places(inside)}" if few else f"everywhere but with {_places(outside)}"


def _places(rows: Sequence[Row]) -> str:
    cases: dict[str, list[int]] = {}
    for row in rows:
        cases.setdefault(f"{row['waiting']} waiting, {phase(row)}", []).append(row["running"])
    return "; ".join(f"{listed(running)} running ({case})" for case, running in cases.items())


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
ERRORS = Table(
    errors,
    {
        "trace": "{trace}",
        "policy": "{policy}",
        "iteration times": "{source}",
        "live TTFT (ms)": "{ttft_s_live:.1f}",
        "error of TTFT": "{ttft_s:.1%}",
        "single runs, TTFT": "{ttft_s_single[median]:+.1%}",
        "live TPOT (ms)": "{tpot_s_live:.2f}",
        "error of TPOT": "{tpot_s:.1%}",
        "single runs, TPOT": "{tpot_s_single[median]:+.1%}",
    },
)
COSTS = Table(
    "rows",
    {
        "policy": "{policy}",
        "requests": "{requests}",
        "CPU (s)": "{cpu_s:.1f}",
        "iterations": "{iterations}",
        "µs per iteration": "{us_per_iteration:.0f}",
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
        "5 % of an iteration": lambda row: f"{_share(row):.0f}",
    },
)
BURSTS = Table(
    "bursts",
    {
        "running": "{running}",
        "at once": lambda row: row["running"] + row["waiting"],
        "stock": "{stock_us:.1f}",
        "ours": "{ours_us:.1f}",
        "ratio": over_stock,
    },
)
BURST = "A burst until its end, microseconds of CPU per token:"
TWIN_VERDICT = (
    "{identical_runs} of {runs} runs are identical in every count; "
    "largest error {worst_error:.1%}, limit {limit:.0%}."
)
PARTS = [
    Part(PAGE, "twin", "scheduler-twin", (TWINS, TWIN_VERDICT)),
    Part(PAGE, "calibration", "scheduling-calibration", (ERRORS, error_verdicts), "scheduling/calibration"),
    Part(PAGE, "simulator-cost", "simulator-cost", (COSTS,)),
    Part(PAGE, "overhead", "scheduler_overhead", (overhead_conditions, OVERHEAD, ceilings, BURST, BURSTS)),
]
