"""Which scheduler for whom, in five lines: the head of SCHEDULING.md, every figure from a committed result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from live.cells import BASELINE, BOUNDS, CONTROL, EXPRESS_PLAIN, HONEST, MLFQ
from scheduling_tables import filled, held

BOUNDED = next(iter(BOUNDS))
MEAN, LONGEST = "per_token_s.mean", "longest_s.mean"
LIVE, SIMULATED = "scheduling-live-regimes", "express-grid"


def parts() -> dict[str, str]:
    """The marked part of SCHEDULING.md."""
    return {"decision": filled(LIVE, "python benchmarks/live_scheduling.py", rule)}


def rule(result: Mapping[str, Any]) -> Iterator[str]:
    """Five cases, the first that holds; ratios of the mean time per token, least and largest of the cells' medians."""
    cells = result["cells"]
    free, capped = _ratios(cells, "neither", BASELINE), _ratios(cells, "batch-bound", HONEST)
    yield (
        "1. **Nothing binds, or the batch may be as large as memory takes: `fcfs`, the default, with no `--batch`.** Against "
        f"it skip-join MLFQ came to {_span(free)} where nothing binds, and to {_span(capped)} where it kept to a smaller batch."
    )
    alike = _ratios(cells, "kv-bound", HONEST, workload="azure")
    yield (
        "2. **Answers are about equally long (the Azure trace): `fcfs`.** "
        f"With KV memory short skip-join MLFQ came to {_span(alike)}."
    )
    short, paid = (_ratios(cells, "kv-bound", HONEST, "skewed", metric) for metric in (MEAN, LONGEST))
    yield (
        "3. **KV memory is short, answers differ much, and long ones may wait: `skip-join-mlfq`.** "
        f"{_span(short)}; latencies of the longest tenth {_span(paid)}."
    )
    both = [
        [_ratios(cells, "batch-bound", BASELINE, "skewed", metric, name) for metric in (MEAN, LONGEST)]
        for name in (MLFQ, BOUNDED)
    ]
    yield (
        f"4. **A cap on the batch has to stay, and answers differ much: `skip-join-mlfq`,** {_span(both[0][0])} (longest tenth "
        f"{_span(both[0][1])}) of `fcfs` with that cap; with `--oldest-share {BOUNDS[BOUNDED]}` "
        f"{_span(both[1][0])} ({_span(both[1][1])})."
    )
    yield (
        "5. **KV memory is short and long requests must hardly pay: try `express`** beside `fcfs`. "
        f"{_express()}"
    )


def _ratios(
    cells: Sequence[Mapping[str, Any]],
    regime: str,
    base: str,
    workload: str | None = None,
    metric: str = MEAN,
    name: str = MLFQ,
) -> list[float]:
    return [
        ours[metric]["median"]
        for cell in cells
        if cell["regime"] == regime and workload in (None, cell["workload"])
        if (ours := cell["against"].get(base, {}).get(name))
    ]


def _express() -> str:
    grid = held(SIMULATED)
    if grid is None:
        return "Not measured yet."
    found = [
        row["over_fcfs"]["express"]
        for row in grid["rows"]
        if row["regime"].startswith("KV binds") and "express" in row["over_fcfs"]
    ]
    means, longest = ([one[name] for one in found] for name in ("mean", "longest"))
    live = held("scheduling-live-express")
    return (
        f"Simulated{'' if live else ' and **not measured live**'}: {_span(means)}, {median(means):.2f}x at the median; "
        f"the longest tenth {min(longest):.2f}x at worst.{_live(live['cells']) if live else ''}"
    )


def _live(cells: Sequence[Mapping[str, Any]]) -> str:
    """The lane, and what chance does between two servers that are alike."""
    plain = _ratios(cells, "kv-bound", HONEST, name=EXPRESS_PLAIN)
    chance = _ratios(cells, "kv-bound", BASELINE, name=CONTROL)
    return f" Live, in runs of a minute at most: {_span(plain)}; two servers alike {_span(chance)}."


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x" if ratios else "not measured"
