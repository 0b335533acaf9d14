"""FastServe's Figure 15: proactive and reactive swapping and recomputation, OPT-13B on 40 GB. Simulated.

(a) Mean latency per token over loads. (b) Time of the proactive strategy: a job whose rank earns a slot is swapping while its
copy is under way, and displaced while others use its memory. Then over link speeds. Lengths of the Azure conversation
trace instead of ShareGPT. Paper: 2.7x over recomputation, 1.7x over reactive, swapping below 5 % of latency.

Run: python -m benchmarks scheduling/figure15
Time: about 5 minutes
Result: figure15.json
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.common import finish
from benchmarks.scheduling.opt import OPT_13B, capacity, lengths, per_token, poisson
from coldstart.lab.scheduling import Outcome, simulate
from coldstart.scheduling import STRATEGIES, SchedulerSettings

REQUESTS, BATCH = 300, 16
LOADS, LINKS = (0.5, 0.8, 1.0, 1.2), (2e9, 5e9, 20e9, 60e9)
PAPER = {"over_recompute": 2.7, "over_reactive": 1.7, "swapping_percent": 5.0}
ALPHAS = {
    "0.3 s": SchedulerSettings(alpha_s=0.3, alpha_scale=4.0, promoted_cap=0.25),
    "10 s": SchedulerSettings(alpha_s=10.0, promoted_cap=0.25, alpha_scale=0.0),
    "60 s": SchedulerSettings(alpha_s=60.0, promoted_cap=0.1, alpha_scale=0.0),
}
COLLAPSE_LOAD = 0.5
"""Where the paper's alpha is shown: beyond it, strategies other than proactive take hours to simulate."""


def run(strategy: str, alpha: str, load: float, link: float, write_through: bool = False) -> Outcome:
    profile = OPT_13B.profile()
    # The paper's reactive swapping copies on the critical path; with blocks written through vLLM's does not.
    copies = "written-through" if write_through else "blocking" if strategy == "reactive" else "beside"
    rows = lengths(REQUESTS)
    rate = load * capacity(profile, rows, BATCH)
    settings = replace(ALPHAS[alpha], batch=BATCH, strategy=strategy)
    engine = OPT_13B.engine(link_bytes_s=link, copies=copies)
    return simulate(poisson(rows, rate, 1), profile, settings, engine)


def breakdown(outcome: Outcome) -> dict[str, float]:
    """Percent of all jobs' latency."""
    total = sum((j.finished_s or 0) - j.job.arrival_s for j in outcome.jobs)
    known = ("executing", "swapping", "displaced")
    parts = {name: sum(getattr(job, f"{name}_s") for job in outcome.jobs) for name in known}
    parts["queuing"] = total - sum(parts.values())
    return {name: 100 * part / total for name, part in parts.items()}


def row(alpha: str, load: float, link: float, write_through: bool = False) -> dict[str, Any]:
    outcomes = {s: run(s, alpha, load, link, write_through) for s in STRATEGIES}
    seconds = {s: per_token(outcome) for s, outcome in outcomes.items()}
    return {
        "alpha": alpha,
        "load": load,
        "link_gb_s": link / 1e9,
        "write_through": write_through,
        "s_per_token": seconds,
        "over_recompute": seconds["recompute"] / seconds["proactive"],
        "over_reactive": seconds["reactive"] / seconds["proactive"],
        "proactive_percent": breakdown(outcomes["proactive"]),
    }


def main() -> None:
    link_s = OPT_13B.link_bytes_s
    rows = [row(alpha, load, link_s) for alpha in ("10 s", "60 s") for load in LOADS]
    collapse = row("0.3 s", COLLAPSE_LOAD, link_s)
    links = [row("60 s", 1.0, link, through) for through in (False, True) for link in LINKS]
    result = {"kind": "simulated", "paper": PAPER}
    finish("figure15", {**result, "rows": rows, "links": links, "papers_alpha": [collapse]})


if __name__ == "__main__":
    main()
