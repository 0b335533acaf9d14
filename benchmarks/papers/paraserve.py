"""Figures of ParaServe on the simulated fleet: the live decisions with links and simulated time. Simulated.

Start times come from `fleet/cold_ttft`. docs/explanation/paraserve.md describes the systems, the load and the differences.
Figures 13 and 14, `paraserve-links` and `paraserve-tpot` are measured (`papers/paraserve_live.py`), which needs root.

Run: python -m benchmarks papers/paraserve [NUMBER...], or papers/paraserve-NUMBER
Time: three minutes for 10, up to 15 for links and eight for 13 and 14 after their bundles, a minute or less for each other
Result: papers/paraserve-10.json and one for each other figure
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf, log
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from pandas import Series, read_csv

from benchmarks.common import HERE, load
from benchmarks.fleet.baselines import Cached, FirstFit, Locality
from benchmarks.papers import Found, Rows, declare, run
from benchmarks.papers.paraserve_live import MEASURED
from coldstart.fleet.roster import Roster
from coldstart.fleet.sizing import Offer, list_schemes
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, Overlap, ServerSpec
from coldstart.lab.fleet import simulate
from coldstart.lab.records import Replay, SimulatedRequest, tabulate

GB = 10**9
CALIBRATION = load("fleet-cold-ttft")
FIT = CALIBRATION["fit"]
LINK = FIT["bandwidth_gb_s"] * GB
HOUR_S, INVOCATIONS, INSTANCES, SKEW, SPREAD = 3600.0, 1_980_000, 64, 2.8, 0.8
IDLE_S, KV_GB, HOP_S, DEVICE_GB_S = 30.0, 5.0, 0.002, 12.0
# name: GB, decode seconds, TTFT limit of chat and code, TPOT limit of code and summaries
SIZES = {"7b": (13.48, 0.042, 7.5, 0.084), "13b": (26.03, 0.058, 12.0, 0.116)}
# application: mean output tokens, TTFT limit in units of the size's, own TPOT limit
APPLICATIONS = {"chat": (200, 1.0, 0.2), "code": (98, 1.0, None), "summaries": (91, 2.0, None)}
MOST_TOKENS = 1024
RPS = (0.6, 0.7, 0.8)
VLLM, SERVERLESS, PAPER, OWN = "serverless vLLM", "ServerlessLLM", "ParaServe", "this fleet"
CACHED = "ParaServe with cache"
PIPELINE = {2: (81.1, 77.2, 73.8), 4: (84.2, 78.2, 71.8), 8: (82.5, 76.3, 75.2)}
ATTAINMENT = {
    VLLM: {2: (46.7, 45.7, 43.9), 4: (49.9, 48.6, 44.7), 8: (53.5, 53.3, 48.5)},
    SERVERLESS: {2: (57.5, 49.8, 45.3), 4: (61.5, 57.7, 47.7), 8: (60.3, 57.7, 54.0)},
    PAPER: PIPELINE,
    CACHED: {2: (83.7, 79.1, 78.3), 4: (88.2, 83.8, 79.3), 8: (88.2, 85.0, 78.5)},
    OWN: PIPELINE,
}
"""Each system with its published attainment of TTFT in per cent, by coefficient of variation and requests per second."""
MOVE_S = {PAPER: 0.34, CACHED: 0.34, OWN: load("fleet-moves-cpu")["gap_s"]["median"]}
CVS, SEEDS = (2, 4, 8), (0, 1, 2)
# Host memory less a tenth and what containers take.
HOST_MEMORY = {f"a10-{n}": 560 * GB for n in range(2)} | {f"v100-{n}": 185 * GB for n in range(4)}


@dataclass(frozen=True, slots=True)
class System:
    """Start-up costs, load rate in bytes/s, and placement of a system."""

    name: str
    costs: Costs
    load: float
    roster: Roster

    def simulate(
        self,
        requests: Sequence[SimulatedRequest],
        servers: Sequence[ServerSpec],
        models: Sequence[FleetModel],
    ) -> Replay:
        move_s = MOVE_S.get(self.name, 0.0)
        models = [replace(model, held_twice=float(self.name == OWN)) for model in models]
        return simulate(requests, servers, models, self.roster.settings, move_s=move_s, roster=self.roster)


def system(name: str, **settings: Any) -> System:
    common: dict[str, Any] = {"reclaim": False, "window_s": 1.0, "hold_s": 1800.0, **settings}
    if name in MOVE_S:
        # The fit knows the sum only. How it is divided matters where loading is slower than the libraries, which it never is.
        part = FIT["runtime_s"] / 3
        first, rest = (3 * part, 0.0) if name == OWN else (part, part)
        costs = Costs(first, rest, rest, FIT["rank_s"], HOP_S, FIT["first_s"])
        chosen = FleetSettings(**common)
        roster = Cached(chosen, HOST_MEMORY) if name == CACHED else Roster(chosen)
        return System(name, costs, DEVICE_GB_S * GB, roster)
    line, first_s = CALIBRATION["others"][name], FIT["first_s"]
    costs = Costs(library_s=line["constant_s"] - first_s, prefill_s=first_s, overlap=Overlap.SEQUENTIAL)
    chosen = FleetSettings(consolidate=False, **common)
    roster = Locality(chosen, HOST_MEMORY) if name == SERVERLESS else FirstFit(chosen)
    return System(name, costs, GB / (line["s_per_gb"] - 1 / FIT["bandwidth_gb_s"]), roster)


def force(model: FleetModel, ranks: int, *, full: bool = False) -> FleetModel:
    """Return the model such that it starts on that number of ranks only; `full`: all with the memory of a full worker."""
    tpot_s = model.costs.decode_s + ranks * model.costs.hop_s if full else model.tpot_s
    return replace(model, unavailable={n: "not compared" for n in range(1, 5) if n != ranks}, tpot_s=tpot_s)


def llama(size: str, costs: Costs, **options: Any) -> FleetModel:
    gb, decode, _, _ = SIZES[size]
    memory, costs = round((gb + KV_GB) * GB), replace(costs, decode_s=decode)
    return FleetModel(size, round(gb * GB), memory, costs, **{"idle_s": IDLE_S, **options})


def make_servers(
    kind: str, count: int, gb: int, network: float, rate: float, devices: int = 1
) -> list[ServerSpec]:
    """Return servers with devices of `gb`, a network and a load rate in bytes/s."""
    return [ServerSpec(f"{kind}-{n}", gb * GB, network, rate, devices) for n in range(count)]


def one_request(size: str, tokens: int = 2) -> SimulatedRequest:
    return SimulatedRequest(0.0, size, FIT["first_s"], SIZES[size][1], tokens)


def figure5() -> Found:
    """TTFT and TPOT by number of ranks without the overlap of section 5, and TPOT of four ranks by full workers."""
    base, own, settings = system(VLLM), system(OWN), FleetSettings(consolidate=False)
    model = llama("7b", replace(base.costs, join_s=FIT["rank_s"], hop_s=HOP_S))
    rows: Rows = []
    for (of, each), ranks in product(((own, llama("7b", own.costs)), (base, model)), range(1, 5)):
        servers = make_servers("a10", 4, 24, LINK, of.load)
        served = tabulate(simulate([one_request("7b")], servers, [force(each, ranks)], settings).records)
        shown = f"TTFT {served['ttft_s'][0]:.1f} s, TPOT {1e3 * served['tpot_s'][0]:.0f} ms"
        what = f"{ranks} ranks" if of is base else f"{ranks} ranks, {OWN} (with overlap)"
        rows.append((what, "not printed; TTFT falls and TPOT rises" if of is base else "-", shown))
    offers = [Offer(one.name, one.network, one.load, one.memory) for one in servers]
    for scheme in list_schemes(force(model, 4), offers, settings):
        shown = f"TPOT {1e3 * scheme.tpot_s:.0f} ms (equation 2)"
        rows.append((f"4 ranks, {scheme.full} full", "not printed; with 4 negligible loss", shown))
    return rows, {}


def figure7() -> Found:
    """Burst of 240 requests for a stopped model that needs 30 workers of 8 requests, on 30 servers with one V100 each."""
    rows, details = Rows(), {}
    for name, most in (PAPER, 1), (PAPER, 4), (OWN, 4):
        of = system(name, most_ranks=most)
        memory = 32 if name == PAPER else 40
        model = llama("13b", of.costs, most=30, batch=8)
        burst = [one_request("13b", 512)] * 240
        done = of.simulate(burst, make_servers("v100", 30, memory, LINK, of.load), [model])
        first = sorted(one.ttft_s or inf for one in done.records)
        what = f"{name}, at most {most} ranks" + (f", {memory} GB" if memory != 32 else "")
        paper = "8 groups: one of two workers, seven of four" if most > 1 else "30 workers"
        groups = ", ".join(f"{count} of {ranks}" for ranks, count in done.counts["groups_by_ranks"].items())
        times = f"half of the burst has its first token after {first[119]:.1f} s, all after {first[-1]:.1f} s"
        rows.append((what, paper, f"groups: {groups}; {times}"))
        details[what] = [round(one, 2) for one in first[::8]]
    return rows, details


def figure9() -> Found:
    """Cold TTFT of Llama2-13B on V100, technique by technique.

    With +Prefetch the fetch runs beside vLLM's start, and loading follows both. With +Stream tensors are loaded as they arrive
    and at the rate of ParaServe, but after the libraries.
    """
    vllm, paper, own = system(VLLM), system(PAPER), system(OWN)
    start = replace(vllm.costs, overlap=Overlap.FULL)
    prefetch = replace(start, join_s=SIZES["13b"][0] * GB / vllm.load)
    stream = replace(start, container_s=start.library_s, library_s=0.0)
    rows: Rows = []
    for what, published, of, costs, ranks in (
        ("original vLLM", "38.6 s (figure 8)", vllm, vllm.costs, 1),
        ("+Prefetch", "not printed", paper, prefetch, 1),
        ("+Stream", "not printed", paper, stream, 1),
        ("+Overlap", "17.4 s (figure 8)", paper, paper.costs, 1),
        ("+Parallel", "8.7 s (figure 8)", paper, paper.costs, 4),
        (f"{OWN}, four ranks on devices of 40 GB", "-", own, own.costs, 4),
    ):
        model = force(llama("13b", costs), ranks, full=True)
        servers = make_servers("v100", 4, 40 if of is own else 32, LINK, of.load)
        (served,) = of.simulate([one_request("13b")], servers, [model]).records
        rows.append((what, published, f"{served.ttft_s:.1f} s"))
    return rows, {}


def testbed(rate: float) -> list[ServerSpec]:
    """Return testbed (ii): 16 Gbit/s as the fit measures them, and four times that."""
    return make_servers("a10", 2, 24, 4 * LINK, rate, 4) + make_servers("v100", 4, 32, LINK, rate, 4)


def models(costs: Costs, scale: float = 1.0) -> list[FleetModel]:
    """Return the models of table 2; `scale` multiplies their SLOs."""
    found = []
    for application, (_, factor, own) in APPLICATIONS.items():
        for size, (_, _, ttft, tpot) in SIZES.items():
            one = llama(size, costs, ttft_s=ttft * factor * scale, tpot_s=(own or tpot) * scale)
            found += [replace(one, name=f"{application}/{size}/{n}") for n in range(INSTANCES)]
    return found


@cache
def draw_invocations(cv: float, seed: int) -> tuple[Any, Any]:
    """Return the times of all invocations of one CV, and the number of the model of each; any rate is a sample of them."""
    random, count = np.random.default_rng(seed), len(models(Costs()))
    # The law's own quantiles, dealt at random: a heavy tail drawn would be another load each time.
    quantiles = [NormalDist().inv_cdf((n + 0.5) / count) for n in range(count)]
    weights = random.permutation(np.exp(SKEW * np.array(quantiles)))
    counts = np.maximum(1, np.round(INVOCATIONS * weights / weights.sum())).astype(int)
    gaps = [random.gamma(1 / cv**2, 1.0, invoked + 1) for invoked in counts]
    times = [np.cumsum(one)[:-1] / one.sum() * HOUR_S for one in gaps]
    return np.concatenate(times), np.repeat(np.arange(count), counts)


def draw_requests(rate: float, cv: float, seed: int) -> list[SimulatedRequest]:
    """Return a sample of the invocations, with lengths."""
    times, who = draw_invocations(cv, seed)
    random, names = np.random.default_rng(round(1000 * rate)), [model.name for model in models(Costs())]
    chosen = random.choice(len(times), round(rate * HOUR_S), replace=False)
    chosen = chosen[np.argsort(times[chosen], kind="stable")]
    found = []
    for time, name in zip(times[chosen].tolist(), (names[one] for one in who[chosen]), strict=True):
        application, size, _ = name.split("/")
        tokens = round(random.lognormal(log(APPLICATIONS[application][0]) - SPREAD**2 / 2, SPREAD))
        most = min(MOST_TOKENS, max(1, tokens))
        found.append(SimulatedRequest(time, name, FIT["first_s"], SIZES[size][1], most))
    return found


def attained(
    name: str, requests: Sequence[SimulatedRequest], scale: float = 1.0, *, tpot: bool = False
) -> Series[bool]:
    """Return whether each request met its limit, by application."""
    of = system(name)
    offered = models(of.costs, scale)
    limits = {model.name: model.tpot_s if tpot else model.ttft_s for model in offered}
    done = tabulate(of.simulate(requests, testbed(of.load), offered).records)
    # A single token has no time per token, and a failed request no time to its first token.
    seconds = done["tpot_s"].fillna(0.0) if tpot else done["ttft_s"]
    met = done["ok"] & (seconds <= done["model"].map(limits))
    return met.set_axis(done["model"].str.partition("/")[0])


def mean(name: str, cv: float, rate: float, **how: Any) -> float:
    return 100 * fmean(attained(name, draw_requests(rate, cv, seed), **how).mean() for seed in SEEDS)


def figure10() -> Found:
    """TTFT attainment by CV and requests per second, and how far the paper's ratio of 1.74 is reached."""
    rows, gains = Rows(), dict[str, list[float]]()
    for cv, (at, rate) in product(CVS, enumerate(RPS)):
        ours = {name: mean(name, cv, rate) for name in ATTAINMENT}
        for name, value in ours.items():
            published = f"{ATTAINMENT[name][cv][at]} %"
            rows.append((f"CV {cv}, {rate} requests/s, {name}", published, f"{value:.1f} %"))
            gains.setdefault(name, []).append(value / ours[VLLM])
    for name, paper in (PAPER, "up to 1.74"), (CACHED, "-"), (OWN, "-"):
        shown = f"{min(gains[name]):.2f} to {max(gains[name]):.2f}"
        rows.append((f"{name} over serverless vLLM", paper, shown))
    for name in (VLLM, PAPER, OWN):
        shown = f"{mean(name, 8, 0.8, tpot=True):.1f} %"
        rows.append((f"TPOT attainment, CV 8, 0.8 requests/s, {name}", "above 90 %", shown))
    return rows, {"seeds": len(SEEDS)}


def figure11() -> Found:
    """TTFT attainment under scaled SLOs, CV 8, 0.7 requests per second."""
    rows: Rows = []
    for scale in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0):
        ours = {name: mean(name, 8, 0.7, scale=scale) for name in ATTAINMENT}
        for name, value in ours.items():
            claims = {PAPER: "up to 1.52x", CACHED: "up to 1.58x"}
            paper = "at most 63 %" if scale < 1 else claims.get(name, "-")
            shown = f"{value:.1f} %, {value / ours[VLLM]:.2f}x serverless vLLM"
            rows.append((f"SLO scale {scale}, {name}", paper, shown))
    return rows, {"seeds": len(SEEDS)}


def figure12() -> Found:
    """TTFT attainment by application, CV 8, 0.6 requests per second."""
    rows: Rows = []
    loads = [draw_requests(0.6, 8, seed) for seed in SEEDS]
    found = {name: [attained(name, requests) for requests in loads] for name in ATTAINMENT}
    claims = {"chat": "up to 1.61x", "code": "up to 1.70x", "summaries": "few violations by any system"}
    for application, paper in claims.items():
        value = {name: 100 * fmean(each[application].mean() for each in of) for name, of in found.items()}
        for name, one in value.items():
            shown = f"{one:.1f} %, {one / value[VLLM]:.2f}x"
            rows.append((f"{application}, {name}", paper if name == PAPER else "-", shown))
    return rows, {"seeds": len(SEEDS)}


def figure15() -> Found:
    """Cold TTFT of Llama2-7B on A10 with 5 Gbit/s for each function, four ranks, and idle workers for five minutes."""
    rows, cold = Rows(), dict[str, float]()
    trace = read_csv(HERE / "traces" / "azure_functions_2021.csv.xz")
    names = trace["function"].astype(str)
    arrivals = list(zip((trace["gap"].cumsum() / 1e7).tolist(), names, strict=True))
    requests = [SimulatedRequest(at, name, FIT["first_s"], SIZES["7b"][1], 200) for at, name in arrivals]
    for name in (VLLM, PAPER, OWN):
        of = system(name)
        one = llama("7b", of.costs, idle_s=300.0)
        one = one if name == VLLM else force(one, 4)
        functions = [replace(one, name=function) for function in sorted(set(names), key=int)]
        done = of.simulate(requests, make_servers("a10", 256, 24, 5e9 / 8, of.load), functions)
        times = [record.ttft_s for record in done.records if record.cold and record.ttft_s is not None]
        cold[name] = fmean(times)
        shown = f"mean {cold[name]:.1f} s, {cold[VLLM] / cold[name]:.2f}x less"
        rows.append((f"{name}, {len(times)} cold starts", "-" if name == VLLM else "2.6x less", shown))
    return rows, {"invocations": len(arrivals)}


SIMULATED = declare(figure5, figure7, figure9, figure10, figure11, figure12, figure15)
EXPERIMENTS = SIMULATED | MEASURED

if __name__ == "__main__":
    run("paraserve", EXPERIMENTS, sys.argv[1:])
