"""Microseconds of CPU per step of the express lane against vLLM's own scheduler, in one process, on vLLM's real classes.

No model runs: a step is schedule() plus update_from_output() of one sampled token for everybody scheduled, and whoever
finishes is replaced. `idle`: constant lengths, so that nobody may pass, with nobody and with 2,000 requests waiting. `in
use`: nine of ten answers are short and one is long, so that the lane passes, pauses and parks all the
time. Memory is ample, the model runner has twice the slots of the batch. Stock and ours step in turns of a few steps; the
ratio is the median over rounds of that of their means. `own_us` is the time inside our schedule() and outside vLLM's, less
what reading the clocks costs there, measured on a scheduler that adds nothing.

    python benchmarks/express_overhead.py [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
logging.disable(logging.WARNING)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402

from benchmarks.common import finish  # noqa: E402
from benchmarks.scheduler_overhead import (  # noqa: E402
    BLOCK,
    TOKENS,
    WAITING,
    Probe,
    ProbedStock,
    Rig,
    alternate,
    ratios,
    timed,
)
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.vllm.scheduling.lane import LaneScheduler  # noqa: E402
from tests.support.scheduling.engine_double import Shape, build, make_request  # noqa: E402

ROUNDS, STEPS = 7, 400
IDLE_LIMIT, USED_LIMIT = 1.03, 1.10
CONSTANT, SHORT, LONG = 60, (2, 10), 170


@dataclass(frozen=True)
class LaneCase:
    running: int
    waiting: int
    used: bool

    @property
    def warm_up(self) -> int:
        """Steps until lengths are known and the opening burst is over."""
        return 600 if self.running < 64 else 250

    @property
    def limit(self) -> float:
        return USED_LIMIT if self.used else IDLE_LIMIT


CASES = [LaneCase(running, waiting, used=False) for waiting in (0, WAITING) for running in (8, 64, 256)]
CASES += [LaneCase(running, WAITING, used=True) for running in (8, 64, 256)]


class ProbedLane(LaneScheduler, Probe):
    """Ours over the probe, which the order of the bases puts below it."""

    schedule = timed(LaneScheduler.schedule)


class LaneRig(Rig):
    """One scheduler under a constant number of live requests, whose lengths are constant or have a heavy tail."""

    def __init__(self, folder: Path, cls: type[AsyncScheduler], case: LaneCase) -> None:
        self.used = case.used
        live = case.running + case.waiting
        shape = Shape(
            slots=2 * case.running,
            batch=case.running,
            tokens=TOKENS,
            blocks=live * 24,
            prefix=False,
            depth=1,
            block=BLOCK,
            settings={"policy": "express"},
        )
        self.scheduler, self.random, self.count = build(folder, shape, cls), Random(1), 0
        for _ in range(live):
            self.arrive()

    def arrive(self) -> None:
        random = self.random
        prompt = [random.randrange(1000) for _ in range(random.randrange(4, 60))]
        output = (random.randrange(*SHORT) if random.random() < 0.9 else LONG) if self.used else CONSTANT
        self.scheduler.add_request(make_request(str(self.count), prompt, output, block=BLOCK))
        self.count += 1


def compare(folder: Path, case: LaneCase, rounds: int) -> dict[str, Any]:
    """Rounds of stock and ours in turns."""
    measured, passes = [], []
    for _ in range(rounds):
        ours = LaneRig(folder, ProbedLane, case)
        rigs = {"stock": LaneRig(folder, ProbedStock, case), "ours": ours}
        measured.append(alternate(rigs, case.warm_up, STEPS))
        passes.append(ours.scheduler.policy.totals.passes)
    found = ratios(measured)
    own_ratio = 1 + found["own_us"] / found["stock_us"]
    return {
        **asdict(case),
        **found,
        "own_ratio": own_ratio,
        "passes": passes,
        "limit": case.limit,
        "within": found["ratio"] <= case.limit,
        "own_within": own_ratio <= case.limit,
    }


def line(row: dict[str, Any]) -> str:
    kind = "in use" if row["used"] else "idle"
    spread = f"{row['ratio']:.3f}x, {min(row['ratios']):.3f} to {max(row['ratios']):.3f}"
    return (
        f"{row['running']:>4} running {row['waiting']:>5} waiting, {kind}: stock {row['stock_us']:.0f},"
        f" ours {row['ours_us']:.0f} us ({spread}), {row['own_us']:.1f} us our own code"
        f" ({row['own_ratio']:.3f}x), limit {row['limit']}x, {sum(row['passes'])} passes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, nothing written")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds")
    given = parser.parse_args()
    folder, rows = Path(tempfile.mkdtemp()) / "tiny-opt", []
    for case in CASES:
        rows.append(compare(folder, case, 1 if given.quick else given.rounds))
        print(line(rows[-1]), flush=True)
    if given.quick:
        return
    finish(
        "express-overhead",
        {
            "kind": "measured, no model runs",
            "unit": "microseconds of CPU per step, mean",
            "date": facts.today(),
            "command": ["python", "benchmarks/express_overhead.py", *facts.without_paths(sys.argv[1:])],
            "machine": facts.machine(),
            "versions": facts.versions(),
            "met": all(row["within"] for row in rows),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
