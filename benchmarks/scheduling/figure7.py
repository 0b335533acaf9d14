"""FastServe's Figure 7: job times whose average latencies are 4.23, 5, 3.3 and 3 under four policies. Computed.

Three jobs arrive together, one slot, quanta 1, 2, 4, 8. The text of the paper does not contain the times, so all times on three
grids are tried. An iteration is never split: a job of prefill T1 and decoding T2 is one iteration of T1, then T2 in one or
several; a quantum is checked after each.

Run: python -m benchmarks scheduling/figure7
Time: about a minute
Result: figure7.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from statistics import fmean

from benchmarks.common import finish
from coldstart.scheduling.quanta import geometric, join_level

PAPER = {"fcfs": 4.23, "mlfq": 5.0, "skip-join": 3.3, "srpt": 3.0}
QUANTA = geometric(1.0, 4)

Job = tuple[float, float]
Times = tuple[Job, Job, Job]


def fcfs(jobs: Times) -> float:
    """Average completion in order of arrival."""
    now, ends = 0.0, []
    for job in jobs:
        now += sum(job)
        ends.append(now)
    return fmean(ends)


def srpt(jobs: Times) -> float:
    """All arrive together, so the shortest remaining first is the shortest first."""
    return fcfs(tuple(sorted(jobs, key=sum)))  # type: ignore[arg-type]


def mlfq(jobs: Times, join: Callable[[Job], int], sink: Callable[[int, float], int], cut: str) -> float:
    """Queues of (job, pieces left); `cut` says how T2 is split into iterations."""
    queues: list[list[int]] = [[] for _ in QUANTA]
    left = [[prefill, *_pieces(decode, cut)] for prefill, decode in jobs]
    for number, job in enumerate(jobs):
        queues[join(job)].append(number)
    now, ends, attained = 0.0, [], [0.0] * len(jobs)
    while any(queues):
        level = next(i for i, queue in enumerate(queues) if queue)
        number = queues[level][0]
        step = left[number].pop(0)
        now, attained[number] = now + step, attained[number] + step
        if not left[number]:
            queues[level].pop(0)
            ends.append(now)
        elif attained[number] >= QUANTA[level] - 1e-9:
            queues[level].pop(0)
            queues[sink(level, left[number][0])].append(number)
            attained[number] = 0.0
    return fmean(ends)


def _pieces(decode: float, cut: str) -> list[float]:
    if cut == "one":
        return [decode]
    size = 0.5 if cut == "halves" else 1.0
    return [size] * int(decode / size) + ([decode % size] if decode % size else [])


def averages(jobs: Times, cut: str) -> dict[str, float]:
    last = len(QUANTA) - 1
    return {
        "fcfs": fcfs(jobs),
        "mlfq": mlfq(jobs, lambda job: 0, lambda level, _: min(level + 1, last), cut),
        "skip-join": mlfq(
            jobs,
            lambda job: join_level(QUANTA, job[0]),
            lambda level, step: min(max(level + 1, join_level(QUANTA, step)), last),
            cut,
        ),
        "srpt": srpt(jobs),
    }


def sums(step: float) -> Iterator[tuple[float, float, float]]:
    """Total job times whose FCFS and SRPT averages are within 0.12 and 0.05 of the paper's."""
    grid = [round(step * i, 3) for i in range(2, int(6 / step))]
    for jobs in product(grid, repeat=3):
        one = tuple((total, 0.0) for total in jobs)
        if abs(fcfs(one) - PAPER["fcfs"]) <= 0.12 and abs(srpt(one) - PAPER["srpt"]) <= 0.05:  # type: ignore[arg-type]
            yield jobs[0], jobs[1], jobs[2]


def candidates(step: float) -> Iterator[tuple[Times, str]]:
    """Every split of those totals into T1 and T2."""
    for totals in sums(step):
        splits = [[round(step * i, 3) for i in range(1, round(total / step))] for total in totals]
        for prefills in product(*splits):
            jobs = tuple((p, round(t - p, 3)) for p, t in zip(prefills, totals, strict=True))
            yield from ((jobs, cut) for cut in ("one", "units", "halves"))  # type: ignore[misc]


def distance(found: dict[str, float]) -> float:
    return max(abs(found[name] - wanted) for name, wanted in PAPER.items())


def closest(step: float) -> tuple[int, list[dict[str, object]]]:
    """Return the number of tried job sets and the five nearest to the paper."""
    rows = [(distance(found := averages(jobs, cut)), jobs, cut, found) for jobs, cut in candidates(step)]
    best = sorted(rows, key=lambda row: row[0])[:5]
    return len(rows), [
        {"largest_gap": g, "jobs_T1_T2": j, "decode_in": c, "averages": a} for g, j, c, a in best
    ]


def main() -> None:
    tried, rows = zip(*(closest(step) for step in (0.5, 0.25, 0.2)), strict=True)
    best = min((row for found in rows for row in found), key=lambda row: row["largest_gap"])
    result = {
        "kind": "search",
        "paper": PAPER,
        "tried": sum(tried),
        "best": best,
        "closest_by_step": list(rows),
    }
    finish("figure7", result)


if __name__ == "__main__":
    main()
