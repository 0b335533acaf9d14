"""How the cost of a start grows with the model, as Markdown for RESULTS.md, all of it from the result file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import scheduling_tables

from coldstart.measure.bench import run_order
from coldstart.measure.report.rows import seconds

NAME, COMMAND = "model-sizes-cpu", "python benchmarks/model_sizes.py"
HEAD = (
    "size",
    "mode",
    "first token (s)",
    "range",
    "n",
    "weights (s)",
    "answers (s)",
    "CPU (s)",
    "ratio",
    "PSS (MiB)",
    "on disk (MiB)",
    "at most (s)",
    "kept",
)
SMALLEST = "16M"
ALLOWED = 1.3
"""Copies of the weights that a mode may take longer than at the smallest size."""
Row = Mapping[str, Any]


def table() -> str:
    """The whole table, what it was measured with, and how the cost grows."""
    return scheduling_tables.filled(NAME, COMMAND, _lines)


def _lines(result: Row) -> Iterator[str]:
    rows = result["rows"]
    yield from scheduling_tables.table(
        HEAD, (line for size, row in rows.items() for line in _modes(size, row, rows.get(SMALLEST)))
    )
    yield ""
    yield from (f"- {size}: {_about(row)}" for size, row in rows.items())
    if growth := _growth(rows):
        yield from ("", growth)
    last = next(reversed(rows.values()))
    machine, versions = last["machine"], last["versions"]
    yield ""
    told = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    yield f"Measured on {machine['cpu']}, {machine['cores']} cores; {told}"


def _modes(size: str, row: Row, smallest: Row | None) -> Iterator[tuple[str, ...]]:
    for mode, held in row["modes"].items():
        if "unavailable" in held:
            yield (size, mode, f"could not run: {held['unavailable']}", *[""] * (len(HEAD) - 3))
            continue
        first, limit = held["first_token_s"], _limit(mode, row, smallest)
        disk = row["disk_bytes"].get(mode)
        ratio = held["ratio"]
        yield (
            size,
            mode,
            seconds(first["median"]),
            f"{seconds(first['min'])} to {seconds(first['max'])}",
            str(first["n"]),
            _spent(held, "load weights"),
            _spent(held, "first token", "first request"),
            seconds(held["cpu_s"]["median"]),
            f"{ratio:.1f}x" if ratio else "",
            f"{held['pss_bytes']['median'] / 2**20:.0f}",
            f"{disk / 2**20:.1f}" if disk else "",
            seconds(limit) if limit else "",
            "" if limit is None else "yes" if first["median"] <= limit else "no",
        )


def _spent(held: Row, *phases: str) -> str:
    """Median seconds of these phases together, where a mode reports them."""
    known = [held["phases"][name]["median"] for name in phases if name in held["phases"]]
    return seconds(sum(known)) if len(known) == len(phases) else ""


def _limit(mode: str, row: Row, smallest: Row | None) -> float | None:
    """The smallest size's seconds and ALLOWED copies of these weights, from the disk where the mode is a process of its own."""
    least = (smallest or row)["modes"].get(mode, {})
    if smallest in (None, row) or mode in run_order.BASELINES or "first_token_s" not in least:
        return None
    whence = "memory" if mode in run_order.MODES and not run_order.is_process_of_its_own(mode) else "disk"
    return float(least["first_token_s"]["median"] + ALLOWED * row["copy_s"][whence])


def _about(row: Row) -> str:
    copy, frozen = row["copy_s"], row["frozen_bytes"]
    mib = {name: f"{size / 2**20:.0f} MiB" for name, size in frozen.items()}
    tokens = {True: "identical in all modes", False: "NOT identical", None: "not compared"}
    return (
        f"{row['parameters'] / 1e6:.1f} million parameters in {row['dtype']}, {row['weights_bytes'] / 2**20:.0f} MiB."
        f" One copy of them takes {copy['memory']:.2f} s in memory and {copy['disk']:.2f} s from the disk."
        f" Of a frozen engine CRIU reads {mib['read']} at each thaw; {mib['mapped']} are mapped,"
        f" {mib['as in the files']} of those as the model's files have them."
        f" The stages of `materialize` took {sum(row['materialize']['stages'].values()):.0f} s."
        f" Load of one minute at the end: {row['machine']['load_1min']:.1f} on {row['machine']['cores']} cores."
        f" Greedy tokens: {tokens[row['tokens_identical']]}. Measured {row['date']}: `{row['command']}`."
    )


def _growth(rows: Mapping[str, Row]) -> str:
    """Two sentences, from the smallest size to the largest."""
    first, last = next(iter(rows.items())), next(reversed(rows.items()))
    if first[0] == last[0]:
        return ""
    modes = [
        mode
        for mode in last[1]["modes"]
        if all("first_token_s" in row["modes"][mode] for _, row in (first, last))
    ]
    change = ", ".join(f"{mode} {_middle(first[1], mode)} to {_middle(last[1], mode)} s" for mode in modes)
    limits = {mode: _limit(mode, last[1], first[1]) for mode in modes}
    over = [
        mode
        for mode, limit in limits.items()
        if limit is not None and last[1]["modes"][mode]["first_token_s"]["median"] > limit
    ]
    judged = f"above that: {', '.join(over)}" if over else "every mode keeps to it"
    times = last[1]["weights_bytes"] / first[1]["weights_bytes"]
    return (
        f"From {first[0]} to {last[0]}, {times:.0f} times the weights, the first token goes from {change}."
        f" What a mode may take at {last[0]} is its time at {first[0]} and {ALLOWED} copies of the weights,"
        f" in memory (templates, snapshots) or from the disk (`fresh`): {judged}."
    )


def _middle(row: Row, mode: str) -> str:
    return seconds(row["modes"][mode]["first_token_s"]["median"])
