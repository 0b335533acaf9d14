"""What a simulated trace costs: CPU seconds against requests, under overload, where a backlog grows all the time.

Lengths of the Azure conversation trace, repeated; Poisson arrivals at 1.2 times what a batch of 16 decodes, so that a sixth
of all requests wait in the end. The physics: an iteration has at most a batch of tokens and looks at most at the model
runner's slots, so the cost follows the tokens and not the backlog; a burst shows it at its worst.

    python benchmarks/simulator_cost.py [--requests N,N,N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import OPT_13B, capacity, finish, lengths, poisson
from coldstart.measure.bench import facts
from coldstart.scheduling import SchedulerSettings
from coldstart.scheduling.simulate import SimJob, SimSettings, simulate

BATCH, LOAD = 16, 1.2
POLICIES = ("fcfs", "skip-join-mlfq")
LIMIT_S, MOST = 600.0, 100_000


def cost(policy: str, count: int) -> dict[str, Any]:
    """One run; jobs are dropped as they end, as a replay does."""
    profile, base = OPT_13B.profile(), lengths(20_000)
    rows = list(islice(cycle(base), count))
    ended: list[float] = []

    def finished(job: SimJob) -> None:
        ended.append(job.finished_s or 0.0)

    trace = poisson(rows, LOAD * capacity(profile, base, BATCH), 1)
    started = time.process_time()
    outcome = simulate(
        trace, profile, SchedulerSettings(policy, batch=BATCH), SimSettings(), finished=finished
    )
    seconds = time.process_time() - started
    assert len(ended) == count
    found = {"policy": policy, "requests": count, "cpu_s": seconds, "iterations": outcome.iterations}
    found |= {"tokens": outcome.served, "us_per_iteration": 1e6 * seconds / outcome.iterations}
    print(
        f"{policy:<15} {count:>7} requests: {seconds:7.1f} s, {found['us_per_iteration']:.0f} us an iteration",
        flush=True,
    )
    return found


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="1000,10000,100000")
    counts = [int(part) for part in parser.parse_args(argv).requests.split(",")]
    rows = [cost(policy, count) for count in counts for policy in POLICIES]
    worst = max(row["cpu_s"] for row in rows)
    finish(
        "simulator-cost",
        {
            "kind": "simulated",
            "date": facts.today(),
            "command": ["python", "benchmarks/simulator_cost.py", *argv],
            "machine": facts.machine(),
            "batch": BATCH,
            "load": LOAD,
            "limit_s": LIMIT_S,
            "met": worst < LIMIT_S if max(counts) >= MOST else None,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
