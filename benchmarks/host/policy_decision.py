"""CPU time of one eviction decision with a thousand models, and memory of a model. Measured.

A decision is everything that one request causes in the core: the event, the choice of victims, the orders. Every model is
small, most are resident, and a miss evicts one or several.

Run: python -m benchmarks host/policy_decision
Time: about 2 minutes
Result: model-cache-decision.json
"""

from __future__ import annotations

import platform
import tracemalloc
from random import Random
from statistics import median
from time import thread_time

from benchmarks.common import finish
from coldstart.host.core import Core
from coldstart.host.events import Arrived, Ended, Leave, Left, Start, Started
from coldstart.host.policies import POLICIES
from coldstart.host.specification import HostSettings, ModelSpec

MODELS, MISSES = 1000, 400
LIMIT_S, LIMIT_BYTES = 1e-3, 20 * 1024


class Load:
    """Requests to one core, whose orders are obeyed at once; keeps the seconds of each call that chose victims."""

    def __init__(self, policy: str) -> None:
        self.random = Random(1)
        specs = [_spec(f"model-{i}", self.random) for i in range(MODELS)]
        # The last tenth does not fit beside the others.
        memory = sum(spec.tiers[0].memory for spec in specs) * 9 // 10
        self.core = Core(specs, HostSettings(memory, policy=policy))
        self.names, self.now, self.count = [spec.name for spec in specs], 0.0, 0
        self.chose: list[float] = []
        self.passed: list[float] = []

    def request(self, model: str) -> None:
        self.now, self.count = self.now + self.random.expovariate(1.0), self.count + 1
        begin = thread_time()
        orders = self.core.handle(Arrived(str(self.count), model), self.now)
        seconds = thread_time() - begin
        (self.chose if any(isinstance(order, Leave) for order in orders) else self.passed).append(seconds)
        while orders:
            order = orders.pop(0)
            if isinstance(order, Leave):
                orders += self.core.handle(Left(order.model), self.now)
            elif isinstance(order, Start):
                orders += self.core.handle(Started(order.model, 1.0), self.now)
        self.core.handle(Ended(str(self.count)), self.now)


def _spec(name: str, random: Random) -> ModelSpec:
    return ModelSpec.simple(name, random.randint(1, 40), random.uniform(0.5, 40.0))


def measure(policy: str) -> dict[str, float]:
    tracemalloc.start()
    load = Load(policy)
    for model in load.names:
        load.request(model)
    held = tracemalloc.get_traced_memory()[0] / MODELS
    tracemalloc.stop()
    load.chose.clear()
    load.passed.clear()
    while len(load.chose) < MISSES:
        load.request(load.random.choice(load.names))
    ordered = sorted(load.chose)
    return {
        "decision_median_us": round(median(ordered) * 1e6, 1),
        "decision_p99_us": round(ordered[int(0.99 * len(ordered))] * 1e6, 1),
        "hit_median_us": round(median(load.passed) * 1e6, 1),
        "bytes_per_model": round(held),
    }


def main() -> None:
    rows = {name: measure(name) for name in POLICIES}
    for name, row in rows.items():
        print(f"{name:<12}" + "".join(f"  {key} {value:>9}" for key, value in row.items()))
    limits = {"decision_us": LIMIT_S * 1e6, "bytes_per_model": LIMIT_BYTES}
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    finish(
        "model-cache-decision",
        {"kind": "measured", "models": MODELS, "limits": limits, **machine, "policies": rows},
    )


if __name__ == "__main__":
    main()
