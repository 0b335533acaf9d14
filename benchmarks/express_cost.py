"""What learning costs: time and memory of the express lane's knowledge by requests served, and of a choice by who waits.

Every request arrives, runs, and ends; the tables are made anew when they are due, as before a choice. With classes, which
are opted into, each has a hint and a class too, a tenth of which are new each time, so that they are forgotten again:
there are at most that many requests of those. No engine is involved. Log-normal lengths.

    python benchmarks/express_cost.py [--requests N,N,N]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from math import log
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import OPT_13B, finish
from coldstart.measure.bench import facts
from coldstart.scheduling import Job
from coldstart.scheduling.express.index import Pressure
from coldstart.scheduling.express.policy import Express

PROFILE = OPT_13B.profile()
PRESSURE = Pressure(batch=64, binds=True, context=400.0, prompt=200.0, redo=8)
WAITING = (10, 100, 1000, 10_000, 100_000)
CHOICES = 2000


MOST_CLASSED = 100_000


def job(random: Random, number: int, classed: bool = True) -> Job:
    kind = number if random.random() < 0.1 else number % 50
    output = max(1, min(4096, round(random.lognormvariate(log(60), 1.4))))
    prompt = max(1, round(random.lognormvariate(log(200), 0.8)))
    if not classed:
        return Job(str(number), 0.0, prompt, output)
    return Job(str(number), 0.0, prompt, output, kind=kind, expected=output)


def serve(policy: Express, random: Random, first: int, count: int, classed: bool = True) -> None:
    for number in range(first, first + count):
        one = job(random, number, classed)
        policy.add(one, 0.0)
        policy.learn(PRESSURE, ())
        policy.asking()
        policy.inside(one.id)
        one.generated = one.output_tokens or 1
        policy.remove(one)


def learning(counts: Sequence[int], classed: bool) -> list[dict[str, Any]]:
    """Growing totals on one policy; memory of all that the policy holds."""
    rows: list[dict[str, Any]] = []
    policy, random, served, spent = Express(PROFILE), Random(1), 0, 0.0
    for count in counts:
        started = time.process_time()
        serve(policy, random, served, count - served, classed)
        spent, served = spent + time.process_time() - started, count
        held = _held(policy) / 1024
        rows.append(
            {
                "classes": classed,
                "requests": count,
                "cpu_s": spent,
                "us_each": 1e6 * spent / count,
                "kib": held,
            }
        )
        print(rows[-1], flush=True)
    return rows


def _held(policy: Express) -> int:
    """Bytes of everything that the policy refers to, its modules and classes left out."""
    seen: set[int] = set()
    left, size = list[Any]([policy]), 0
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen.add(id(one))
            size += sys.getsizeof(one)
            left += gc.get_referents(one)
    return size


def choosing(waiting: int) -> dict[str, Any]:
    """A choice with so many who wait: somebody comes, the best is found, taken and put back."""
    policy, random = Express(PROFILE), Random(2)
    serve(policy, random, 0, 2000)
    jobs = [job(random, 10_000 + number) for number in range(waiting)]
    for one in jobs:
        policy.add(one, 0.0)
    policy.learn(PRESSURE, ())
    policy.asking()
    started = time.process_time()
    for _ in range(CHOICES):
        policy.learn(PRESSURE, ())
        best = policy.waiting.best(0.0, 1)[0][0]
        policy.inside(best.id)
        policy.outside(best, best.pending)
    each = (time.process_time() - started) / CHOICES
    print(f"{waiting} waiting: {1e6 * each:.1f} us a choice", flush=True)
    return {"waiting": waiting, "us": 1e6 * each}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="10000,100000,1000000")
    counts = [int(part) for part in parser.parse_args(argv).requests.split(",")]
    choices = [choosing(count) for count in WAITING]
    rows = learning(counts, False)
    rows += learning([count for count in counts if count <= MOST_CLASSED], True)
    result = {
        "kind": "cpu",
        "date": facts.today(),
        "command": ["python", "benchmarks/express_cost.py", *argv],
        "machine": facts.machine(),
        "rows": rows,
        "choices": choices,
    }
    finish("express-cost", result)


if __name__ == "__main__":
    main(sys.argv[1:])
