"""FastServe's Figures 8, 11, 14 and 15 with OPT models, on vLLM's own scheduler with a virtual clock. Simulated.

Profiles are roofline models, not measurements: an iteration reads the weights once and computes two FLOPs per parameter and
token, t = max(weights / bandwidth, 2 P tokens / flops), devices in tensor parallel. They are set so that OPT-13B on one
A100-40GB takes about 30 ms to decode, the paper's SLO (0.3 s) over ten. Lengths are those of the Azure conversation trace
instead of ShareGPT. In Figure 15 vLLM's connector copies blocks as they fill, which the paper's reactive swapping does not.

Run: python -m benchmarks scheduling/figures [--figure N]
Time: about 20 minutes
Result: figure8.json and one for each other figure
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice, product
from math import log
from random import Random
from statistics import fmean, pstdev
from typing import Any

from benchmarks.common import finish, parser
from benchmarks.scheduling.baselines import FixedPriorityScheduler, NaiveMlfqScheduler, SrptScheduler
from benchmarks.traces import azure_conversation
from coldstart.lab.engine import EngineSimulator
from coldstart.lab.plan import rearrive
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import STRATEGIES, IterationProfile, SchedulerSettings
from coldstart.vllm.scheduling.scheduler import PolicyScheduler
from coldstart.vllm.scheduling.virtual_engine import EngineResources

BANDWIDTH, FLOPS = 1.555e12 * 0.6, 312e12 * 0.5
OVERHEAD_S = 2e-3
GIB = 1 << 30
BLOCK = 16
MLFQ, FCFS = "skip-join-mlfq", "fcfs"


@dataclass(frozen=True, slots=True)
class Model:
    """Table 1: parameters, layers, hidden size; and the GPUs it is served on."""

    name: str
    parameters: float
    layers: int
    hidden: int
    gpus: int

    @property
    def kv_bytes_per_token(self) -> int:
        """4 * l * h bytes in FP16 (section 4.2)."""
        return 4 * self.layers * self.hidden

    def machine(self, **settings: Any) -> EngineResources:
        """Return the engine with this model's memory beside the weights and a tenth for activations.

        FastServe bounds the batch, but not the preempted requests that retain KV: there are more slots than requests.
        """
        kv_bytes = 0.9 * 40 * GIB * self.gpus - 2 * self.parameters
        known: dict[str, Any] = {
            "slots": 4096,
            "block_tokens": BLOCK,
            "device_blocks": int(kv_bytes / self.kv_bytes_per_token) // BLOCK,
            "block_bytes": self.kv_bytes_per_token * BLOCK // self.gpus,
            "context_s": self.kv_bytes_per_token / (BANDWIDTH * self.gpus),
            "depth": 1,
        }
        return EngineResources(**known | settings)

    def profile(self) -> IterationProfile:
        floor = 2 * self.parameters / (BANDWIDTH * self.gpus) + OVERHEAD_S
        per_token = 2 * self.parameters / (FLOPS * self.gpus)
        prefill = [
            (n, max(floor, OVERHEAD_S + n * per_token)) for n in (1, 64, 128, 256, 512, 1024, 2048, 4096)
        ]
        decode = [(b, max(floor, OVERHEAD_S + b * per_token) + 2e-5 * b) for b in (1, 8, 32, 128, 256)]
        return IterationProfile.create(prefill, decode)


OPT_2_7B = Model("OPT-2.7B", 2.7e9, 32, 2560, 1)
OPT_13B = Model("OPT-13B", 13e9, 40, 5120, 1)
OPT_66B = Model("OPT-66B", 66e9, 64, 9216, 4)
OPT_175B = Model("OPT-175B", 175e9, 96, 12288, 16)


def lengths(count: int, longest: int = 2048) -> list[TraceRequest]:
    """Return rows of the Azure conversation trace (2023) whose context fits OPT's 2,048 positions."""
    rows = (row for row in azure_conversation() if row.prompt_tokens + row.output_tokens <= longest)
    return list(islice(rows, count))


def skewed(count: int, longest: int = 2048) -> list[TraceRequest]:
    """Return log-normal lengths with a long tail (sigma 1.4), clipped: the skew that ShareGPT stands for."""
    random = Random(5)

    def draw(median: float) -> int:
        return max(1, min(longest // 2, round(random.lognormvariate(log(median), 1.4))))

    return [TraceRequest(0.0, draw(100), draw(60)) for _ in range(count)]


def capacity(model: Model, rows: list[TraceRequest], batch: int) -> float:
    """Return the requests per second that a full batch finishes: load 1."""
    profile = model.profile()
    each = (profile.prefill(r.prompt_tokens) + r.output_tokens * profile.decode(batch) / batch for r in rows)
    return 1 / fmean(each)


def simulate(
    model: Model,
    rows: Iterable[TraceRequest],
    settings: SchedulerSettings,
    scheduler: type[PolicyScheduler] = PolicyScheduler,
    **machine: Any,
) -> EngineSimulator:
    simulator = EngineSimulator(
        model.profile(), settings, model.machine(**machine), policy_scheduler=scheduler
    )
    simulator.run(rows)
    return simulator


def per_token(done: EngineSimulator) -> float:
    """Return the mean of end-to-end latency over output length, in seconds (section 6.1)."""
    return fmean(record.normalized_s or 0.0 for record in done.records)


def figure8() -> dict[str, Any]:
    """KV memory of skip-join MLFQ and FCFS; Gamma arrivals at 64/s with CV 4, at most 20 output tokens, five seconds."""

    def peak_gb(policy: str, batch: int, seed: int) -> float:
        short = [replace(row, output_tokens=min(20, row.output_tokens)) for row in lengths(1000)]
        arrivals = [row for row in rearrive(short, 64, 4, seed) if row.arrival_s <= 5.0]
        settings = SchedulerSettings(policy, batch=batch, mlfq="paper")
        done = simulate(OPT_2_7B, arrivals, settings, device_blocks=1 << 17)
        return done.engine.counts.peak_blocks * OPT_2_7B.kv_bytes_per_token * BLOCK / 1e9

    rows = []
    for batch, seed in product((16, 32, 64), range(3)):
        ours, fcfs = (peak_gb(policy, batch, seed) for policy in (MLFQ, FCFS))
        rows.append({"batch": batch, "seed": seed, "mlfq_gb": ours, "fcfs_gb": fcfs, "ratio": ours / fcfs})
    return {"kind": "simulated", "paper_ratio": 7.0, "rows": rows}


def figure11() -> dict[str, Any]:
    """Mean latency per token over arrival rates; also FCFS with the largest batch that memory allows. Alpha is 60 s."""
    slo_s, batch, loads = 0.3, 16, (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
    systems = {
        FCFS: (FCFS, batch, "recompute"),
        MLFQ: (MLFQ, batch, "proactive"),
        "fcfs-largest-batch": (FCFS, 256, "recompute"),
    }
    patient = SchedulerSettings(alpha_s=60.0, promoted_cap=0.1, alpha_scale=0.0)

    def latency(model: Model, system: str, rate: float) -> float:
        policy, size, strategy = systems[system]
        settings = replace(patient, policy=policy, batch=size, strategy=strategy)  # type: ignore[arg-type]
        return per_token(simulate(model, rearrive(lengths(300), rate, 1, 1), settings))

    def sustained(points: list[tuple[float, float]]) -> float:
        """Return the largest rate within the SLO, interpolated; at most the last point."""
        best = 0.0
        for (r0, l0), (r1, l1) in zip([(0.0, 0.0), *points], points, strict=False):
            if l1 <= slo_s:
                best = r1
            elif l0 <= slo_s:
                return r0 + (r1 - r0) * (slo_s - l0) / (l1 - l0)
        return best

    models = []
    for model in (OPT_13B, OPT_66B, OPT_175B):
        full = capacity(model, lengths(300), batch)
        curves = {s: [(full * load, latency(model, s, full * load)) for load in loads] for s in systems}
        rates = {system: sustained(points) for system, points in curves.items()}
        gain = {system: rates[MLFQ] / rate if rate else None for system, rate in rates.items()}
        models.append({"model": model.name, "curves": curves, "sustained_per_s": rates, "ours_over": gain})
    return {"kind": "simulated", "slo_s": slo_s, "paper_over_fcfs": [2, 4], "models": models}


def figure14() -> dict[str, Any]:
    """Four policies and SRPT over the ratio of input to output length. The mean total length stays; memory is not limited."""
    sources: dict[str, Callable[[int], list[TraceRequest]]] = {"azure": lengths, "log-normal": skewed}
    batch, requests = 8, 250
    own = SchedulerSettings(batch=batch)
    paper = replace(own, alpha_s=60.0, mlfq="paper")
    policies: dict[str, tuple[SchedulerSettings, type[PolicyScheduler]]] = {
        FCFS: (replace(own, policy=FCFS), PolicyScheduler),
        "fixed-priority": (own, FixedPriorityScheduler),
        "naive-mlfq": (own, NaiveMlfqScheduler),
        MLFQ: (own, PolicyScheduler),
        "naive-mlfq, alpha 60 s": (paper, NaiveMlfqScheduler),
        f"{MLFQ}, alpha 60 s": (paper, PolicyScheduler),
        "srpt": (own, SrptScheduler),
    }

    def split(rows: list[TraceRequest], ratio: float) -> list[TraceRequest]:
        """Scale both lengths to mean input / mean output = ratio, at least one token each."""
        prompt, output = fmean(r.prompt_tokens for r in rows), fmean(r.output_tokens for r in rows)
        more, less = (
            (prompt + output) * ratio / (1 + ratio) / prompt,
            (prompt + output) / (1 + ratio) / output,
        )
        sizes = ((max(1, round(r.prompt_tokens * more)), max(1, round(r.output_tokens * less))) for r in rows)
        return [TraceRequest(0.0, *size) for size in sizes]

    def latencies(source: str, ratio: float, load: float) -> dict[str, float]:
        rows = split(sources[source](requests), ratio)
        rate = load * capacity(OPT_13B, rows, batch)
        return {
            name: per_token(
                simulate(OPT_13B, rearrive(rows, rate, 1, 1), settings, scheduler, device_blocks=1 << 16)
            )
            for name, (settings, scheduler) in policies.items()
        }

    def spread(rows: list[TraceRequest]) -> float:
        outputs = [row.output_tokens for row in rows]
        return pstdev(outputs) / fmean(outputs)

    rows = [
        {"lengths": source, "load": load, "ratio": ratio, "s_per_token": latencies(source, ratio, load)}
        for source, load, ratio in product(sources, (0.9, 1.2), (0.25, 1, 4, 16, 64, 256))
    ]
    return {
        "kind": "simulated",
        "paper_most": {FCFS: 8.9, "naive-mlfq": 1.87, "fixed-priority": 13.9},
        "cv_of_outputs": {source: spread(create(requests)) for source, create in sources.items()},
        "rows": rows,
    }


def figure15() -> dict[str, Any]:
    """Proactive and reactive swapping and recomputation, OPT-13B on 40 GB, over loads, starvation limits and link speeds.

    A request whose rank earns a slot is swapping while its copy is in progress, and displaced while others use its memory.
    """
    requests, batch, link = 300, 16, 20e9
    alphas = {
        "0.3 s": SchedulerSettings(alpha_s=0.3, alpha_scale=4.0, promoted_cap=0.25),
        "10 s": SchedulerSettings(alpha_s=10.0, promoted_cap=0.25, alpha_scale=0.0),
        "60 s": SchedulerSettings(alpha_s=60.0, promoted_cap=0.1, alpha_scale=0.0),
    }

    def percent(done: EngineSimulator) -> dict[str, float]:
        total = sum(record.latency_s or 0.0 for record in done.records)
        counters = done.engine.scheduler.counters
        waits = {
            "swapping": counters.loading_seconds,
            "displaced": counters.blocked_on_loads_seconds - counters.loading_seconds,
        }
        return {name: 100 * seconds / total for name, seconds in waits.items()}

    def row(alpha: str, load: float, link: float) -> dict[str, Any]:
        rows = lengths(requests)
        rate = load * capacity(OPT_13B, rows, batch)
        done = {
            strategy: simulate(
                OPT_13B,
                rearrive(rows, rate, 1, 1),
                replace(alphas[alpha], batch=batch, strategy=strategy),
                link_bytes_s=link,
            )
            for strategy in STRATEGIES
        }
        seconds = {strategy: per_token(each) for strategy, each in done.items()}
        return {
            "alpha": alpha,
            "load": load,
            "link_gb_s": link / 1e9,
            "s_per_token": seconds,
            "over_recompute": seconds["recompute"] / seconds["proactive"],
            "over_reactive": seconds["reactive"] / seconds["proactive"],
            "proactive_percent": percent(done["proactive"]),
        }

    return {
        "kind": "simulated",
        "paper": {"over_recompute": 2.7, "over_reactive": 1.7, "swapping_percent": 5.0},
        "rows": [row(alpha, load, link) for alpha, load in product(("10 s", "60 s"), (0.5, 0.8, 1.0, 1.2))],
        "links": [row("60 s", 1.0, speed) for speed in (2e9, 5e9, 20e9, 60e9)],
        # Beyond this load, strategies other than proactive take hours to simulate with the paper's alpha.
        "papers_alpha": [row("0.3 s", 0.5, link)],
    }


FIGURES = {"8": figure8, "11": figure11, "14": figure14, "15": figure15}


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--figure", choices=FIGURES, help="only this figure")
    wanted = options.parse_args(argv).figure
    for number, create in FIGURES.items():
        if wanted in (None, number):
            finish(f"figure{number}", create())


if __name__ == "__main__":
    main(sys.argv[1:])
