"""Cost of every eviction policy against GDSF: fifteen families of traces, four cache sizes, three seeds. Simulated.

Cost is the sum of the penalties of all misses. The `host` rows replay the requests on the host's core, where starts take time,
one at a time, and busy models stay; their cost is the seconds of all starts.

Run: python -m benchmarks host/policies
Time: about 15 minutes
Result: model-cache-simulated.json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from statistics import geometric_mean

from benchmarks.common import finish
from benchmarks.host.baselines import GDSF, NAMES, LibCache, ShadowCache, cache
from benchmarks.host.families import HELD_OUT, TUNED, Arrivals, capacity, trace
from benchmarks.host.offline import solve
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

Costs = dict[str, ModelCost]


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace with one cache size; costs in seconds by policy, on the bare cache and on the host."""

    family: str
    seed: int
    share: float
    metadata: dict[str, float]
    hit_ratio: dict[str, float]
    host: dict[str, float]


def cells(family: str) -> list[Cell]:
    return [_cell(family, seed, share) for seed in SEEDS for share in SHARES]


def _cell(family: str, seed: int, share: float) -> Cell:
    arrivals, costs = trace(family, seed)
    size = capacity(costs, share)
    bare = {name: _replay(name, arrivals, costs, size) for name in NAMES}
    offline = solve([model for _, model in arrivals], costs, size)
    metadata = {name: one.cost_s for name, one in bare.items()}
    metadata |= {"offline plan": offline.plan_s, "bound": offline.bound_s}
    hits = {name: one.hits / one.requests for name, one in bare.items()}
    return Cell(family, seed, share, metadata, hits, _on_host(arrivals, costs, size, seed))


def _replay(name: str, arrivals: Arrivals, costs: Costs, size: int) -> ShadowCache | LibCache:
    replayed = cache(name, costs, size)
    for now, model in arrivals:
        replayed.request(model, now)
    return replayed


def _on_host(arrivals: Arrivals, costs: Costs, size: int, seed: int) -> dict[str, float]:
    POLICIES[AGAINST] = GDSF  # the simulated host makes its policy by name
    random = Random(seed)
    asked = [ModelRequest(now, model, random.expovariate(1 / SERVICE_S)) for now, model in arrivals]
    specs = [ModelSpec.simple(name, cost.memory, cost.penalty_s) for name, cost in costs.items()]
    unlimited = {"max_held": len(asked), "hold_s": float("inf")}
    hosts = {name: HostSettings(size, policy=name, **unlimited) for name in HOST}  # type: ignore[arg-type]
    return {name: simulate(asked, specs, settings).counts["start_s"] for name, settings in hosts.items()}


def table(found: Sequence[Cell], costs: str) -> dict[str, dict[str, float]]:
    """Return the geometric mean of each policy's cost over that of GDSF, by group of families and for all cells."""
    names = getattr(found[0], costs)
    return {name: _row([(cell.family, _ratio(cell, costs, name)) for cell in found]) for name in names}


def _ratio(cell: Cell, costs: str, name: str) -> float:
    by_policy: dict[str, float] = getattr(cell, costs)
    return by_policy[name] / by_policy[AGAINST]


def _row(ratios: list[tuple[str, float]]) -> dict[str, float]:
    families = list(dict.fromkeys(family for family, _ in ratios))
    groups = {"tuned": list(TUNED), "held out": list(HELD_OUT), "all": families}
    row = {f: geometric_mean(r for g, r in ratios if g == f) for f in families}
    row |= {name: geometric_mean(r for f, r in ratios if f in group) for name, group in groups.items()}
    for name, group in groups.items():
        row |= {f"{name}, {k}": v for k, v in _tail([r for f, r in ratios if f in group])}
    return {key: round(value, 3) for key, value in row.items()}


def _tail(ratios: list[float]) -> Iterator[tuple[str, float]]:
    ordered = sorted(ratios)
    yield "percentile 90", ordered[int(0.9 * (len(ordered) - 1))]
    yield "worst", ordered[-1]


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        found = [cell for part in pool.map(cells, [*TUNED, *HELD_OUT]) for cell in part]
    metadata, host = table(found, "metadata"), table(found, "host")
    result = {
        "kind": "simulated",
        "against": AGAINST,
        "asked": ASKED,
        "ours": OURS,
        "shares": SHARES,
        "seeds": SEEDS,
        "tuned_on": list(TUNED),
        "held_out": list(HELD_OUT),
        "cells": len(found),
        "cost_over_gdsf": metadata,
        "cost_over_gdsf_on_host": host,
        "rows": [
            {"family": c.family, "seed": c.seed, "share": c.share}
            | {"cost_s": _rounded(c.metadata, 1), "hit_ratio": _rounded(c.hit_ratio, 4)}
            | {"host_cost_s": _rounded(c.host, 1)}
            for c in found
        ],
    }
    finish("model-cache-simulated", result)


def _rounded(values: dict[str, float], digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in values.items()}


if __name__ == "__main__":
    main()
