"""The published form against FastServe's own text: Algorithm 1 line by line, and the example of Figure 7."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.fastserve import figure7
from benchmarks.papers.workloads import check
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import SkipJoinMlfq
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings

LEVELS = 6
PROFILE = IterationProfile.create([(1, 1.0), (100, 4.0), (400, 30.0)], [(1, 1.0), (8, 1.0)])


@dataclass(slots=True, eq=False)
class Timed(Job):
    """Job whose iterations take given times in seconds."""

    times: list[float] = field(default_factory=list)

    def next_s(self, profile: IterationProfile, batch: int = 1) -> float:
        return self.times[self.generated] if self.generated < len(self.times) else 0.0


def run_ours(
    jobs: list[list[float]], alpha_s: float, batch: int, levels: int
) -> list[tuple[float, list[int]]]:
    """Return the end of each iteration and its jobs, in order; all jobs arrive at the start."""
    settings = SchedulerSettings(mlfq="paper", alpha_s=alpha_s, levels=levels, first_quantum_s=1.0)
    policy, now, done = SkipJoinMlfq(PROFILE, settings), 0.0, []
    for number, times in enumerate(jobs):
        policy.add(Timed(str(number), 0.0, 1, times=times), 0.0)
    while len(policy):
        policy.tick(now, batch)
        chosen = list(islice(policy, batch))
        costs = [job.next_s(PROFILE) for job in chosen]
        now += max(costs)
        done.append((now, [int(job.id) for job in chosen]))
        for job, cost in zip(chosen, costs, strict=True):
            job.generated += 1
            if job.generated == len(job.times):  # type: ignore[attr-defined]
                policy.remove(job)
            else:
                policy.add_service(job, cost, now)
    return done


def run_algorithm_1(
    jobs: list[list[float]], alpha_s: float, batch: int, levels: int
) -> list[tuple[float, list[int]]]:
    """Run the pseudocode with eta = 1; the comments are its line numbers.

    Two things that it leaves open: of several starved jobs the longest starved goes first, then the oldest; one in Q1 stays.
    """
    quanta, now, done = [2.0**level for level in range(levels)], 0.0, []
    queues: list[list[int]] = [[] for _ in quanta]
    outputs, used, served = [0] * len(jobs), [0.0] * len(jobs), [0.0] * len(jobs)
    for job, times in enumerate(jobs):  # 6 to 9
        queues[min([i for i, q in enumerate(quanta) if q >= times[0]], default=levels - 1)].append(job)
    while True:
        for level in reversed(range(levels)):  # 10 to 17; from below, so that no job is demoted twice
            for job in list(queues[level]):
                if outputs[job] == len(jobs[job]):  # 13, 14
                    queues[level].remove(job)
                elif used[job] >= quanta[level]:  # 16, 17
                    queues[level].remove(job)
                    used[job] = 0.0
                    lower = min(level + 1, levels - 1)
                    queues[lower].insert(0, job) if lower == level else queues[lower].append(job)
        starved = [job for queue in queues[1:] for job in queue if now - served[job] >= alpha_s]
        for job in sorted(starved, key=lambda job: (served[job], job)):  # 19 to 21
            next(queue for queue in queues if job in queue).remove(job)
            queues[0].append(job)
            used[job], served[job] = 0.0, now
        chosen = [job for queue in queues for job in queue][:batch]  # 22 to 25
        if not chosen:
            return done
        now += max(jobs[job][outputs[job]] for job in chosen)
        done.append((now, chosen))
        for job in chosen:
            used[job] += jobs[job][outputs[job]]
            outputs[job] += 1
            served[job] = now


@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 1.5, 3.0, 7.0, 30.0]), st.integers(0, 30)), min_size=1, max_size=12
    ),
    st.sampled_from([inf, 9.0]),
)
def test_published_form_runs_the_jobs_of_algorithm_1(load: list[tuple[float, int]], alpha_s: float) -> None:
    jobs = [[first, *[1.0] * more] for first, more in load]
    given_alpha = 1e18 if alpha_s == inf else alpha_s
    assert run_ours(jobs, given_alpha, 1, LEVELS) == run_algorithm_1(jobs, given_alpha, 1, LEVELS)


def test_figure_7_has_the_papers_averages() -> None:
    rows, _ = figure7()
    assert len(rows) == 4
    assert all(float(ours) == pytest.approx(float(paper), abs=0.04) for _, paper, ours in rows)


@pytest.mark.parametrize("form", ["paper", "tempered"])
@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 10_000), marks=pytest.mark.nightly)])
def test_random_workloads_keep_every_invariant(form: str, seeds: range) -> None:
    assert check(seeds, form)["evictions_per_request"] > 0
