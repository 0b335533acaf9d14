"""Cost of the host's policies over LRU on traces of forty seconds, six models of nearly equal sizes. Simulated.

Sizes and start times are those of a live host, which measured `predictive` at 1.10 times LRU with one seed of each trace.
So short a trace leaves a policy little to learn, and one seed decides little: forty are drawn here.

Run: python -m benchmarks host/short_traces
Time: about a minute
Result: host-short-traces.json
"""

from __future__ import annotations

from random import Random

from benchmarks.common import finish
from benchmarks.host.baselines import cache
from benchmarks.host.families import Arrivals, gamma, renewal, zipf
from coldstart.host.policies import ModelCost

SIZES = (498980864, 530504704, 601885696, 665786368, 752096256, 841262080)
STARTS_S = (1.116, 0.499, 0.489, 0.593, 0.763, 0.855)
COSTS = {f"s{i}": ModelCost(size, start) for i, (size, start) in enumerate(zip(SIZES, STARTS_S, strict=True))}
ROOM = max(round(0.4 * sum(SIZES)), *SIZES)
SECONDS, REQUESTS, SEEDS = 40.0, 28, range(40)
NAMES = ("lru", "gdsf", "iam", "predictive")


def draw(kind: str, seed: int) -> Arrivals:
    """Return bursts, a popularity that is shuffled three times, or models called on the clock beside random ones."""
    random, names = Random(seed), list(COSTS)
    if kind == "bursts":
        return gamma(4.0, names, random, REQUESTS, SECONDS)
    if kind == "churn":
        part = SECONDS / 4
        parts = [gamma(1.0, names, random, REQUESTS // 4, part) for _ in range(4)]
        return [(number * part + when, name) for number, found in enumerate(parts) for when, name in found]
    shares, found = zipf(len(names), 1.0, random), Arrivals()
    for number, name in enumerate(names):
        if number % 2:
            times = list(renewal(REQUESTS * shares[number] / SECONDS, 1.0, SECONDS, random))
        else:
            period = SECONDS / random.choice((3, 5, 8))
            start = random.uniform(0, period)
            times = [max(0.0, start + beat * period + random.gauss(0, period / 50)) for beat in range(9)]
        found += [(time, name) for time in times if time < SECONDS]
    return sorted(found)


def cost(name: str, arrivals: Arrivals) -> float:
    replayed = cache(name, COSTS, ROOM)
    return sum(replayed.request(model, now) for now, model in arrivals)


def main() -> None:
    rows = []
    for kind in ("bursts", "churn", "cron"):
        traces = [found for seed in SEEDS if (found := draw(kind, seed))]
        costs = {name: [cost(name, found) for found in traces] for name in NAMES}
        pairs = list(zip(costs["predictive"], costs["lru"], strict=True))
        over = {name: round(sum(of) / sum(costs["lru"]), 3) for name, of in costs.items()}
        better, worse = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
        rows.append(
            {"trace": kind, "seeds": len(traces), "cost_over_lru": over, "better": better, "worse": worse}
        )
    finish("host-short-traces", {"kind": "simulated", "memory_share": 0.4, "rows": rows})


if __name__ == "__main__":
    main()
