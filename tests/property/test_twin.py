"""The simulated engine makes the same decisions as vLLM's scheduler and connector."""

from math import log
from pathlib import Path
from random import Random

import pytest

from coldstart.lab.scheduling import SimSettings, simulate
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import IterationProfile, SchedulerSettings
from tests.support.scheduling.timed_double import TimedDouble

PROFILE = IterationProfile.create(
    [(1, 0.004), (32, 0.006), (128, 0.014), (512, 0.045)], [(1, 0.004), (8, 0.006), (16, 0.008)]
)


def rows(count: int, rate: float, seed: int) -> list[TraceRequest]:
    random, now, found = Random(seed), 0.0, []
    for _ in range(count):
        now += random.expovariate(rate)
        prompt, output = (random.lognormvariate(log(median), 1.2) for median in (24, 12))
        found.append(TraceRequest(now, max(1, min(256, round(prompt))), max(1, min(320, round(output)))))
    return found


@pytest.mark.parametrize(("block", "seed"), [(8, 8), (32, 32), (32, 232)])
@pytest.mark.parametrize(
    "settings",
    [
        SchedulerSettings("fcfs", batch=16),
        SchedulerSettings("fcfs", batch=16, strategy="proactive"),
        SchedulerSettings(batch=4, alpha_s=3.0, strategy="recompute"),
        SchedulerSettings(batch=4, alpha_s=3.0, strategy="reactive"),
        SchedulerSettings(batch=4, alpha_s=3.0),
        SchedulerSettings(batch=16, alpha_s=0.3),
    ],
    ids=lambda s: f"{s.policy}-{s.kv_strategy}-{s.batch}",
)
def test_the_counts_are_those_of_the_real_scheduler(
    settings: SchedulerSettings, block: int, seed: int, model_folder: Path
) -> None:
    trace = rows(70, 40.0, seed=seed)
    machine = SimSettings(
        block_tokens=block,
        device_blocks=768 // block,
        block_bytes=5120 * block,
        link_bytes_s=2e9,
        host_blocks=51200 // block,
        token_budget=128,
        context_s=1e-6,
    )
    ours = simulate(trace, PROFILE, settings, machine)
    real = TimedDouble(model_folder, PROFILE, settings, machine).run(trace)
    assert ours.evictions > 0
    for name in ("evictions", "blocks_evicted", "recomputed_tokens", "blocks_in", "iterations", "served"):
        assert getattr(ours, name) == getattr(real, name), name
    ends = {job.job.id: job.finished_s for job in ours.jobs}
    assert ends == pytest.approx(real.latencies)
