"""Eviction policies on a live host: the default, IAM, LRU and GDSF with twelve models of real vLLM in 40 % of their memory.

Each model starts twice alone: its memory and its second start are what the host file says. Each round has a trace of its own
(`short_traces.draw`), which every policy gets in an order that is drawn for the round. `simulated_start_s` is the same trace on
the host's core in simulation. All starts are forked from the host's runtime template. The result is stored after each round, so
a run that is cut off retains its rounds.

Run: python -m benchmarks host/live_policies [--minutes M] [--rounds N] [--models N]
Time: 17 minutes on an idle machine, and once a minute more to write the models
Result: host-policies-live-cpu.json
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any

from pandas import DataFrame

from benchmarks import llama
from benchmarks.common import finish, parser
from benchmarks.host.baselines import GDSF
from benchmarks.host.families import Arrivals
from benchmarks.host.live import Live, hosting
from benchmarks.host.short_traces import SHARE, draw, limit, replay
from coldstart.host.live.profiles import RUNTIME_TEMPLATE_BYTES
from coldstart.host.policies import POLICIES
from coldstart.system.paths import Cache

RESULT = "host-policies-live-cpu"
ARGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "67108864", "--enforce-eager"]
COMPARED = ("predictive", "iam", "lru", "gdsf")
KINDS = ("bursts", "churn", "cron")
PROGRAM = [sys.executable, "-m", "benchmarks.host.baselines"]
# Beside its trace a run starts a host with its template, answers the last requests, and stops.
BESIDE_S, LEAST_S = 22.0, 10.0
Row = dict[str, Any]


def build(count: int) -> dict[str, Row]:
    """Return the table of each model in a host file; the checkpoints are written on first use."""
    place, tables = Cache.at().models / "bench-sized", dict[str, Row]()
    for name in llama.SIZED[:: len(llama.SIZED) // count][:count]:
        llama.build(name, place / name)
        # Without a bundle: the host's runtime template makes the starts short, and what is compared is who leaves.
        tables[name] = {"model": str(place / name), "args": ARGS, "on_miss": "warn"}
    return tables


async def until(ready: Any, what: str, seconds: float = 120.0) -> None:
    """Wait until `ready` returns a true value. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not await ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(0.05)


async def _template(live: Live) -> None:
    async def ready() -> bool:
        return '"template ready"' in live.log.read_text()

    await until(ready, "the runtime template")


async def _model(live: Live, name: str) -> Row:
    return next(dict(one) for one in (await live.status())["models"] if one["name"] == name)


async def _answer(live: Live, name: str, number: int) -> float:
    """Return the seconds until a request is answered."""
    began = time.monotonic()
    assert await live.ask(f"{name}-{number}", name) == 200, live.log.read_text()[-2000:]
    return time.monotonic() - began


async def alone(tables: Mapping[str, Row]) -> dict[str, Row]:
    """Return the memory, the seconds of a start and the seconds of an answer of each model."""
    given = {name: table | {"memory": "3GiB", "start_s": 3.0} for name, table in tables.items()}
    found: dict[str, Row] = {name: {} for name in tables}
    async with hosting(given, {"memory": "8GiB", "max_residents": 1}, PROGRAM) as live:
        await _template(live)
        # The first start of a model also reads its files from the disk.
        for number in range(2):
            for name, row in found.items():
                await _answer(live, name, 2 * number)
                row["service_s"] = await _answer(live, name, 2 * number + 1)

                async def observed(name: str = name) -> bool:
                    return bool((await _model(live, name))["memory_source"] == "observed")

                await until(observed, f"the memory of {name}")
                status = await _model(live, name)
                print(
                    name, round(status["last_start"]["seconds"], 2), "s", status["memory_bytes"], flush=True
                )
                row |= {"memory_bytes": status["memory_bytes"], "start_s": status["last_start"]["seconds"]}
    return found


async def measure(
    tables: Mapping[str, Row], models: Mapping[str, Row], arrivals: Arrivals, policy: str
) -> Row:
    """Return the starts, hits and waits of one policy on one trace."""
    given = {
        name: table | {"memory": models[name]["memory_bytes"], "start_s": round(models[name]["start_s"], 3)}
        for name, table in tables.items()
    }
    memory = limit(models) + RUNTIME_TEMPLATE_BYTES
    async with hosting(given, {"memory": memory, "policy": policy, "hold_s": 300.0}, PROGRAM) as live:
        await _template(live)
        began, asked = time.monotonic(), []
        for number, (at, name) in enumerate(arrivals):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            asked.append(asyncio.create_task(_answer(live, name, number)))
        waits = await asyncio.gather(*asked)
        status = await live.status()
    starts = status["starts"]
    return {
        "policy": policy,
        "starts": starts["total"],
        "failed": starts["failed"],
        "start_s": starts["seconds"],
        "hit_ratio": status["requests"]["hit_ratio"],
        "mean_latency_s": fmean(waits),
        "modes": sorted({str(one["mode"]) for one in status["recent_starts"]}),
        "simulated_start_s": replay(policy, arrivals, models, limit(models)),
    }


def totals(rounds: Sequence[Row]) -> list[Row]:
    """Return one row for each policy over all rounds."""
    runs = DataFrame([{"round": number, **run} for number, one in enumerate(rounds) for run in one["runs"]])
    by_policy = runs.groupby("policy")
    sums = by_policy[["starts", "start_s", "simulated_start_s"]].sum()
    over = (sums / sums.loc["lru"])[["start_s", "simulated_start_s"]].add_suffix("_over_lru")
    table = sums.join([by_policy[["hit_ratio", "mean_latency_s"]].mean(), over]).to_dict("index")
    seconds = runs.pivot_table(index="round", columns="policy", values="start_s")
    by_round = seconds.div(seconds["lru"], axis=0).round(3)
    return [{"policy": one, **table[one], "over_lru_by_round": by_round[one].tolist()} for one in COMPARED]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--minutes", type=float, default=17.0, help="time of all rounds and of the starts alone"
    )
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument(
        "--models", type=int, default=len(llama.SIZED), choices=range(2, len(llama.SIZED) + 1)
    )
    given = arguments.parse_args()
    POLICIES["gdsf"] = GDSF
    tables = build(given.models)
    end, load_before = time.monotonic() + 60 * given.minutes, os.getloadavg()[0]
    models = asyncio.run(alone(tables))
    rounds: list[Row] = []
    for number in range(given.rounds):
        each = (end - time.monotonic()) / (given.rounds - number) / len(COMPARED) - BESIDE_S
        seconds, kind = max(LEAST_S, each), KINDS[number % len(KINDS)]
        arrivals, runs = draw(kind, list(models), number, seconds), []
        for policy in Random(number).sample(COMPARED, len(COMPARED)):
            runs.append(asyncio.run(measure(tables, models, arrivals, policy)))
            print(runs[-1], flush=True)
        rounds.append({"trace": kind, "seconds": seconds, "requests": len(arrivals), "runs": runs})
        facts = {"kind": "measured", "load_before": load_before, "memory_share": SHARE, "models": models}
        finish(RESULT, facts | {"rounds": rounds, "totals": totals(rounds)})


if __name__ == "__main__":
    main()
