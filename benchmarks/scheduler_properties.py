"""Random workloads of mixed features on vLLM's real scheduler and connector, every invariant checked in every step.

The workloads are those of tests/support/scheduling (seed n is workload n there), on a virtual clock with symbolic KV; a
failure is an invariant that did not hold, named with its seed. The counts say which features really occurred.
With --tensor-parallel or --pipeline-parallel every rank has KV and copies of its own, and a pipeline is asked for its next
batch before the earlier ones are back.
Run: python benchmarks/scheduler_properties.py --workloads 10000 [--scheduler express] [--pipeline-parallel 2]
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
logging.disable(logging.CRITICAL)

from benchmarks.common import finish  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from tests.support.scheduling.lane_workloads import LaneChecked, lane_load  # noqa: E402
from tests.support.scheduling.workloads import Checked, Load, Run, on_ranks, random_load  # noqa: E402

COMMON = (
    "every live request in exactly one queue, none lost, no leaked block",
    "scheduled <= B, slots and token budget held",
    "every KV read sees the prefix it needs; loads poison their target, stores read late",
    "outputs as predicted whatever the schedule; everything ends in bounded steps",
)
QUEUES = (
    *COMMON,
    "only chosen requests are scheduled",
    "no ready request of higher rank idles while a lower one runs, but for the stated exceptions",
    "a token between two evictions of one request",
    "victims by descending, loads by ascending ENST, none evicted to load one of larger ENST",
)
PIPELINE = ("nobody whose token is still in the pipeline is in another batch, nor evicted by us",)
RANKS = ("every rank's cells hold what its steps read; a load counts once every rank has reported it",)

EXPRESS = (
    *COMMON,
    "who is hidden is not served and keeps its slot; who waits is in the order of arrival",
    "nobody of the main lane is evicted for the lane; nobody waits beside a slot and memory for it",
    "the lane has at most its price of the contended time, and what was owed at most at a time",
)


def features(load: Load, checked: Run) -> Counter[str]:
    """One for each feature that this workload really had."""
    scheduler, rows = checked.scheduler, [row for rows in load.arrivals.values() for row in rows]
    counters = scheduler.counters
    seen = {
        "aborts": bool(load.aborts),
        "priorities": any(row[3] for row in rows),
        "prefix cache hits": checked.prefix_hits > 0,
        "chunked prefills": checked.chunks > 0,
        "host memory": load.shape.host_blocks is not None,
        "host memory full": checked.host_full,
        "evictions": counters.evictions > 0,
        "loads": counters.loads > 0,
        "two steps in flight": load.shape.depth == 2,
        "several batches in a pipeline": load.shape.stages > 1 and checked.engine.most > 1,
        "asynchronous scheduling in a pipeline": load.shape.stages > 1 and load.shape.asynchronous,
    }
    if isinstance(checked, LaneChecked):
        totals = scheduler.policy.totals
        own = {"passes": totals.passes, "extended": totals.extended, "parked": totals.parked}
    else:
        own = {"demotions": counters.demotions, "promotions": counters.promotions}
    seen |= {name: count > 0 for name, count in own.items()}
    return Counter({name: 1 for name, present in seen.items() if present})


def source() -> str:
    """SHA-256 over the scheduler's sources and the tests' rules: what the outcome is true of."""
    folders = (
        "coldstart/scheduling",
        "coldstart/vllm/scheduling",
        "tests/property",
        "tests/support/scheduling",
    )
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def run(first: int, count: int, *, express: bool, stages: int = 1, tensor: int = 1) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp()) / "tiny-opt"
    seen: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    failures: dict[int, str] = {}
    for seed in range(first, first + count):
        load = lane_load(seed) if express else random_load(seed)
        load = on_ranks(load, seed, stages=stages, tensor=tensor)
        try:
            checked: Run = (LaneChecked if express else Checked)(folder, load, seed).run()
        except Exception as problem:  # noqa: BLE001 - whatever goes wrong is a failure
            failures[seed] = f"{type(problem).__name__}: {problem}"
            continue
        seen += features(load, checked)
        totals += Counter(requests=len(load.wanted), steps=checked.steps)
        totals += Counter(
            evictions=checked.scheduler.counters.evictions, loads=checked.scheduler.counters.loads
        )
        if (seed - first) % 500 == 499:
            print(f"{seed - first + 1} workloads, {len(failures)} failed", flush=True)
    return {"failures": failures, "workloads_with": dict(seen), "totals": dict(totals)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--scheduler", choices=("skip-join-mlfq", "express"), default="skip-join-mlfq")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each stage")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages")
    given = parser.parse_args()
    express = given.scheduler == "express"
    stages, tensor = given.pipeline_parallel, given.tensor_parallel
    invariants = [*(EXPRESS if express else QUEUES), *(PIPELINE if stages > 1 else ())]
    invariants += RANKS if stages * tensor > 1 else ()
    parallel = "".join(f"-{name}{n}" for name, n in (("tp", tensor), ("pp", stages)) if n > 1)
    start, before = time.monotonic(), source()
    found = run(given.first, given.workloads, express=express, stages=stages, tensor=tensor)
    if source() != before:
        raise SystemExit("the scheduler changed while it was being checked: nothing written")
    finish(
        ("express-properties" if express else "scheduler-properties") + parallel,
        {
            "scheduler": given.scheduler,
            "tensor_parallel": tensor,
            "pipeline_parallel": stages,
            "kind": "property tests on vLLM's scheduler classes, virtual clock, symbolic KV",
            "date": facts.today(),
            "command": ["python", "benchmarks/scheduler_properties.py", *facts.without_paths(sys.argv[1:])],
            "machine": facts.machine(),
            "versions": facts.versions(),
            "seconds": time.monotonic() - start,
            "source_sha256": before,
            "first_seed": given.first,
            "workloads": given.workloads,
            "failed": len(found["failures"]),
            **found,
            "invariants": invariants,
        },
    )
    raise SystemExit(bool(found["failures"]))


if __name__ == "__main__":
    main()
