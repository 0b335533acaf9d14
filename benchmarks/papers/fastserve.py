"""FastServe's figures 1, 5, 7, 8 and 11 to 15, on the server's policies with a simulated engine of the paper's kind.

Run: python -m benchmarks papers/fastserve [NUMBER...], or papers/fastserve-NUMBER
Time: some minutes for each
Result: papers/fastserve-1.json and one for each other figure
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from statistics import fmean
from typing import Any, cast

from benchmarks.papers import Found, Rows, declare, engine, run
from benchmarks.papers.engine import OPT_2_7B, OPT_13B, OPT_66B, OPT_175B, Engine, NaiveMlfq, Request
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import SkipJoinMlfq
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings

BATCH, SLO_S, COUNT, MANY = 16, 0.3, 160, 1000
FORMS = {
    "FastServe": engine.mlfq(),
    "FastServe, alpha 60 s": engine.mlfq(60.0),
    "tempered": engine.mlfq(form="tempered"),
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "FasterTransformer": {"order": engine.fcfs, "whole": True},
    "FCFS": {"order": engine.fcfs},
    **{form: {"order": order} for form, order in FORMS.items()},
}
Judge = Callable[[Sequence[Request]], float]


def serve(model: engine.Model, system: str, sizes: engine.Sizes, rate: float) -> list[Request]:
    return Engine(model, **SYSTEMS[system], batch=BATCH).run(engine.arrive(sizes, rate))


def mean(done: Sequence[Request]) -> float:
    return fmean(one.per_token_s for one in done)


def p95(done: Sequence[Request]) -> float:
    return sorted(one.per_token_s for one in done)[int(0.95 * len(done))]


def find_rates(
    model: engine.Model, sizes: engine.Sizes, judge: Judge, limit: float = SLO_S
) -> dict[str, float]:
    """Return the highest rate of each system at which `judge` is within the limit, within 12 %; 0 if there is none.

    The rates are from 5 % of what a full batch finishes to three times that.
    """
    top, found = engine.capacity(model, sizes, BATCH), {}
    for system in SYSTEMS:
        low, high = 0.05 * top, 3 * top
        if judge(serve(model, system, sizes, low)) > limit:
            low = high = 0.0
        while high > 1.12 * low:
            middle = (low * high) ** 0.5
            within = judge(serve(model, system, sizes, middle)) <= limit
            low, high = (middle, high) if within else (low, middle)
        found[system] = low
    return found


def compare(found: Mapping[str, float], base: str) -> str:
    """Return the gain of each form of the queues over a system."""
    shown = (f"{name} {found[name] / found[base]:.2f}x" if found[base] else f"{name} > 0" for name in FORMS)
    return ", ".join(shown)


def figure1() -> Found:
    """Share of queueing in the latency of FCFS."""
    works = {
        "fixed lengths": [(128, 128)] * MANY,
        "Alpaca": engine.alpaca(MANY),
        "ShareGPT": engine.sharegpt(MANY),
    }
    paper = {"fixed lengths": (2.0, 2.0), "Alpaca": (20.3, 87.6), "ShareGPT": (39.9, 92.7)}
    rows, shares = Rows(), {}
    for (name, sizes), (at, load) in product(works.items(), enumerate((0.9, 1.0))):
        done = serve(OPT_13B, "FCFS", sizes, load * engine.capacity(OPT_13B, sizes, BATCH))
        total = sum(one.latency_s for one in done)
        ours = 100 * (total - sum(one.running_s for one in done)) / total
        shares[f"{name}, {load}"] = ours
        rows.append((f"queueing, {name}, load {load}", f"{paper[name][at]} %", f"{ours:.1f} %"))
    return rows, {"percent": shares}


def figure5() -> Found:
    """Times of the first four iterations by input length."""
    profile = OPT_2_7B.profile()
    times = {n: [profile.prefill(n), *[profile.decode(1)] * 3] for n in (128, 256, 512, 1024)}
    firsts, (first, second, *_) = [each[0] for each in times.values()], times[1024]
    paper = "about 0.09 s, a multiple of the second"
    shown = f"{first:.3f} s, {first / second:.1f} times the second"
    longer = "does not decrease" if firsts == sorted(firsts) else "decreases"
    return [
        ("first iteration with 1,024 tokens", paper, shown),
        ("first iteration over the input length", "increases", longer),
    ], {"seconds": times}


@dataclass(slots=True, eq=False)
class TimedJob(Job):
    """Job whose iterations take given times."""

    times: tuple[float, ...] = ()

    def predict_iteration_s(self, profile: IterationProfile, batch: int = 1) -> float:
        return self.times[self.generated_tokens]


EXAMPLE = ((0.5, 1.0), (2.5, 1.25), (0.25, 0.5))
"""T1 and T2 of the three jobs, with two iterations in T2: the paper prints no times; these come closest to its averages."""
UNIT = IterationProfile.create([(1, 1.0)], [(1, 1.0)])


def serve_example(order: engine.Policy) -> float:
    """Return the average latency of the example, one job at a time."""
    now, ends = 0.0, []
    for number, (first, rest) in enumerate(EXAMPLE):
        order.add(TimedJob(str(number), 0.0, 1, times=(first, rest / 2, rest / 2)), now)
    while len(order):
        order.promote_starved_jobs(now, 1)
        job = cast(TimedJob, next(iter(order)))
        seconds = job.times[job.generated_tokens]
        now, job.generated_tokens = now + seconds, job.generated_tokens + 1
        if job.generated_tokens == len(job.times):
            order.remove(job)
            ends.append(now)
        else:
            order.add_service(job, seconds, now)
    return fmean(ends)


def figure7() -> Found:
    """Average latency of three jobs that arrive at once, four queues with quanta 1, 2, 4 and 8, one job at a time."""
    settings = SchedulerSettings(first_quantum_s=1.0, levels=4, alpha_s=1e18, mlfq="paper")
    shortest = engine.Ranked(lambda job: sum(cast(TimedJob, job).times[job.generated_tokens :]))
    orders = {
        "FCFS": ("4.23", engine.fcfs(UNIT)),
        "original MLFQ": ("5", NaiveMlfq(UNIT, settings)),
        "skip-join MLFQ": ("3.3", SkipJoinMlfq(UNIT, settings)),
        "SRPT": ("3", shortest),
    }
    rows = [
        (f"average latency, {name}", paper, f"{serve_example(order):.2f}")
        for name, (paper, order) in orders.items()
    ]
    return rows, {"jobs": EXAMPLE}


def figure8() -> Found:
    """Peak KV memory of the queues over FCFS; answers of at most 20 tokens, five seconds."""
    ratios: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    for batch, seed in product((16, 32, 64), range(3)):
        short = [(prompt, min(20, output)) for prompt, output in engine.sharegpt(600, seed)]
        requests = [one for one in engine.arrive(short, 64, 4, seed) if one[0] <= 5.0]
        peaks = {}
        for name, order in {"FCFS": engine.fcfs, **FORMS}.items():
            simulated = Engine(OPT_2_7B, order, batch, kv_tokens=inf)
            simulated.run(requests)
            peaks[name] = simulated.peak
        for form in FORMS:
            ratios[form][f"batch {batch}, seed {seed}"] = peaks[form] / peaks["FCFS"]
    rows = Rows()
    for form, of in ratios.items():
        shown = f"{min(of.values()):.1f}x to {max(of.values()):.1f}x"
        rows.append((f"peak KV memory of {form} over FCFS", "up to 7x", shown))
    return rows, {"ratios": ratios}


def figure11() -> Found:
    """Rate within 0.3 s per token, both data sets, three models."""
    rows, details = Rows(), {}
    published = {"ShareGPT": ("31.5 to 74.9x", "2 to 4x"), "Alpaca": ("9.5 to 15.8x", "1.6 to 2x")}
    sizes = {"ShareGPT": engine.sharegpt(COUNT), "Alpaca": engine.alpaca(COUNT)}
    for name, model in product(sizes, (OPT_13B, OPT_66B, OPT_175B)):
        found = details[f"{name}, {model.name}"] = find_rates(model, sizes[name], mean)
        for base, paper in zip(("FasterTransformer", "FCFS"), published[name], strict=True):
            rows.append((f"rate over {base}, {name}, {model.name}", paper, compare(found, base)))
    return rows, {"rates": details}


def figure12() -> Found:
    """Rate within 0.3 s per token for 95 % of the requests, ShareGPT."""
    rows, details = Rows(), {}
    for model, paper in (OPT_13B, "2 to 2.8x"), (OPT_66B, "2 to 2.8x"), (OPT_175B, "up to 1.5x"):
        found = details[model.name] = find_rates(model, engine.sharegpt(COUNT), p95)
        rows.append((f"P95 rate over FCFS, {model.name}", paper, compare(found, "FCFS")))
    return rows, {"rates": details}


def figure13() -> Found:
    """Rate at which 95 % of the requests meet limits for both phases, as multiples of their light-load latency."""
    sizes, details, rows = engine.sharegpt(COUNT), {}, Rows()

    def list_phases(done: Sequence[Request]) -> list[tuple[float, float]]:
        ends = [(one.first_s - one.arrival_s, one.end_s - one.first_s) for one in done]
        return [(first, rest / max(1, one.output - 1)) for one, (first, rest) in zip(done, ends, strict=True)]

    light = list_phases(serve(OPT_13B, "FCFS", sizes, 0.05 * engine.capacity(OPT_13B, sizes, BATCH)))
    limits = [fmean(one[phase] for one in light) for phase in (0, 1)]

    def find_scale(done: Sequence[Request]) -> float:
        """Return the multiple of the limits that 95 % of the requests meet."""
        scales = sorted(max(a / b for a, b in zip(one, limits, strict=True)) for one in list_phases(done))
        return next(scale for n, scale in enumerate(scales, 1) if n >= 0.95 * len(scales))

    for scale in (5, 10, 20):
        found = details[str(scale)] = find_rates(OPT_13B, sizes, find_scale, scale)
        what = f"P95 goodput over FCFS at {scale} times the light-load latency"
        rows.append((what, "1.46 to 1.64x", compare(found, "FCFS")))
    return rows, {"light_load_s": limits, "rates": details}


def figure14() -> Found:
    """Latency per token of other orders over skip-join MLFQ, by the ratio of input to output length."""
    naive = engine.mlfq(60.0, kind=NaiveMlfq)
    orders = {"FCFS": engine.fcfs, "naive MLFQ": naive, "fixed priority": engine.fixed_priority}
    paper = {"FCFS": 8.9, "naive MLFQ": 1.87, "fixed priority": 13.9}
    drawn = engine.sharegpt(COUNT)
    inputs, outputs = (fmean(size[i] for size in drawn) for i in (0, 1))
    ratios: dict[str, dict[str, dict[str, float]]] = {
        f"{form}, load {load:g}": {} for form, load in product(FORMS, (1.1, 2.0))
    }
    for load, ratio in product((1.1, 2.0), (0.25, 1, 4, 16, 64, 256)):
        more = (inputs + outputs) * ratio / (1 + ratio) / inputs
        less = (inputs + outputs) / (1 + ratio) / outputs
        sizes = [(max(1, round(a * more)), max(1, round(b * less))) for a, b in drawn]
        requests = engine.arrive(sizes, load * engine.capacity(OPT_13B, sizes, BATCH))
        latency = {
            name: mean(Engine(OPT_13B, order, BATCH, kv_tokens=inf).run(requests))
            for name, order in (orders | FORMS).items()
        }
        for form in FORMS:
            cell = ratios[f"{form}, load {load:g}"]
            cell[str(ratio)] = {name: latency[name] / latency[form] for name in orders}
    rows = Rows()
    for (form, cells), name in product(ratios.items(), orders):
        each = [cell[name] for cell in cells.values()]
        what = f"{name} over {form}, largest and least"
        rows.append((what, f"{paper[name]}x, above 1", f"{max(each):.2f}x, {min(each):.2f}x"))
    return rows, {"ratios": ratios}


def figure15() -> Found:
    """Three ways of keeping KV, OPT-13B on 40 GB, over arrival rates."""
    sizes = engine.sharegpt(COUNT)
    top, rows, cells = engine.capacity(OPT_13B, sizes, BATCH), Rows(), {}
    for (form, order), load in product(FORMS.items(), (0.8, 1.2, 2.0)):
        requests = engine.arrive(sizes, load * top)
        done = {
            strategy: Engine(OPT_13B, order, BATCH, strategy=strategy).run(requests)
            for strategy in ("proactive", "reactive", "recompute")
        }
        cell = {name: mean(of) for name, of in done.items()}
        evictions = {
            f"evictions, {name}": sum(one.evictions for one in of) / COUNT for name, of in done.items()
        }
        cells[f"{form}, load {load:g}"] = cell | evictions
        swapping = sum(one.swapping_s for one in done["proactive"])
        share = 100 * swapping / sum(one.latency_s for one in done["proactive"])
        for what, paper, ours in (
            ("proactive over recompute", "up to 2.7x", f"{cell['recompute'] / cell['proactive']:.2f}x"),
            ("proactive over reactive", "up to 1.7x", f"{cell['reactive'] / cell['proactive']:.2f}x"),
            ("swapping in the latency", "below 5 %", f"{share:.1f} %"),
        ):
            rows.append((f"{what}, {form}, load {load:g}", paper, ours))
    return rows, {"s_per_token": cells}


EXPERIMENTS = declare(figure1, figure5, figure7, figure8, figure11, figure12, figure13, figure14, figure15)

if __name__ == "__main__":
    run("fastserve", EXPERIMENTS, sys.argv[1:])
