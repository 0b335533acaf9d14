"""The live scheduling results and the calibration as Markdown, for SCHEDULING.md.

Invariant: every figure comes from a result file; what has not been measured is said to be so, with its command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from live.cells import BASELINE, BOUNDS, CONTROL, HONEST, MLFQ

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GAINS = ("per_token_s.mean", "per_token_s.p95", "ttft_s.mean", "longest_s.mean", "tokens_per_s")
PLACE = ("regime", "workload", "load")
LEVEL = 0.1
"""A median ratio within this of 1 counts as level."""

Cell = Mapping[str, Any]


def parts() -> dict[str, str]:
    """Each marked part of SCHEDULING.md by its name."""
    live = "python benchmarks/live_scheduling.py"
    regimes, swapping = "scheduling-live-regimes", "scheduling-live-swapping"
    return {
        "live-gain": filled(regimes, live, gains),
        "live-verdicts": filled(regimes, live, verdicts),
        "live-winners": filled(regimes, live, winners),
        "live-price": filled(regimes, live, prices),
        "live-swapping": filled(swapping, f"{live} --swapping", swaps),
        "bound": filled("starvation", "python benchmarks/starvation.py", bounds),
        "batch-choice": filled("batch-choice", "python benchmarks/batch_choice.py", batches),
        "calibration": filled("scheduling-calibration", "python benchmarks/calibration.py", calibration),
    }


def held(name: str) -> Any:
    """The result called `name`, None where there is none."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def filled(name: str, command: str, lines: Callable[[Any], Iterator[str]]) -> str:
    """What `lines` makes of the result called `name`."""
    result = held(name)
    return "\n".join(lines(result)) if result else f"Not measured yet: `{command}`."


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A Markdown table, line by line."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def gains(result: Cell) -> Iterator[str]:
    """Ours over both baselines, one line per regime, workload and load; load 1 and the answers below."""
    shown = ("mean per token", "p95", "TTFT", "longest 10 %", "throughput")
    rows = (
        (*_place(cell), base, *(with_range(against[name]) for name in GAINS))
        for cell in result["cells"]
        for base in cell["against"]
        for _, against in _measured(cell, base, (MLFQ,))
    )
    yield from table((*PLACE, "against", *shown), rows)
    yield ""
    yield f"Medians of {_runs(result)} repetitions (least to largest). {_same(result)}"
    yield f"Load 1: {_capacities(result)}."


def verdicts(result: Cell) -> Iterator[str]:
    """Every target with what was reached."""
    yield from table(
        (*PLACE, "against", "metric", "target", "median", "met"),
        (
            (
                *_place(one),
                one["against"],
                one["metric"],
                f"{one['target']:g}x",
                f"{one['median']:.2f}x",
                _met(one),
            )
            for one in result["verdicts"]
        ),
    )


def winners(result: Cell) -> Iterator[str]:
    """Who has the lower mean time per token against the largest batch, cell by cell."""
    found: dict[str, list[str]] = {"ours wins": [], "level": [], "the largest batch wins": []}
    for cell in result["cells"]:
        # Where the cap is the largest batch that pays, the baseline with the cap is that server.
        base = HONEST if HONEST in cell["schedulers"] else BASELINE
        ours = cell["against"].get(base, {}).get(MLFQ)
        if ours:
            ratio = ours["per_token_s.mean"]["median"]
            word = (
                "level" if abs(ratio - 1) <= LEVEL else "ours wins" if ratio > 1 else "the largest batch wins"
            )
            found[word].append(f"{cell['regime']} {cell['workload']} {cell['load']} ({ratio:.2f}x)")
    yield from (f"- {word}: {', '.join(places) or 'nowhere'}." for word, places in found.items())


def prices(result: Cell) -> Iterator[str]:
    """What single requests pay against FCFS with the same batch, unbounded and with the bound, and what is gained then."""
    paid = ("longest 10 %", "slowest request", "above 2x", "slowest of the longest", "mean per token")
    rows = (
        (*_place(cell), name, *_price(against))
        for cell in result["cells"]
        for name, against in _measured(cell, BASELINE, (CONTROL, MLFQ, *BOUNDS))
    )
    yield from table((*PLACE, "scheduler", *paid), rows)


def bounds(result: Cell) -> Iterator[str]:
    """Shares of the time in order of arrival, simulated: what is gained, and who is slower than they promise."""
    head = (
        "load",
        "share",
        "mean per token",
        "p95",
        "slowest request",
        "above 2x",
        "latest beyond 1/share, ms",
    )
    rows = (
        (
            one["load"],
            f"{share:g}",
            *(f"{one[name]:.2f}x" for name in ("mean", "p95", "slowest")),
            f"{one['above_2']} of {one['requests']}",
            f"{1e3 * one['late_s']:.0f}",
        )
        for one in result["rows"]
        if (share := result["settings"][one["way"]]["oldest_share"])
    )
    yield from table(head, rows)


def swaps(result: Cell) -> Iterator[str]:
    """The three strategies: gain, bytes, and the time spent waiting for them."""
    gained = ("mean per token against fcfs", "p95")
    moved = ("MB evicted", "MB loaded", "off the device at its turn", "loading")
    rows = (
        (
            cell["load"],
            name,
            *(with_range(against[each]) for each in GAINS[:2]),
            *_moved(cell["schedulers"][name]),
            _equal(cell, name),
        )
        for cell in result["cells"]
        for name, against in _measured(cell, BASELINE, cell["against"][BASELINE])
    )
    yield from table(("load", "strategy", *gained, *moved, "answers identical"), rows)


def batches(result: Cell) -> Iterator[str]:
    """The gain over FCFS with all slots by batch; that of the longest tenth in brackets."""
    names = list(result["rows"][0]["over_fcfs"])
    rows = (
        (
            one["pool"],
            one["load"],
            *(f"{one['over_fcfs'][b]:.2f}x ({one['longest_over_fcfs'][b]:.2f}x)" for b in names),
        )
        for one in result["rows"]
    )
    yield from table(("memory", "load", *(f"B = {name}" for name in names)), rows)


def calibration(result: Cell) -> Iterator[str]:
    """Live and simulated means, the error, and the range over single runs."""
    head = ("trace", "policy", "iteration times", "metric", "live ms", "simulated ms", "error", "single runs")
    yield from table(head, (row for one in result["cells"] for row in _errors(one)))
    yield ""
    for measure, name in (("by the means", "met"), ("by the median of single runs", "met_by_median")):
        met = ", ".join(f"{source} {'yes' if met else '**no**'}" for source, met in result[name].items())
        yield f"- Within {result['limit']:.0%} everywhere, {measure}: {met}."
    yield f"- Load {result['load']:g}."


def _errors(one: Cell) -> Iterator[tuple[str, ...]]:
    for source, errors in one["error"].items():
        for metric, error in errors.items():
            live, found = (f"{1e3 * by[metric]:.2f}" for by in (one["live"], one["simulated"][source]))
            single = one["single"][source][metric]
            spread = f"{single['median']:+.1%} ({single['min']:+.1%} to {single['max']:+.1%})"
            name = metric.removesuffix("_s").upper()
            yield one["trace"], one["policy"], source, name, live, found, f"{error:.1%}", spread


def _measured(cell: Cell, base: str, names: Iterable[str]) -> Iterator[tuple[str, Cell]]:
    """Those of `names` that were measured against `base`, each with its ratios."""
    others = cell["against"].get(base, {})
    yield from ((name, others[name]) for name in names if others.get(name))


def _place(cell: Cell) -> tuple[object, ...]:
    return tuple(cell[name] for name in PLACE)


def _met(verdict: Cell) -> str:
    return "yes" if verdict["met"] else "**no**"


def _price(against: Cell) -> tuple[str, ...]:
    slow = against["slowdown"]
    paid = f"{slow['max']:.2f}x", f"{slow['above_2']:.1%}", f"{slow['longest_max']:.2f}x"
    return with_range(against["longest_s.mean"]), *paid, with_range(against["per_token_s.mean"])


def _equal(cell: Cell, name: str) -> str:
    same = cell["identical"][name]
    return f"{same['identical']} of {same['compared']}"


def with_range(ratio: Mapping[str, float]) -> str:
    """A median ratio with its least and largest."""
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _runs(result: Cell) -> str:
    counts = {one["runs"] for cell in result["cells"] for one in cell["schedulers"].values()}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _same(result: Cell) -> str:
    pairs: Sequence[Mapping[str, int]] = [p for cell in result["cells"] for p in cell["identical"].values()]
    same, compared = (sum(pair[name] for pair in pairs) for name in ("identical", "compared"))
    return f"Answers identical to FCFS's, token by token: {same} of {compared}."


def _capacities(result: Cell) -> str:
    by_place: dict[str, list[float]] = {}
    for one in result["capacity"]:
        by_place.setdefault(f"{one['regime']} {one['workload']}", []).append(one["requests_per_s"])
    return ", ".join(f"{place} {_rates(found)} requests/s" for place, found in by_place.items())


def _rates(found: Sequence[float]) -> str:
    spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
    return f"{median(found):.1f}{spread}"


def _moved(one: Cell) -> tuple[str, ...]:
    moved = one.get("swapping")
    if not moved:
        return ("-",) * 4
    out, into = (moved[f"bytes_{way}"]["median"] / 1e6 for way in ("evicted", "loaded"))
    return f"{out:.1f}", f"{into:.1f}", share(moved["blocked_share"]), share(moved.get("loading_share"))


def share(taken: Mapping[str, float] | None) -> str:
    """A median share of latency in per cent."""
    return f"{taken['median']:.1%}" if taken else "not counted"
