"""The scheduler's overhead as Markdown, for SCHEDULING.md.

Invariant: every figure and where each ceiling holds come from the result file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import scheduling_tables
from figure_tables import listed, span, unique
from scheduling_tables import Cell

HEAD = ("running", "waiting", "phase", "stock", "ours", "ratio", "our own code", "5 % of an iteration")


def parts() -> dict[str, str]:
    """Each marked part of SCHEDULING.md by its name."""
    command = "python benchmarks/scheduler_overhead.py"
    return {"overhead": scheduling_tables.filled("scheduler_overhead", command, overhead)}


def overhead(result: Cell) -> Iterator[str]:
    """How it was measured, the cost per step of both schedulers, and where the ceilings hold."""
    yield from _measured(result)
    yield ""
    yield from scheduling_tables.table(HEAD, map(_costs, result["rows"]))
    yield ""
    grown = (
        f"{by['ours']:.2f} ({case}; stock {by['stock']:.2f})"
        for case, by in result["growth_exponent"].items()
    )
    yield f"- Time grows with the running requests to the power of {listed(grown)}."
    yield from _ceilings(result["rows"])
    yield ""
    yield "A burst to its end, microseconds of CPU per token:"
    yield ""
    yield from scheduling_tables.table(
        ("running", "at once", "stock", "ours", "ratio"), map(_burst, result["bursts"])
    )


def _burst(row: Cell) -> tuple[object, ...]:
    costs = (f"{row['stock_us']:.1f}", f"{row['ours_us']:.1f}", _range(row))
    return row["running"], row["running"] + row["waiting"], *costs


def _measured(result: Cell) -> Iterator[str]:
    machine, profile = result["machine"], result["profile"]
    rounds = listed(unique(len(row["rounds"]["ours"]) for row in result["rows"]))
    took = span([row["iteration_us"] / 1e3 for row in result["rows"]], 0, "")
    command, load = " ".join(result["command"]), f"load {machine['load_1min']:.0f}"
    yield f"`{command}`: microseconds of CPU per step, schedule plus update, medians of {rounds} rounds"
    yield f"in which both step in turns of a few steps, no model runs, on {machine['cores']} shared cores ({load})."
    yield f"Iterations of {took} ms, by the"
    yield f"profile measured with {profile['model']} ({profile['note']}):"


def _costs(row: Cell) -> tuple[object, ...]:
    phase = f"{row['phase']}, {row['slots']} slots" if row["slots"] else row["phase"]
    stock, ours, own, share = (
        f"{us:.0f}" for us in (row["stock_us"], row["ours_us"], row["own_us"], _share(row))
    )
    return row["running"], row["waiting"], phase, stock, ours, _range(row), own, share


def _range(row: Cell) -> str:
    return f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"


def _ceilings(rows: Sequence[Cell]) -> Iterator[str]:
    whole = _where(rows, lambda row: row["ours_us"] <= _share(row))
    stock = _where(rows, lambda row: row["stock_us"] <= _share(row))
    added = _where(rows, lambda row: row["ours_us"] - row["stock_us"] <= _share(row))
    yield f"- Within twice stock: {_where(rows, lambda row: row['ours_us'] <= 2 * row['stock_us'])}."
    yield f"- Within 5 % of an iteration, a whole step of ours: {whole}."
    yield f"- The same, a whole step of stock: {stock}."
    yield f"- The same, what ours adds to stock: {added}."


def _share(row: Cell) -> float:
    return 0.05 * float(row["iteration_us"])


def _where(rows: Sequence[Cell], within: Callable[[Cell], bool]) -> str:
    """Where it holds, by the shorter of the two lists."""
    inside, outside = [row for row in rows if within(row)], [row for row in rows if not within(row)]
    if not outside or not inside:
        return "everywhere" if inside else "nowhere"
    if len(inside) < len(outside):
        return f"only with {_places(inside)}"
    return f"everywhere but with {_places(outside)}"


def _places(rows: Sequence[Cell]) -> str:
    """The numbers running by what else tells the cases apart."""
    cases: dict[str, list[int]] = {}
    for row in rows:
        slots = f", {row['slots']} slots" if row["slots"] else ""
        cases.setdefault(f"{row['waiting']} waiting, {row['phase']}{slots}", []).append(row["running"])
    return "; ".join(f"{listed(running)} running ({case})" for case, running in cases.items())
