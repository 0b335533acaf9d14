"""The live scheduling results and the calibration as Markdown, for SCHEDULING.md.

Invariant: every figure comes from a result file; what has not been measured is said to be so, with its command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FCFS, LARGEST, OURS, BOUNDED = "fcfs", "fcfs-max", "mlfq", "mlfq-bounded"
GAINS = ("per_token_s.mean", "per_token_s.p95", "ttft_s.mean", "longest_s.mean", "tokens_per_s")
LEVEL = 0.1
"""A median ratio within this of 1 counts as level."""

Cell = Mapping[str, Any]


def parts() -> dict[str, str]:
    """Each marked part of SCHEDULING.md by its name."""
    live = "python benchmarks/live_scheduling.py"
    regimes, swapping = "scheduling-live-regimes", "scheduling-live-swapping"
    return {
        "live-gain": _filled(regimes, live, gains),
        "live-verdicts": _filled(regimes, live, verdicts),
        "live-winners": _filled(regimes, live, winners),
        "live-price": _filled(regimes, live, prices),
        "live-swapping": _filled(swapping, f"{live} --swapping", swaps),
        "batch-choice": _filled("batch-choice", "python benchmarks/batch_choice.py", batches),
        "calibration": _filled("scheduling-calibration", "python benchmarks/calibration.py", calibration),
    }


def _filled(name: str, command: str, lines: Callable[[Any], Iterator[str]]) -> str:
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return f"Not measured yet: `{command}`."
    return "\n".join(lines(json.loads(file.read_text())))


def gains(result: Cell) -> Iterator[str]:
    """Ours over both baselines, one line per regime, workload and load; load 1 and the answers below."""
    yield "| regime | workload | load | against | mean per token | p95 | TTFT | longest 10 % | throughput |"
    yield "|---" * 9 + "|"
    for cell in result["cells"]:
        for base, others in cell["against"].items():
            if others.get(OURS):
                shown = " | ".join(_ratio(others[OURS][name]) for name in GAINS)
                yield f"{_place(cell)} | {base} | {shown} |"
    yield ""
    yield f"Medians of {_runs(result)} repetitions (least to largest). {_same(result)}"
    yield f"Load 1: {_capacities(result)}."


def verdicts(result: Cell) -> Iterator[str]:
    """Every target with what was reached."""
    yield "| regime | workload | load | against | metric | target | median | met |"
    yield "|---" * 8 + "|"
    for one in result["verdicts"]:
        place = f"{_place(one)} | {one['against']} | {one['metric']} | {one['target']:g}x"
        yield f"{place} | {one['median']:.2f}x | {'yes' if one['met'] else '**no**'} |"


def winners(result: Cell) -> Iterator[str]:
    """Who has the lower mean time per token against the largest batch, cell by cell."""
    found: dict[str, list[str]] = {"ours wins": [], "level": [], "the largest batch wins": []}
    for cell in result["cells"]:
        # Where the cap is the largest batch that pays, the baseline with the cap is that server.
        base = LARGEST if LARGEST in cell["schedulers"] else FCFS
        ours = cell["against"].get(base, {}).get(OURS)
        if ours:
            ratio = ours["per_token_s.mean"]["median"]
            word = (
                "level" if abs(ratio - 1) <= LEVEL else "ours wins" if ratio > 1 else "the largest batch wins"
            )
            found[word].append(f"{cell['regime']} {cell['workload']} {cell['load']} ({ratio:.2f}x)")
    yield from (f"- {word}: {', '.join(places) or 'nowhere'}." for word, places in found.items())


def prices(result: Cell) -> Iterator[str]:
    """What single requests pay against FCFS with the same batch, unbounded and with the bound, and what is gained then."""
    yield (
        "| regime | workload | load | scheduler | longest 10 % | slowest request | above 2x "
        "| slowest of the longest | mean per token |"
    )
    yield "|---" * 9 + "|"
    for cell in result["cells"]:
        for name in (OURS, BOUNDED):
            against = cell["against"].get(FCFS, {}).get(name)
            if against:
                slow = against["slowdown"]
                paid = f"{slow['max']:.2f}x | {slow['above_2']:.1%} | {slow['longest_max']:.2f}x"
                shown = (
                    f"{_ratio(against['longest_s.mean'])} | {paid} | {_ratio(against['per_token_s.mean'])}"
                )
                yield f"{_place(cell)} | {name} | {shown} |"


def swaps(result: Cell) -> Iterator[str]:
    """The three strategies: gain, bytes, and the time spent waiting for them."""
    yield (
        "| load | strategy | mean per token against fcfs | p95 | MB evicted | MB loaded "
        "| waiting for loads, of latency | answers identical |"
    )
    yield "|---" * 8 + "|"
    for cell in result["cells"]:
        for name, against in cell["against"][FCFS].items():
            if against:
                shown = f"{_ratio(against['per_token_s.mean'])} | {_ratio(against['per_token_s.p95'])}"
                same = cell["identical"][name]
                moved = _moved(cell["schedulers"][name])
                yield f"| {cell['load']} | {name} | {shown} | {moved} | {same['identical']} of {same['compared']} |"


def batches(result: Cell) -> Iterator[str]:
    """The gain over FCFS with all slots by batch; that of the longest tenth in brackets."""
    names = list(result["rows"][0]["over_fcfs"])
    yield "| | load | " + " | ".join(f"B = {name}" for name in names) + " |"
    yield "|---" * (2 + len(names)) + "|"
    for one in result["rows"]:
        cells = (f"{one['over_fcfs'][b]:.2f}x ({one['longest_over_fcfs'][b]:.2f}x)" for b in names)
        yield f"| {one['pool']} | {one['load']} | {' | '.join(cells)} |"


def calibration(result: Cell) -> Iterator[str]:
    """Live and simulated means, the error, and the range over single runs."""
    yield "| trace | policy | iteration times | metric | live ms | simulated ms | error | single runs |"
    yield "|---" * 8 + "|"
    for one in result["cells"]:
        for source, errors in one["error"].items():
            for metric, error in errors.items():
                live, found = 1e3 * one["live"][metric], 1e3 * one["simulated"][source][metric]
                single = one["single"][source][metric]
                place = f"| {one['trace']} | {one['policy']} | {source} | {metric.removesuffix('_s').upper()}"
                spread = f"{single['min']:+.1%} to {single['max']:+.1%}"
                yield f"{place} | {live:.2f} | {found:.2f} | {error:.1%} | {spread} |"
    yield ""
    met = ", ".join(f"{source} {'yes' if met else '**no**'}" for source, met in result["met"].items())
    yield f"Within {result['limit']:.0%} everywhere: {met}. Load {result['load']:g}."


def _place(cell: Cell) -> str:
    return f"| {cell['regime']} | {cell['workload']} | {cell['load']}"


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _runs(result: Cell) -> str:
    counts = {one["runs"] for cell in result["cells"] for one in cell["schedulers"].values()}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _same(result: Cell) -> str:
    pairs: Sequence[Mapping[str, int]] = [p for cell in result["cells"] for p in cell["identical"].values()]
    same, compared = (sum(pair[name] for pair in pairs) for name in ("identical", "compared"))
    return f"Answers identical to FCFS's, token by token: {same} of {compared}."


def _capacities(result: Cell) -> str:
    found = (
        f"{one['regime']} {one['workload']} {one['requests_per_s']:.1f} requests/s"
        for one in result["capacity"]
    )
    return ", ".join(found)


def _moved(one: Cell) -> str:
    moved = one.get("swapping")
    if not moved:
        return "- | - | -"
    out, into = (moved[f"bytes_{way}"]["median"] / 1e6 for way in ("evicted", "loaded"))
    return f"{out:.1f} | {into:.1f} | {moved['blocked_share']['median']:.1%}"
