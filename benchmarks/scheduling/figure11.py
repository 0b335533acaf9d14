"""FastServe's Figure 11: mean latency per token over arrival rates, three OPT models. Simulated.

FCFS and skip-join MLFQ with the same batch, and FCFS with the largest batch that memory allows, which the paper lacks. Poisson
arrivals, lengths of the Azure conversation trace instead of ShareGPT, SLO 0.3 s per token, alpha 60 s. Paper: FastServe
sustains 2 to 4x the rate of its FCFS.

Run: python -m benchmarks scheduling/figure11
Time: about 2 minutes
Result: figure11.json
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common import finish
from benchmarks.scheduling.opt import OPT_13B, OPT_66B, OPT_175B, Model, capacity, lengths, per_token, poisson
from coldstart.lab.scheduling import simulate
from coldstart.scheduling import SchedulerSettings

SLO_S, REQUESTS, BATCH = 0.3, 300, 16
LOADS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
SYSTEMS = {
    "fcfs": ("fcfs", BATCH, "recompute"),
    "skip-join-mlfq": ("skip-join-mlfq", BATCH, "proactive"),
    "fcfs-largest-batch": ("fcfs", 256, "recompute"),
}
TUNABLES = SchedulerSettings(alpha_s=60.0, promoted_cap=0.1, alpha_scale=0.0)


def latency(model: Model, system: str, rate: float) -> float:
    policy, batch, strategy = SYSTEMS[system]
    settings = replace(TUNABLES, policy=policy, batch=batch, strategy=strategy)
    rows = poisson(lengths(REQUESTS), rate, seed=1)
    return per_token(simulate(rows, model.profile(), settings, model.engine(copies="beside")))


def sustained(points: list[tuple[float, float]]) -> float:
    """The largest rate within the SLO, interpolated; beyond the last point is the last point."""
    best = 0.0
    for (r0, l0), (r1, l1) in zip([(0.0, 0.0), *points], points, strict=False):
        if l1 <= SLO_S:
            best = r1
        elif l0 <= SLO_S:
            return r0 + (r1 - r0) * (SLO_S - l0) / (l1 - l0)
    return best


def main() -> None:
    models = []
    for model in (OPT_13B, OPT_66B, OPT_175B):
        full = capacity(model.profile(), lengths(REQUESTS), BATCH)
        curves = {s: [(full * x, latency(model, s, full * x)) for x in LOADS] for s in SYSTEMS}
        rates = {system: sustained(points) for system, points in curves.items()}
        gain = {s: rates["skip-join-mlfq"] / rates[s] if rates[s] else None for s in SYSTEMS}
        models.append({"model": model.name, "curves": curves, "sustained_per_s": rates, "ours_over": gain})
    finish("figure11", {"kind": "simulated", "slo_s": SLO_S, "paper_over_fcfs": [2, 4], "models": models})


if __name__ == "__main__":
    main()
