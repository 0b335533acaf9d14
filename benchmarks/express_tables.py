"""The express lane's grid and what learning costs, as SCHEDULING.md has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from scheduling_tables import filled, held, table, with_range

LIVE = "python benchmarks/live_scheduling.py --express"
SIMULATED = "python benchmarks/live_simulated.py"
PROPERTIES = "python benchmarks/scheduler_properties.py --scheduler express"
BASELINE, CONTROL = "fcfs", "fcfs-again"
AGAINST = {
    "express": BASELINE,
    CONTROL: BASELINE,
    "express-max": "fcfs-max",
    "express-plain": "fcfs-max",
    "fcfs-host": "fcfs-max",
}
WORK = ("iterations", "cpu_per_iteration")
MEASURED = ("per_token_s.mean", "per_token_s.p95", "ttft_s.mean", "longest_s.mean", "tokens_per_s")
NAMES = ("mean", "p95", "ttft", "longest", "throughput")
LEAST_LIVE, WORST_LIVE = 0.95, 2.0


def parts() -> dict[str, str]:
    """Each marked part of SCHEDULING.md by its name."""
    grid = "python benchmarks/express_grid.py --traces FOLDER"
    return {
        "express-grid": filled("express-grid", grid, cells),
        "express-bars": filled("express-grid", grid, bars),
        "express-live": filled("scheduling-live-express", LIVE, live),
        "express-long": filled("scheduling-live-express-long", f"{LIVE} --length 2.8", compared),
        "express-simulated": filled("scheduling-live-simulated", SIMULATED, simulated),
        "express-batch": filled("scheduling-live-express-batch", f"{LIVE} --regime batch-bound", live),
        "express-batch-simulated": filled(
            "scheduling-live-simulated-batch", f"{SIMULATED} --part batch", near
        ),
        "express-margin-2-simulated": filled("scheduling-live-simulated-margin-2", SIMULATED, near),
        "express-margin-2": filled("scheduling-live-express-margin-2", LIVE, bars_alone),
        "express-overhead": filled("express-overhead", "python benchmarks/express_overhead.py", overhead),
        "express-properties": filled("express-properties", PROPERTIES, properties),
        "parallel-properties": "\n".join(on_ranks()),
        "express-cost": filled("express-cost", "python benchmarks/express_cost.py", costs),
    }


def cells(result: Mapping[str, Any]) -> Iterator[str]:
    """Medians over the loads of each workload and regime that were run, by system."""
    head = ("workload", "memory", "loads", "seeds", "scheduler", *NAMES, "worst of the longest")
    places = dict.fromkeys((row["workload"], row["regime"]) for row in result["rows"])
    yield from table(head, (line for place in sorted(places) for line in _lines(place, result["rows"])))
    yield ""
    yield (
        f"Simulated, {result['requests']} requests a run (the drift 1,500), price {result['price']:g}, "
        f"{len(result['rows'])} cells; "
        "ratios over vLLM's scheduler as it is with the largest batch, medians over seeds, then over loads. "
        "The time ended the run: cells that it did not come to are "
        "missing, and a bar on one seed is to be read beside the control."
    )


def _lines(place: tuple[str, str], rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    mine = [row for row in rows if (row["workload"], row["regime"]) == place]
    loads, seeds = ", ".join(row["load"] for row in mine), sorted({row["seeds"] for row in mine})
    for name in dict.fromkeys(name for row in mine for name in row["over_fcfs"]):
        found = [row["over_fcfs"][name] for row in mine if name in row["over_fcfs"]]
        ratios = (f"{median(one[metric] for one in found):.2f}x" for metric in NAMES)
        worst = f"{max(one['worst'] for one in found):.2f}x"
        yield (
            *place,
            loads,
            " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))),
            name,
            *ratios,
            worst,
        )


def bars(result: Mapping[str, Any]) -> Iterator[str]:
    """Each bar with what was reached, and every cell that misses one."""
    for name, found in result["bars"].items():
        if not found["cells"]:
            continue
        share = found["share_above_wanted"]
        yield (
            f"- Against first come, first served {name}: {share:.1%} of {found['cells']} cells at 0.97 or above "
            f"(wanted 98 %), the least {found['least']:.2f}x (wanted 0.93x), "
            f"least throughput {found['least_throughput']:.3f}x (wanted 0.98x), "
            f"worst request of a longest tenth {found['worst_of_longest']:.2f}x slower (wanted 2x)."
        )
        for word, key in (("below 0.97", "below_wanted"), ("throughput", "throughput_missed")):
            yield from (f"  - {word}: {missed}" for missed in found[key])
        yield from (f"  - worst request: {missed}" for missed in found["worst_missed"])
    control = result["control"]
    if control["cells"]:
        yield (
            f"- The control, the same scheduler and every request up to one iteration later: "
            f"{control['share_above_wanted']:.1%} of {control['cells']} cells at 0.97 or above, "
            f"the least {control['least']:.2f}x."
        )
    for one in result["heavy"]:
        yield (
            f"- {one['workload']}, {one['regime']}, load 1.1: mean {one['mean']:.2f}x "
            f"(wanted {one['bar']:g}x: {_met(one['met'])}); "
            f"with a hint {one['hinted']:.2f}x at longest {one['longest']:.2f}x "
            f"(wanted 4x at 0.98x: {_met(one['hint_met'])})."
        )


def costs(result: Mapping[str, Any]) -> Iterator[str]:
    """Learning by requests served, a choice by who waits."""
    head = (
        "classes and hints",
        "requests served",
        "CPU seconds",
        "microseconds each",
        "memory held, KiB",
    )
    rows = result["rows"]
    yield from table(
        head,
        (
            (
                "yes" if r["classes"] else "no",
                r["requests"],
                f"{r['cpu_s']:.1f}",
                f"{r['us_each']:.0f}",
                f"{r['kib']:.0f}",
            )
            for r in rows
        ),
    )
    yield ""
    choices = ", ".join(f"{one['us']:.0f} with {one['waiting']}" for one in result["choices"])
    yield f"Microseconds a choice, by who waits: {choices}."


def _met(met: bool) -> str:
    return "yes" if met else "**no**"


def live(result: Mapping[str, Any]) -> Iterator[str]:
    """Every cell, and all of each scheduler together."""
    yield from compared(result)
    yield ""
    yield from live_bars(result["cells"])


def bars_alone(result: Mapping[str, Any]) -> Iterator[str]:
    """All cells of each scheduler together."""
    yield from live_bars(result["cells"])


def compared(result: Mapping[str, Any]) -> Iterator[str]:
    """The express lane and the control over FCFS with the same batch, and with the largest, on a real server."""
    place = ("regime", "workload", "load")
    head = (*place, "scheduler", "against", "mean per token", "p95", "TTFT", "longest 10 %", "throughput")
    rows = (
        (
            *(cell[name] for name in place),
            name,
            base,
            *(with_range(cell["against"][base][name][metric]) for metric in MEASURED),
            f"{cell['against'][base][name]['slowdown']['longest_max']:.2f}x",
            f"{cell['identical'][name]['identical']} of {cell['identical'][name]['compared']}",
        )
        for cell in result["cells"]
        for name, base in AGAINST.items()
        if cell["against"].get(base, {}).get(name)
    )
    yield from table((*head, "worst of the longest", "answers identical"), rows)
    yield from worked(result["cells"])


def worked(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the engines did over what the baseline's did, where that was counted."""
    for name, base in AGAINST.items():
        mine = [found for cell in cells if (found := cell["against"].get(base, {}).get(name))]
        if mine and all("iterations" in one for one in mine):
            iterations, each = ([one[word]["median"] for one in mine] for word in WORK)
            runs = [one[WORK[1]][end] for one in mine for end in ("min", "max")]
            yield ""
            yield (
                f"`{name}`: {min(iterations):.3f}x to {max(iterations):.3f}x the iterations of `{base}`, each of "
                f"{min(each):.3f}x to {max(each):.3f}x the engine's CPU; in single repetitions "
                f"{min(runs):.2f}x to {max(runs):.2f}x."
            )


def live_bars(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Over all cells of each scheduler: medians, how many of them miss the bar, and the slowest request."""
    for name, base in AGAINST.items():
        mine = [found for cell in cells if (found := cell["against"].get(base, {}).get(name))]
        if not mine:
            continue
        medians = {
            word: [one[metric]["median"] for one in mine]
            for word, metric in zip(NAMES, MEASURED, strict=True)
        }
        below = ", ".join(
            f"{word} {sum(ratio < LEAST_LIVE for ratio in medians[word])}{_beyond(cells, name, metric)}"
            for word, metric in zip(NAMES[:-1], MEASURED, strict=False)
        )
        mean, longest = medians["mean"], medians["longest"]
        slow = [one["slowdown"]["longest_max"] for one in mine]
        yield (
            f"- `{name}` over `{base}`, {len(mine)} cells: mean per token {min(mean):.2f}x to {max(mean):.2f}x, "
            f"{median(mean):.2f}x at the median; longest tenth {min(longest):.2f}x to {max(longest):.2f}x; medians below "
            f"{LEAST_LIVE}x (of those, below every run of the control): {below}; a request of the longest tenth slower than "
            f"{WORST_LIVE:g}x in "
            f"{sum(s > WORST_LIVE for s in slow)}, {max(slow):.2f}x at worst."
        )


def _beyond(cells: Sequence[Mapping[str, Any]], name: str, metric: str) -> str:
    """In brackets, how many of the medians below the bar are below every run of the control too: no chance of the machine's."""
    pairs = [
        (mine[metric], cell["against"][BASELINE][CONTROL][metric])
        for cell in cells
        if (mine := cell["against"].get(AGAINST[name], {}).get(name))
        and CONTROL in cell["against"].get(BASELINE, {})
    ]
    missed = [ours["median"] < control["min"] for ours, control in pairs if ours["median"] < LEAST_LIVE]
    return f" ({sum(missed)})" if missed and name != CONTROL else ""


def simulated(result: Mapping[str, Any]) -> Iterator[str]:
    """The live ratio beside the one that the simulator has for the same requests."""
    shown = [one for one in result["cells"] if AGAINST.get(one["scheduler"]) == one["against"]]
    place = ("regime", "workload", "load", "scheduler", "against")
    rows = (
        (
            *(one[name] for name in place),
            *(with_range(one[name]) for name in ("live", "simulated")),
            f"{one['quotient']:.2f}",
        )
        for one in shown
    )
    yield from table((*place, "live", "simulated", "live over simulated"), rows)
    yield ""
    yield from near(result)


def near(result: Mapping[str, Any]) -> Iterator[str]:
    """How many live ratios are near the simulated ones, by scheduler."""
    found: dict[str, list[float]] = {}
    for one in result["cells"]:
        if AGAINST.get(one["scheduler"]) == one["against"]:
            found.setdefault(one["scheduler"], []).append(one["quotient"])
    each = (
        f"`{name}` {sum(abs(quotient - 1) <= result['near'] for quotient in mine)} of {len(mine)} "
        f"({min(mine):.2f} to {max(mine):.2f})"
        for name, mine in found.items()
    )
    yield f"Mean time per token, live over simulated within {result['near']:.0%}: {', '.join(each)}."


def overhead(result: Mapping[str, Any]) -> Iterator[str]:
    """Microseconds a step, ours beside vLLM's own."""
    head = ("running", "waiting", "lane", "stock", "ours", "ratio", "our own code", "limit", "within")
    yield from table(
        head,
        (
            (
                row["running"],
                row["waiting"],
                "in use" if row["used"] else "idle",
                *(f"{row[name]:.0f}" for name in ("stock_us", "ours_us")),
                f"{row['ratio']:.3f}x ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})",
                f"{row['own_us']:.1f}",
                f"{row['limit']:.2f}x",
                "yes" if row["within"] else "**no**",
            )
            for row in result["rows"]
        ),
    )


def properties(result: Mapping[str, Any]) -> Iterator[str]:
    """How many random workloads kept every invariant, and what occurred in them."""
    totals, seen = result["totals"], result["workloads_with"]
    yield f"{result['workloads'] - result['failed']} of {result['workloads']} random workloads kept every invariant:"
    yield ""
    yield from (f"- {rule};" for rule in result["invariants"])
    yield ""
    yield (
        f"{totals['requests']} requests, {totals['steps']} steps, {totals['evictions']} evictions, {totals['loads']} loads; "
        f"somebody passed in {seen.get('passes', 0)} of the workloads, was parked in {seen.get('parked', 0)}, "
        f"was aborted in {seen.get('aborts', 0)}."
    )


def on_ranks() -> Iterator[str]:
    """Random workloads on two ranks, by scheduler: how many kept every invariant, and what occurred in them."""
    names = [f"{kind}-properties-{way}2" for way in ("tp", "pp") for kind in ("scheduler", "express")]
    found = [result for result in map(held, names) if result]
    head = ("scheduler", "tensor parallel", "pipeline parallel", "workloads", "kept every invariant")
    head += ("several batches in the pipeline", "evictions", "loads")
    yield from table(
        head,
        (
            (
                *(one[key] for key in ("scheduler", "tensor_parallel", "pipeline_parallel", "workloads")),
                one["workloads"] - one["failed"],
                one["workloads_with"].get("several batches in a pipeline", 0),
                *(one["totals"][key] for key in ("evictions", "loads")),
            )
            for one in found
        ),
    )
