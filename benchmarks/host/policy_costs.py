"""Cost of the default eviction policy with other model sizes and penalties, on the same families. Simulated.

Run: python -m benchmarks host/policy_costs
Time: about 5 minutes
Result: model-cache-costs.json
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from random import Random
from statistics import geometric_mean

from benchmarks.common import finish
from benchmarks.host.families import GB, HELD_OUT, TUNED, capacity, trace
from coldstart.host.policies import POLICIES, ModelCost, ShadowCache

SHARES, SEEDS = (0.2, 0.4, 0.6, 0.8), (0, 1)
OURS, AGAINST = "predictive", "gdsf"


def _size(random: Random, largest: float) -> float:
    return min(largest, max(1.0, random.lognormvariate(math.log(8), 0.95)))


def _proportional(random: Random) -> ModelCost:
    size = _size(random, 48.0)
    return ModelCost(round(size * GB), 0.5 + size / 2.0)


def _wide(random: Random) -> ModelCost:
    return ModelCost(round(_size(random, 140.0) * GB), random.lognormvariate(1, 1.2))


COSTS: dict[str, Callable[[Random], ModelCost]] = {
    "penalty by size, 2 GB/s": _proportional,
    "sizes to 140 GB, penalties log-normal, independent": _wide,
    "equal sizes, penalties 1 to 10 s": lambda random: ModelCost(10 * GB, random.uniform(1, 10)),
    "all models alike": lambda random: ModelCost(10 * GB, 5.0),
}


def ratios(family: str) -> dict[str, list[float]]:
    """By kind of costs: ours over GDSF, for each seed and cache size."""
    found: dict[str, list[float]] = {kind: [] for kind in COSTS}
    for seed, kind in product(SEEDS, COSTS):
        arrivals, models = trace(family, seed)
        random = Random(f"{kind}/{seed}")
        costs = {name: COSTS[kind](random) for name in models}
        for share in SHARES:
            lost = []
            for name in (OURS, AGAINST):
                size = capacity(costs, share)
                cache = ShadowCache(POLICIES[name](costs, size), costs, size)
                lost.append(sum(cache.request(model, now) for now, model in arrivals))
            found[kind].append(lost[0] / lost[1])
    return found


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        parts = list(pool.map(ratios, [*TUNED, *HELD_OUT]))
    rows = {}
    for kind in COSTS:
        ordered = sorted(ratio for part in parts for ratio in part[kind])
        tail = {"percentile_90": ordered[int(0.9 * (len(ordered) - 1))], "worst": ordered[-1]}
        rows[kind] = {k: round(v, 3) for k, v in {"geometric_mean": geometric_mean(ordered), **tail}.items()}
        print(f"{kind:<52}", rows[kind])
    finish("model-cache-costs", {"kind": "simulated", "ours": OURS, "against": AGAINST, "costs": rows})


if __name__ == "__main__":
    main()
