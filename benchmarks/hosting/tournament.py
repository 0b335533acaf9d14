"""Three policies on the same traces of six models in 40 % of their memory, live; and what the simulator says of each run.

Each model is first started alone: what it holds and how long it takes then are what the host file says of it. The simulator is
the host's own core; it gets the same file, and of each live run how long that run's starts, departures and answers took. So
the two differ by what was decided when, not by how fast the machine was. All starts are forked from one runtime template of
the user's, which is nobody's memory here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean, median
from typing import Any

from cache_traces import Arrivals, gamma, renewal, zipf

from coldstart.host.configuration import parse
from coldstart.host.simulate import HostRequest, simulate
from hosting import sized
from hosting.live import MODELS, Live, hosting, table, templates

TRACES = ("bursts", "churn", "cron")
POLICIES = ("predictive", "gdsf", "lru")
SHARE, SEED = 0.4, 31
# Requests in a second: few enough that one loader keeps up.
RATE = 0.7
# Until it was measured for a second time, and the last models of a trace have answered.
SETTLE_S, TAIL_S = 1.6, 8.0


@dataclass(frozen=True)
class Sizes:
    """Of each model: bytes that it holds, seconds of a start, and of an answer by a server that is up."""

    memory: Mapping[str, int]
    start_s: Mapping[str, float]
    service_s: Mapping[str, float]


def prepare() -> None:
    """The models, and a runtime template for as long as nobody stops it."""
    sized.build()
    # By the words of a start without compiled code: what a template has read of its environment depends on that.
    templates(MODELS[:1], "runtime", sized.ARGS)


def trace(kind: str, seconds: float) -> Arrivals:
    """Arrivals of SHAPES' models within so many seconds."""
    random, names, count = Random(SEED), list(sized.SHAPES), round(RATE * seconds)
    if kind == "bursts":
        return gamma(4.0, names, random, count, seconds)
    if kind == "churn":
        part = seconds / 4
        parts = (gamma(1.0, names, random, count // 4, part) for _ in range(4))
        return [(number * part + when, name) for number, found in enumerate(parts) for when, name in found]
    return _cron(names, random, count, seconds)


def _cron(names: Sequence[str], random: Random, count: int, seconds: float) -> Arrivals:
    """Every other model is called on the clock, with jitter; the others at random."""
    shares, found = zipf(len(names), 1.0, random), list[tuple[float, str]]()
    for number, name in enumerate(names):
        if number % 2:
            found += [(t, name) for t in renewal(count * shares[number] / seconds, 1.0, seconds, random)]
        else:
            period = seconds / random.choice((3, 5, 8))
            start = random.uniform(0, period)
            beats = (start + beat * period for beat in range(9))
            found += [(max(0.0, t + random.gauss(0, period / 50)), name) for t in beats if t < seconds]
    return sorted(found)


async def tournament(kinds: Sequence[str], seconds: float) -> dict[str, Any]:
    """Each policy on each trace, which are as long as `seconds` for all together allow."""
    models = {name: _words(path) for name, path in sized.build().items()}
    began = time.monotonic()
    sizes = await _alone(models)
    left = seconds - (time.monotonic() - began)
    length = max(10.0, left / (len(kinds) * len(POLICIES)) - TAIL_S)
    runs = []
    for kind in kinds:
        arrivals = trace(kind, length)
        for policy in POLICIES:
            runs.append(
                {"trace": kind, "requests": len(arrivals), **await _run(models, sizes, arrivals, policy)}
            )
            print(json.dumps(runs[-1]), flush=True)
    return {
        "models": {
            name: {
                "memory_bytes": sizes.memory[name],
                "start_s": sizes.start_s[name],
                "service_s": sizes.service_s[name],
            }
            for name in models
        },
        "memory_share": SHARE,
        "trace_s": length,
        "runs": runs,
        "totals": _totals(runs),
    }


def _words(path: Any) -> dict[str, Any]:
    # Without a bundle: what is compared is who leaves, and the host's runtime template makes the starts short.
    return {"model": str(path), "args": sized.ARGS, "on_miss": "warn", "memory": "2GiB", "start_s": 3.0}


async def _alone(models: Mapping[str, Any]) -> Sizes:
    """Each model by itself."""
    memory, start_s, service_s = dict[str, int](), dict[str, float](), dict[str, float]()
    async with hosting(table(models, memory="4GiB", max_residents=1, runtime_template=False)) as live:
        for name in models:
            await _answered(live, name)
            service_s[name] = await _answered(live, name)
            await asyncio.sleep(SETTLE_S)
            said = await live.until(lambda said, name=name: _of(said, name)["memory_source"] == "observed")
            memory[name] = _of(said, name)["memory_bytes"]
            start_s[name] = float(_of(said, name)["last_start"]["seconds"])
    return Sizes(memory, start_s, service_s)


def _of(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(dict(model) for model in said["models"] if model["name"] == name)


async def _answered(live: Live, name: str) -> float:
    began = time.monotonic()
    status, body = await live.ask(name)
    assert status == 200, body
    return time.monotonic() - began


async def _run(models: Mapping[str, Any], sizes: Sizes, arrivals: Arrivals, policy: str) -> dict[str, Any]:
    given = {
        name: {**words, "memory": sizes.memory[name], "start_s": round(sizes.start_s[name], 3)}
        for name, words in models.items()
    }
    room = max(round(SHARE * sum(sizes.memory.values())), *sizes.memory.values())
    limits = {"memory": room, "policy": policy, "hold_s": 300.0, "runtime_template": False}
    async with hosting(table(given, **limits)) as live:
        waits = await _replayed(live, arrivals)
        said, log = await live.status(), live.log.read_text()
    seconds: dict[str, list[float]] = {}
    for one in said["recent_starts"]:
        seconds.setdefault(one["model"], []).append(one["seconds"])
    assert said["starts"]["total"] <= 100, "the status keeps the last hundred starts"
    found = {
        "policy": policy,
        "starts": said["starts"]["total"],
        "start_s": said["starts"]["seconds"],
        "hit_ratio": said["requests"]["hit_ratio"],
        "mean_wait_s": fmean(waits),
        "modes": sorted({str(one["mode"]) for one in said["recent_starts"]}),
        "failed": said["starts"]["failed"],
    }
    simulated = _simulated(given, room, policy, arrivals, seconds, _leave_s(log), sizes.service_s)
    return {
        **found,
        "simulated": simulated,
        "simulated_over_live": simulated["start_s"] / max(1e-9, found["start_s"]),
    }


async def _replayed(live: Live, arrivals: Arrivals) -> list[float]:
    """Seconds until each request was answered."""
    began, asked = time.monotonic(), []
    for when, name in arrivals:
        await asyncio.sleep(max(0.0, began + when - time.monotonic()))
        asked.append(asyncio.create_task(_answered(live, name)))
    return list(await asyncio.gather(*asked))


def _leave_s(log: str) -> float:
    """From the order to leave until the start that it made room for, as the log has them."""
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    events = [one for one in events if one["event"] in ("stop", "start")]
    return median(
        [_apart(a, b) for a, b in pairwise(events) if (a["event"], b["event"]) == ("stop", "start")] or [0.3]
    )


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    from datetime import datetime

    return (datetime.fromisoformat(other["ts"]) - datetime.fromisoformat(one["ts"])).total_seconds()


def _simulated(
    given: Mapping[str, Any], room: int, policy: str, arrivals: Arrivals,
    seconds: Mapping[str, list[float]], leave_s: float, service_s: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    file = parse({"memory": room, "policy": policy, "hold_s": 300.0, "models": dict(given)})
    requests: Iterator[HostRequest] = (HostRequest(when, name, service_s[name]) for when, name in arrivals)
    outcome = simulate(
        requests,
        file.models,
        file.settings,
        leave_s=leave_s,
        start_s=lambda start: fmean(seconds.get(start.model, [start.tier.penalty_s])),
    )
    return {
        "starts": outcome.starts,
        "start_s": outcome.start_s,
        "hit_ratio": outcome.hit_ratio,
        "leave_s": leave_s,
    }


def _totals(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Start-up seconds of each policy over all traces, live and simulated, and the first policy's share of the others'."""
    found: dict[str, Any] = {}
    for kind, of in (
        ("live", lambda run: run["start_s"]),
        ("simulated", lambda run: run["simulated"]["start_s"]),
    ):
        total = {policy: sum(of(run) for run in runs if run["policy"] == policy) for policy in POLICIES}
        ratios = {f"over_{other}": total[POLICIES[0]] / max(1e-9, total[other]) for other in POLICIES[1:]}
        found[kind] = {**total, **ratios}
    return found
