"""Cost of the host's policies over LRU on traces of a minute, on the live host's core. Simulated.

Twelve models of 0.48 to 1.3 GB that start in 0.45 to 1.1 s: the range of a recorded live host, and a little beyond. So short a
trace leaves a policy little to learn, and one trace decides little, so forty are drawn of each kind; the live comparison
(`host/live_policies`) has other ones. `estimates` are the start times that the host is given: those of the simulated starts,
or of a bundle, whose start imports vLLM (8 s more).

Run: python -m benchmarks host/short_traces
Time: about two minutes
Result: host-short-traces.json
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from random import Random
from typing import Any

from pandas import DataFrame

from benchmarks import traces
from benchmarks.common import finish
from benchmarks.host.baselines import GDSF
from benchmarks.host.families import Arrivals, churn, gamma, renewal, zipf
from coldstart.host.policies import POLICIES
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.lab.host import simulate
from coldstart.lab.records import ModelRequest

SHARE, RATE, SECONDS, SEEDS = 0.4, 0.9, 60.0, range(1000, 1040)
KINDS = ("bursts", "churn", "cron", "sessions", "functions")
NAMES = ("lru", "gdsf", "iam", "predictive")
IMPORTS_S, LEAVE_S = 8.0, 0.2
Models = Mapping[str, Mapping[str, Any]]
MODELS: Models = {
    f"m{i}": {"memory_bytes": 480_000_000 + 75_000_000 * i, "start_s": 0.45 + 0.06 * i, "service_s": 0.06}
    for i in range(12)
}


def draw(kind: str, names: list[str], seed: int, seconds: float) -> Arrivals:
    """Return bursts, a popularity shuffled three times, models called on the clock beside random ones, agents' sessions, or
    the invocations of as many functions of Azure's sample in `seconds`.
    """
    random, requests = Random(f"{kind}/{seed}"), round(RATE * seconds)
    shares, found = zipf(len(names), 1.0, random), Arrivals()
    if kind == "bursts":
        return gamma(4.0, names, random, requests, seconds)
    if kind == "churn":
        return churn(names, random, 4, requests // 4, seconds / 4)
    if kind == "functions":
        rows = traces.azure_functions()
        bound = dict(zip(random.sample(sorted({of for _, of in rows}), len(names)), names, strict=True))
        return sorted((at * seconds / 1201, bound[of]) for at, of in rows if of in bound)
    if kind == "sessions":
        for start in renewal(0.1, 1.0, seconds, random):
            team, now = random.choices(names, shares, k=random.choice((1, 2, 3))), start
            for turn in range(round(random.expovariate(1 / 8)) + 1):
                found.append((now, team[turn % len(team)]))
                now += random.lognormvariate(log(1.0), 1.0)
    else:
        for number, name in enumerate(names):
            if number % 2:
                found += [
                    (at, name) for at in renewal(requests * shares[number] / seconds, 1.0, seconds, random)
                ]
            else:
                period = seconds / random.choice((3, 5, 8))
                start = random.uniform(0, period)
                found += [
                    (max(0.0, start + n * period + random.gauss(0, period / 50)), name) for n in range(9)
                ]
    return sorted((at, name) for at, name in found if at < seconds)


def replay(
    policy: str, arrivals: Arrivals, models: Models, memory: int, estimates: Mapping[str, float] | None = None
) -> float:
    """Return the seconds of all starts of a simulated host that was given the estimates; None: the measured start times."""
    start_s = {name: one["start_s"] for name, one in models.items()}
    given = estimates or start_s
    specs = [ModelSpec.with_two_tiers(name, one["memory_bytes"], given[name]) for name, one in models.items()]
    requests = [ModelRequest(at, name, models[name]["service_s"]) for at, name in arrivals]
    settings = HostSettings(memory, policy=policy, hold_s=300.0)
    counts = simulate(
        requests, specs, settings, leave_s=LEAVE_S, start_s=lambda start: start_s[start.model]
    ).counts
    return float(counts["start_s"])


def limit(models: Models) -> int:
    """Return SHARE of the models' bytes, at least the size of the largest model."""
    sizes = [one["memory_bytes"] for one in models.values()]
    return int(max(round(SHARE * sum(sizes)), *sizes))


def main() -> None:
    POLICIES["gdsf"] = GDSF
    of_bundle = {name: one["start_s"] + IMPORTS_S for name, one in MODELS.items()}
    rows = []
    for estimates, given in (("right", None), ("of a bundle", of_bundle)):
        for kind in KINDS:
            drawn = [draw(kind, list(MODELS), seed, SECONDS) for seed in SEEDS]
            costs = DataFrame(
                {name: [replay(name, one, MODELS, limit(MODELS), given) for one in drawn] for name in NAMES}
            )
            over, ours, lru = costs.sum() / costs["lru"].sum(), costs["predictive"], costs["lru"]
            rows.append(
                {
                    "estimates": estimates,
                    "trace": kind,
                    "seeds": len(drawn),
                    "cost_over_lru": over.round(3).to_dict(),
                    "better": int((ours < lru).sum()),
                    "worse": int((ours > lru).sum()),
                    "deviation": round(float((ours / lru).std()), 3),
                }
            )
    finish(
        "host-short-traces", {"kind": "simulated", "memory_share": SHARE, "seconds": SECONDS, "rows": rows}
    )


if __name__ == "__main__":
    main()
