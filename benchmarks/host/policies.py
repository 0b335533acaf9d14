"""Cost of every eviction policy against GDSF: fifteen families of traces, four cache sizes, three seeds. Simulated.

Cost is the sum of the penalties of all misses. The `host` rows replay the requests on the host's core, where starts take time,
one at a time, and busy models stay; their cost is the seconds of all starts.

Run: python -m benchmarks host/policies
Time: about 15 minutes
Result: model-cache-simulated.json
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from random import Random
from statistics import geometric_mean
from typing import Any

from pandas import DataFrame

from benchmarks.common import finish
from benchmarks.host.baselines import GDSF, NAMES, LibCache, ShadowCache, cache
from benchmarks.host.families import HELD_OUT, TUNED, Arrivals, capacity, trace
from coldstart.host.policies import POLICIES, ModelCost
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.lab.host import simulate
from coldstart.lab.records import ModelRequest

SHARES = (0.2, 0.4, 0.6, 0.8)
SEEDS = (0, 1, 2)
OURS, AGAINST = "predictive", "gdsf"
HOST = ("lru", "gdsf", "iam", "predictive")
ASKED = {"geometric_mean": 0.88, "percentile_90": 1.08, "worst": 1.3}
SERVICE_S = 2.0
DIGITS = {"cost_s": 1, "hit_ratio": 4, "host_cost_s": 1}

Costs = dict[str, ModelCost]
Row = dict[str, Any]


def cells(family: str) -> list[Row]:
    """Return one row for each trace and cache size: costs in seconds by policy, on the bare cache and on the host."""
    return [_cell(family, seed, share) for seed in SEEDS for share in SHARES]


def _cell(family: str, seed: int, share: float) -> Row:
    arrivals, costs = trace(family, seed)
    size = capacity(costs, share)
    bare = {name: _replay(name, arrivals, costs, size) for name in NAMES}
    return {
        "family": family,
        "seed": seed,
        "share": share,
        "cost_s": {name: one.cost_s for name, one in bare.items()},
        "hit_ratio": {name: one.hits / one.requests for name, one in bare.items()},
        "host_cost_s": _on_host(arrivals, costs, size, seed),
    }


def _replay(name: str, arrivals: Arrivals, costs: Costs, size: int) -> ShadowCache | LibCache:
    replayed = cache(name, costs, size)
    for now, model in arrivals:
        replayed.request(model, now)
    return replayed


def _on_host(arrivals: Arrivals, costs: Costs, size: int, seed: int) -> dict[str, float]:
    POLICIES[AGAINST] = GDSF  # the simulated host makes its policy by name
    random = Random(seed)
    asked = [ModelRequest(now, model, random.expovariate(1 / SERVICE_S)) for now, model in arrivals]
    specs = [ModelSpec.with_two_tiers(name, cost.memory, cost.penalty_s) for name, cost in costs.items()]
    unlimited = {"max_held": len(asked), "hold_s": float("inf")}
    hosts = {name: HostSettings(size, policy=name, **unlimited) for name in HOST}  # type: ignore[arg-type]
    return {name: simulate(asked, specs, settings).counts["start_s"] for name, settings in hosts.items()}


def table(rows: list[Row], costs: str) -> dict[str, dict[str, float]]:
    """Return the geometric mean of each policy's cost over that of GDSF, by family and for groups of families."""
    ratios = DataFrame([row[costs] for row in rows], index=[row["family"] for row in rows])
    ratios = ratios.div(ratios[AGAINST], axis=0)
    families = list(ratios.index.unique())
    groups = {"tuned": [*TUNED], "held out": [*HELD_OUT], "all": families}
    found = {}
    for name, of in ratios.items():
        row = {family: geometric_mean(of[[family]]) for family in families}
        row |= {group: geometric_mean(of[members]) for group, members in groups.items()}
        for group, members in groups.items():
            row[f"{group}, percentile 90"] = of[members].quantile(0.9, interpolation="lower")
            row[f"{group}, worst"] = of[members].max()
        found[str(name)] = {key: round(float(value), 3) for key, value in row.items()}
    return found


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        rows = [row for part in pool.map(cells, [*TUNED, *HELD_OUT]) for row in part]
    result = {
        "kind": "simulated",
        "against": AGAINST,
        "asked": ASKED,
        "ours": OURS,
        "shares": SHARES,
        "seeds": SEEDS,
        "tuned_on": list(TUNED),
        "held_out": list(HELD_OUT),
        "cells": len(rows),
        "cost_over_gdsf": table(rows, "cost_s"),
        "cost_over_gdsf_on_host": table(rows, "host_cost_s"),
        "rows": [
            row
            | {
                key: {name: round(one, places) for name, one in row[key].items()}
                for key, places in DIGITS.items()
            }
            for row in rows
        ],
    }
    finish("model-cache-simulated", result)


if __name__ == "__main__":
    main()
