"""A day of 1,000 servers and 10,000 models: time of each decision of the live core, and the size of its state. Simulated.

docs/reference/fleet-measurements.md describes the servers, the load and the faults.

Run: python -m benchmarks fleet/scale [HOURS]
Time: about five minutes for 24 hours
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
from coldstart.lab.records import SimulatedRequest

GB, HOUR_S, DAY_S = 10**9, 3600.0, 86_400.0
SERVERS, MODELS, RATE, SKEW, IDLE_S, LOST_S = 1_000, 10_000, 4.0, 2.0, 900.0, 600.0
COSTS, LIMIT_S = Costs(2.0, 1.0, 1.0, 0.2, 0.001, 1.5, 0.04), 0.005

CPU_S, COLLECTIONS_S, STATE_BYTES = list[float](), list[float](), list[int]()
"""CPU time of each decision and of each of Python's collections, and the size of the core in each hour."""


def note_collection(phase: str, _: object) -> None:
    if phase == "start":
        COLLECTIONS_S.append(-time.thread_time())
    else:
        COLLECTIONS_S[-1] += time.thread_time()


class TimedCore(FleetCore):
    """Core that measures its decisions, and its size at the first event of each hour."""

    def handle(self, event: Event, now: float) -> list[Action]:
        before, began = len(COLLECTIONS_S), time.thread_time()
        actions = super().handle(event, now)
        CPU_S.append(time.thread_time() - began - sum(COLLECTIONS_S[before:]))
        if now >= len(STATE_BYTES) * HOUR_S:
            STATE_BYTES.append(len(pickle.dumps(self)))
            gc.freeze()
        return actions


def draw_requests(end_s: float) -> Iterator[SimulatedRequest]:
    random = np.random.default_rng(0)
    weights = np.exp(SKEW * random.standard_normal(MODELS))
    chosen = random.choice(MODELS, int(RATE * DAY_S * 2), p=weights / weights.sum())
    now = 0.0
    for model in chosen:
        rate = RATE * (1 - 0.5 * math.cos(2 * math.pi * now / DAY_S))
        now += random.exponential(1 / rate)
        if now > end_s:
            return
        yield SimulatedRequest(now, f"m{model}", 1.5, 0.04, int(random.integers(20, 400)))


def draw_faults(servers: list[ServerSpec], end_s: float) -> list[tuple[float, Event]]:
    random, found = np.random.default_rng(1), list[tuple[float, Event]]()
    for server in servers:
        found.append((0.0, events.LinkMeasured(server.name, server.network * random.uniform(0.8, 1.2))))
    for hour, lost in enumerate(random.choice(SERVERS, int(end_s / HOUR_S), replace=False)):
        at = (hour + 0.5) * HOUR_S
        found.append((at, events.ServerLost(servers[lost].name)))
        found.append((at + LOST_S, events.ServerJoined(servers[lost])))
    return found


def summarize(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, and how many decisions took longer than the limit."""
    marks = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}
    found = {name: round(float(np.percentile(seconds, at)) * 1e3, 3) for name, at in marks.items()}
    return found | {"above_limit": sum(one > LIMIT_S for one in seconds)}


def main() -> None:
    end_s = float(sys.argv[1]) * HOUR_S if len(sys.argv) > 1 else DAY_S
    servers = [ServerSpec(f"s{n}", 24 * GB, 2 * GB, 12 * GB, 4) for n in range(SERVERS)]
    models = [FleetModel(f"m{n}", 13 * GB, 18 * GB, COSTS, 7.5, 0.2, idle_s=IDLE_S) for n in range(MODELS)]
    began, faults = time.monotonic(), draw_faults(servers, end_s)
    gc.callbacks.append(note_collection)
    asked, settings = draw_requests(end_s), FleetSettings()
    done = simulate(asked, servers, models, settings, faults=faults, core=TimedCore)
    result = {
        "kind": "simulated",
        "servers": SERVERS,
        "models": MODELS,
        "hours": end_s / HOUR_S,
        "run_s": round(time.monotonic() - began),
        "requests": len(done.records),
        "failed": sum(not one.ok for one in done.records),
        "decisions": len(CPU_S),
        "limit_ms": LIMIT_S * 1e3,
        "cpu_ms": summarize(CPU_S),
        "collections_ms": summarize(COLLECTIONS_S),
        "state_bytes": {"first": STATE_BYTES[0], "most": max(STATE_BYTES), "last": STATE_BYTES[-1]},
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "counts": done.counts,
    }
    finish("fleet-scale-simulated", result)


if __name__ == "__main__":
    main()
