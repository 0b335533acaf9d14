"""Microseconds of CPU per step of our scheduler against vLLM's own, in one process, on vLLM's real classes.

No model runs: a step is schedule() plus update_from_output() of one sampled token for everybody scheduled. A
request that finishes is replaced by a new one, so the queue keeps its length. `settled` is measured after
every request of the opening burst has had its turn, `burst` from the first step of 2,000 requests at once,
where ours starts new requests in every step and stock goes on with the ones it has. Both start every request once,
so what a burst costs is measured to its end as well, where nothing replaces what has finished, by token.

t(step) = t(vLLM's own work on what is scheduled, started, evicted) + t(our decisions); `own_us` is the second
term, and `own_ratio` the whole over the first: vLLM's own work differs between the two sides where ours starts requests in
steps in which stock decodes. The bars are 1.3x stock settled and 1.5x in a burst.

The ceiling is the smaller of 2x stock and 5 % of an iteration of the running requests, by the iteration
profile measured with the model named in the result (`--profile`). Time is the thread's CPU
time, since the cores are shared. Run: python benchmarks/scheduler_overhead.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
logging.disable(logging.WARNING)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

from benchmarks.common import RESULTS, finish  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.scheduling import IterationProfile  # noqa: E402
from coldstart.vllm.scheduling.scheduler import PolicyScheduler  # noqa: E402
from tests.support.scheduling.engine_double import Shape, build, make_request  # noqa: E402

PROFILE = RESULTS / "iteration-profile-cpu.json"
WAITING, ROUNDS, STEPS, BLOCK, TOKENS = 2000, 5, 120, 16, 8192
TURN = 5
"""Steps of one scheduler before it is the other's turn."""

BARS = {"settled": 1.3, "burst": 1.5, "whole burst": 1.5}


@dataclass(frozen=True)
class Case:
    """`slots` of the model runner: as many as there are requests, unless given."""

    running: int
    waiting: int
    phase: str = "settled"
    slots: int | None = None

    @property
    def warm_up(self) -> int:
        """Steps until every request has used its first quantum."""
        return 1 if self.phase == "burst" else 3 * self.waiting // self.running + 60

    @property
    def steps(self) -> int:
        """A burst is over after every request has started once."""
        return STEPS if self.phase == "settled" else max(8, self.waiting // self.running // 2)

    @property
    def shape(self) -> Shape:
        live = self.running + self.waiting
        return Shape(
            slots=self.slots or live,
            batch=self.running,
            tokens=TOKENS,
            blocks=live * 24,
            prefix=False,
            depth=1,
            block=BLOCK,
        )


CASES = [Case(running, waiting) for waiting in (0, WAITING) for running in (8, 64, 256)]
CASES += [Case(running, WAITING, "burst") for running in (8, 64, 256)]
CASES += [Case(64, WAITING, slots=256)]
WHOLE = [Case(running, WAITING, "whole burst") for running in (8, 64, 256)]


class Probe(AsyncScheduler):
    """Counts the CPU time inside vLLM's own schedule()."""

    inner_s = outer_s = 0.0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        start = time.thread_time()
        output = super().schedule(throttle_prefills)
        self.inner_s += time.thread_time() - start
        return output


def timed(schedule: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    """A scheduler's own schedule(), counted as the outer time of a Probe."""

    def measured(self: Any, throttle_prefills: bool = False) -> SchedulerOutput:
        start = time.thread_time()
        output = schedule(self, throttle_prefills)
        self.outer_s += time.thread_time() - start
        return output

    return measured


class ProbedStock(Probe):
    """vLLM's own under the same clocks: reading them is a microsecond a time, which is nobody's."""

    schedule = timed(Probe.schedule)


class Probed(PolicyScheduler, Probe):
    """Ours over the probe, which the order of the bases puts below it."""

    schedule = timed(PolicyScheduler.schedule)


class Rig:
    """One scheduler under a constant number of live requests."""

    def __init__(self, folder: Path, cls: type[AsyncScheduler], case: Case) -> None:
        self.scheduler, self.random, self.count = build(folder, case.shape, cls), Random(1), 0
        for _ in range(case.running + case.waiting):
            self.arrive()

    def arrive(self) -> None:
        prompt = [self.random.randrange(1000) for _ in range(self.random.randrange(4, 60))]
        output = self.random.randrange(60, 190)
        self.scheduler.add_request(make_request(str(self.count), prompt, output, block=BLOCK))
        self.count += 1

    def step_s(self) -> float:
        """One step; what finished is replaced."""
        seconds, names = self._step()
        for _ in range(sum(name not in self.scheduler.requests for name in names)):
            self.arrive()
        return seconds

    def drain(self) -> tuple[float, int]:
        """Seconds and tokens until nobody is left. Raises RuntimeError if a step serves nobody."""
        total_s, tokens = 0.0, 0
        while self.scheduler.requests:
            seconds, names = self._step()
            if not names:
                raise RuntimeError(f"{len(self.scheduler.requests)} requests are left and none is served")
            total_s, tokens = total_s + seconds, tokens + len(names)
        return total_s, tokens

    def _step(self) -> tuple[float, list[str]]:
        start = time.thread_time()
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        done = [[7] if not requests[name].is_prefill_chunk else [] for name in names]
        index = {name: i for i, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, index, done))
        return time.thread_time() - start, names


def alternate(rigs: Mapping[str, Rig], warm_up: int, steps: int) -> dict[str, dict[str, float]]:
    """Of each: mean, median and 99th percentile of microseconds per step, and what of the mean is outside vLLM's schedule().

    The schedulers step in turns so short that the machine's drift is everybody's.
    """
    for rig in rigs.values():
        for _ in range(warm_up):
            rig.step_s()
    before = {name: rig.scheduler.outer_s - rig.scheduler.inner_s for name, rig in rigs.items()}
    times: dict[str, list[float]] = {name: [] for name in rigs}
    for done in range(0, steps, TURN):
        for name, rig in rigs.items():
            times[name] += [rig.step_s() * 1e6 for _ in range(min(TURN, steps - done))]
    return {name: _marks(sorted(times[name]), rig.scheduler, before[name]) for name, rig in rigs.items()}


def _marks(times: Sequence[float], scheduler: Any, before_s: float) -> dict[str, float]:
    found = {"mean": fmean(times), "median": median(times), "p99": times[int(0.99 * len(times))]}
    return found | {"own": (scheduler.outer_s - scheduler.inner_s - before_s) * 1e6 / len(times)}


def ratios(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over rounds of stock's and our microseconds, of their ratio, and of what is our own code."""
    each = [one["ours"]["mean"] / one["stock"]["mean"] for one in rounds]
    own = median(one["ours"]["own"] - one["stock"]["own"] for one in rounds)
    return {
        "stock_us": median(one["stock"]["mean"] for one in rounds),
        "ours_us": median(one["ours"]["mean"] for one in rounds),
        "own_us": own,
        "ratio": median(each),
        "ratios": each,
        "rounds": {name: [one[name] for one in rounds] for name in ("stock", "ours")},
    }


def compare(folder: Path, case: Case, rounds: int, profile: IterationProfile) -> dict[str, Any]:
    """Rounds of stock and ours in turns."""
    classes = {"stock": ProbedStock, "ours": Probed}
    measured = [
        alternate({name: Rig(folder, cls, case) for name, cls in classes.items()}, case.warm_up, case.steps)
        for _ in range(rounds)
    ]
    found = ratios(measured)
    stock, ours, own = found["stock_us"], found["ours_us"], found["own_us"]
    share = 0.05e6 * profile.decode(case.running)
    return {
        **asdict(case),
        **found,
        "own_ratio": ours / (ours - own),
        "median_us": {name: median(r["median"] for r in found["rounds"][name]) for name in classes},
        "bar": BARS[case.phase],
        "limit_us": min(2 * stock, share),
        "iteration_us": 1e6 * profile.decode(case.running),
        "within_2x": ours <= 2 * stock,
        "stock_within_5_percent": stock <= share,
        "within": ours <= min(2 * stock, share),
        "added_within": ours - stock <= min(stock, share),
    }


def whole(folder: Path, case: Case, rounds: int) -> dict[str, Any]:
    """A burst to its end: microseconds of CPU per token, stock and ours in turn."""
    classes = {"stock": AsyncScheduler, "ours": PolicyScheduler}
    found: dict[str, list[float]] = {name: [] for name in classes}
    for _ in range(rounds):
        for name, cls in classes.items():
            seconds, tokens = Rig(folder, cls, case).drain()
            found[name].append(1e6 * seconds / tokens)
    each = [ours / stock for stock, ours in zip(found["stock"], found["ours"], strict=True)]
    middle = {f"{name}_us": median(each) for name, each in found.items()}
    return {
        **asdict(case),
        **middle,
        "bar": BARS[case.phase],
        "ratio": median(each),
        "ratios": each,
        "rounds": found,
    }


def growth(rows: list[dict[str, Any]], phase: str, waiting: int, name: str) -> float:
    """Slope of log(time) over log(running), by least squares."""
    points = [
        (math.log(row["running"]), math.log(row[name]))
        for row in rows
        if row["phase"] == phase and row["waiting"] == waiting and row["slots"] is None
    ]
    x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def line(row: dict[str, Any]) -> str:
    slots = f", {row['slots']} slots" if row["slots"] else ""
    return (
        f"{row['running']:>4} running {row['waiting']:>5} waiting {row['phase']}{slots}: stock {row['stock_us']:.0f},"
        f" ours {row['ours_us']:.0f} us ({row['ratio']:.2f}x, bar {row['bar']}x; {row['own_us']:.0f} us our own code,"
        f" {row['own_ratio']:.2f}x),"
        f" 5 % of an iteration {0.05 * row['iteration_us']:.0f} us"
    )


def burst_line(row: dict[str, Any]) -> str:
    costs = f"stock {row['stock_us']:.1f}, ours {row['ours_us']:.1f} us a token ({row['ratio']:.2f}x)"
    return f"{row['running']:>4} of {row['running'] + row['waiting']} at once to the end: {costs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, nothing written")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="measured iteration profile (JSON)")
    given = parser.parse_args()
    measured = json.loads(given.profile.read_text())
    profile = IterationProfile.from_json(measured["iterations"])
    folder, rows = Path(tempfile.mkdtemp()) / "tiny-opt", []
    for case in CASES:
        rows.append(compare(folder, case, 1 if given.quick else given.rounds, profile))
        print(line(rows[-1]), flush=True)
    bursts = []
    for case in WHOLE:
        bursts.append(whole(folder, case, 1 if given.quick else given.rounds))
        print(burst_line(bursts[-1]), flush=True)
    if given.quick:
        return
    exponents = {
        f"{phase}, {waiting} waiting": {
            name: growth(rows, phase, waiting, f"{name}_us") for name in ("stock", "ours")
        }
        for phase, waiting in (("settled", 0), ("settled", WAITING), ("burst", WAITING))
    }
    about = {key: measured[key] for key in ("model", "machine", "command", "note")}
    finish(
        "scheduler_overhead",
        {
            "kind": "measured, no model runs",
            "unit": "microseconds of CPU per step, mean",
            "profile": about,
            "growth_exponent": exponents,
            "date": facts.today(),
            "command": ["python", "benchmarks/scheduler_overhead.py", *facts.without_paths(sys.argv[1:])],
            "machine": facts.machine(),
            "versions": facts.versions(),
            "rows": rows,
            "bursts": bursts,
        },
    )


if __name__ == "__main__":
    main()
