"""Microseconds per step of our scheduler against vLLM's own, in the same process, on its real classes.

No model runs: a step is schedule() plus update_from_output() of a sampled token for everybody scheduled. The
ceiling is the smaller of 2x stock and 5 % of a 25 ms iteration. Run: python benchmarks/scheduler_overhead.py
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
logging.disable(logging.WARNING)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

from benchmarks.common import finish  # noqa: E402
from coldstart.scheduling.vllm.scheduler import PolicyScheduler  # noqa: E402
from tests.property.engine_double import Shape, build, make_request  # noqa: E402

ITERATION_US = 25_000
STEPS, ROUNDS, WAITING = 60, 5, 2000


def steps_us(folder: Path, cls: type[AsyncScheduler], running: int, waiting: int) -> float:
    """Median microseconds per step in the steady state."""
    shape = Shape(slots=4 * running, batch=running, tokens=8192, blocks=200_000, prefix=False, depth=1)
    scheduler, random = build(folder, shape, cls), Random(1)
    for number in range(running + waiting):
        prompt = [random.randrange(1000) for _ in range(random.randrange(4, 60))]
        scheduler.add_request(make_request(str(number), prompt, 190))
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        done = [[7] if not scheduler.requests[name].is_prefill_chunk else [] for name in names]
        scheduler.update_from_output(output, ModelRunnerOutput(names, index, done))
        times.append((time.perf_counter() - start) * 1e6)
    return median(times[STEPS // 3 :])


def measure(folder: Path, running: int, waiting: int) -> dict[str, object]:
    """Interleaved rounds, both schedulers, medians and extremes."""
    rounds: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(ROUNDS):
        rounds["stock"].append(steps_us(folder, AsyncScheduler, running, waiting))
        rounds["ours"].append(steps_us(folder, PolicyScheduler, running, waiting))
    stock, ours = (median(rounds[name]) for name in ("stock", "ours"))
    return {
        "running": running,
        "waiting": waiting,
        "stock_us": stock,
        "ours_us": ours,
        "rounds_us": rounds,
        "ratio": ours / stock,
        "limit_us": min(2 * stock, 0.05 * ITERATION_US),
        "within": ours <= min(2 * stock, 0.05 * ITERATION_US),
    }


def main() -> None:
    folder = Path(tempfile.mkdtemp()) / "tiny-opt"
    rows = [measure(folder, running, waiting) for waiting in (0, WAITING) for running in (8, 64, 256)]
    for row in rows:
        print(
            f"running {row['running']:>4} waiting {row['waiting']:>5}: stock {row['stock_us']:>7.0f} us, "
            f"ours {row['ours_us']:>7.0f} us, {row['ratio']:.2f}x, limit {row['limit_us']:.0f} us"
        )
    growth = [
        math.log(rows[-1]["ours_us"] / rows[-3]["ours_us"]) / math.log(256 / 8)  # type: ignore[operator]
    ]
    finish("scheduler_overhead", {"kind": "measured, no model", "rows": rows, "growth_exponent": growth[0]})


if __name__ == "__main__":
    main()
