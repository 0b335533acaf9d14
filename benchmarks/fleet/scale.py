"""A day of 1,000 servers and 10,000 models: time of each decision of the live core, and the size of its state. Simulated.

Each server has four devices of 24 GB behind a link whose speed was measured (2 GB/s, 20 % more or less). A model has 13 GB of
weights and 18 GB in all, an SLO of 7.5 s, and stops after 15 minutes. Requests arrive four times a second on average, half as
often at night and half again as often at noon; the popularity of the models is log-normal. Every hour a server is lost, and
joins again ten minutes later. Times are CPU seconds of the thread, so that other programs do not count, and elapsed seconds.
Python's collections count apart: most of what they look at are the records of the simulator. The state is measured as the bytes
of its pickled form.

Run: python -m benchmarks fleet/scale [HOURS]
Time: about ten minutes for 24 hours
Result: fleet-scale-simulated.json
"""

from __future__ import annotations

import gc
import math
import pickle
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.common import finish
from coldstart.fleet import events
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.lab.fleet import simulate
from coldstart.lab.records import ModelRequest

GB, HOUR_S, DAY_S = 10**9, 3600.0, 86_400.0
SERVERS, MODELS, RATE, SKEW, IDLE_S, LOST_S = 1_000, 10_000, 4.0, 2.0, 900.0, 600.0
COSTS = Costs(2.0, 1.0, 1.0, 0.2, 0.001, 1.5, 0.04)
LIMIT_S = 0.005


class TimedCore(FleetCore):
    """Core that measures its decisions in seconds, and its size at the first event of each hour."""

    cpu: list[float] = []  # noqa: RUF012 - of the one core of this process
    elapsed: list[float] = []  # noqa: RUF012
    collections: list[float] = []  # noqa: RUF012
    sizes: list[dict[str, float]] = []  # noqa: RUF012
    slowest: tuple[float, str, float] = 0.0, "", 0.0

    @classmethod
    def note_collection(cls, phase: str, _: object) -> None:
        if phase == "start":
            cls.collections.append(-time.thread_time())
        else:
            cls.collections[-1] += time.thread_time()

    def handle(self, event: Event, now: float) -> list[Action]:
        before, began, cpu = len(self.collections), time.perf_counter(), time.thread_time()
        actions = super().handle(event, now)
        own = time.thread_time() - cpu - sum(self.collections[before:])
        self.cpu.append(own)
        TimedCore.slowest = max(self.slowest, (own, type(event).__name__, now))
        self.elapsed.append(time.perf_counter() - began)
        if now >= len(self.sizes) * HOUR_S:
            state = len(pickle.dumps(self))
            counts = {
                "requests": len(self._agenda.open),
                "waiting": self.waiting_count,
                "groups": len(self.groups),
            }
            self.sizes.append({"hour": len(self.sizes), "state_bytes": state, **counts})
        return actions


def requests(end_s: float) -> Iterator[ModelRequest]:
    random = np.random.default_rng(0)
    weights = np.exp(SKEW * random.standard_normal(MODELS))
    chosen = random.choice(MODELS, int(RATE * DAY_S * 2), p=weights / weights.sum())
    now = 0.0
    for model in chosen:
        rate = RATE * (1 - 0.5 * math.cos(2 * math.pi * now / DAY_S))
        now += random.exponential(1 / rate)
        if now > end_s:
            return
        yield ModelRequest(now, f"m{model}", 1.5, 0.04, int(random.integers(20, 400)))


def faults(servers: list[ServerSpec], end_s: float) -> list[tuple[float, Event]]:
    random = np.random.default_rng(1)
    found: list[tuple[float, Event]] = [
        (0.0, events.LinkMeasured(server.name, server.network * random.uniform(0.8, 1.2)))
        for server in servers
    ]
    for hour, lost in enumerate(random.choice(SERVERS, int(end_s / HOUR_S), replace=False)):
        at = (hour + 0.5) * HOUR_S
        found += [
            (at, events.ServerLost(servers[lost].name)),
            (at + LOST_S, events.ServerJoined(servers[lost])),
        ]
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, and how many decisions took longer than the limit."""
    marks = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}
    found = {name: round(float(np.percentile(seconds, at)) * 1e3, 3) for name, at in marks.items()}
    return found | {"above_limit": sum(one > LIMIT_S for one in seconds)}


def main() -> None:
    end_s = float(sys.argv[1]) * HOUR_S if len(sys.argv) > 1 else DAY_S
    servers = [ServerSpec(f"s{n}", 24 * GB, 2 * GB, 12 * GB, 4) for n in range(SERVERS)]
    models = [FleetModel(f"m{n}", 13 * GB, 18 * GB, COSTS, 7.5, 0.2, idle_s=IDLE_S) for n in range(MODELS)]
    began = time.monotonic()
    gc.callbacks.append(TimedCore.note_collection)
    done = simulate(
        requests(end_s), servers, models, FleetSettings(), faults=faults(servers, end_s), core=TimedCore
    )
    sizes = [one["state_bytes"] for one in TimedCore.sizes]
    finish(
        "fleet-scale-simulated",
        {
            "kind": "simulated",
            "servers": SERVERS,
            "models": MODELS,
            "hours": end_s / HOUR_S,
            "run_s": round(time.monotonic() - began),
            "requests": len(done.records),
            "failed": sum(not one.ok for one in done.records),
            "decisions": len(TimedCore.cpu),
            "limit_ms": LIMIT_S * 1e3,
            "cpu_ms": spread(TimedCore.cpu),
            "elapsed_ms": spread(TimedCore.elapsed),
            "slowest": TimedCore.slowest,
            "collections_ms": spread(TimedCore.collections),
            "state_bytes": {"first": sizes[0], "most": max(sizes), "last": sizes[-1]},
            "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "counts": done.counts,
            "rows": TimedCore.sizes,
        },
    )


if __name__ == "__main__":
    main()
