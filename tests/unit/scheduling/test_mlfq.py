"""Algorithm 1 line by line, and its invariants over random histories."""

from dataclasses import dataclass, field
from itertools import islice
from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.fastserve import figure7
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import OrderAlternation, SkipJoinMlfq
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings

PROFILE = IterationProfile.create([(1, 1.0), (100, 4.0), (200, 8.0)], [(1, 1.0), (8, 1.0)])


PAPER: dict[str, object] = {"mlfq": "paper"}


def mlfq(**tunables: object) -> SkipJoinMlfq:
    return SkipJoinMlfq(PROFILE, SchedulerSettings(**{**PAPER, "levels": 5, "alpha_s": 1000.0, **tunables}))  # type: ignore[arg-type]


def names(policy: SkipJoinMlfq) -> list[str]:
    return [job.id for job in policy]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 64))
def test_enst_is_the_papers_double_sum(counts: list[int], batch: int) -> None:
    policy = mlfq(levels=len(counts), first_quantum_s=0.5, alpha_s=1e18)
    # A positive priority is the first queue of a job.
    levels = [level for level, count in enumerate(counts) for _ in range(count)]
    jobs = [Job(str(number), 0, 1, priority=level) for number, level in enumerate(levels)]
    policy.profile = IterationProfile.create([(1, 0.5)], [(1, 0.5)])
    for job in jobs:
        policy.add(job, 0)
    enst = policy.enst(0, batch)
    for job in jobs:
        above = (sum(policy.quanta[other.level : job.level]) for other in jobs if other.level < job.level)
        assert enst(job) == pytest.approx(sum(above) / batch)


def test_chunks_of_one_prompt_are_one_iteration_when_they_use_the_quantum() -> None:
    policy, job = mlfq(alpha_s=1.0), Job("a", 0, 200)
    policy.add(job, 0)
    policy.promote_starved_jobs(1.0, batch=1)
    assert (job.level, job.promotions) == (0, 1)
    job.computed_tokens, job.is_within_prompt = 100, True
    policy.add_service(job, 4.0, 5)
    assert job.level == 0, "it would wait for alpha after each chunk"
    job.computed_tokens, job.generated_tokens, job.is_within_prompt = 200, 1, False
    policy.add_service(job, 4.0, 9)
    assert job.level == 1


def test_the_cap_bounds_promoted_jobs_in_q1() -> None:
    policy = mlfq(mlfq="tempered", alpha_s=1.0)
    jobs = [Job(str(i), 0, 5000) for i in range(6)]
    for job in jobs:
        policy.add(job, 0)
    policy.promote_starved_jobs(1e6, batch=8)
    assert [job.id for job in jobs if job.level == 0] == ["0", "1"]


def test_a_negative_priority_stays_on_top_and_a_positive_one_joins_lower() -> None:
    policy, urgent, patient = mlfq(), Job("u", 0, 200, priority=-1), Job("p", 0, 1, priority=2)
    policy.add(patient, 0)
    policy.add(urgent, 0)
    policy.add_service(urgent, 100.0, 1)
    assert (urgent.level, patient.level) == (0, 2)


@given(st.floats(0.01, 1), st.lists(st.floats(0.001, 2), min_size=1, max_size=200))
def test_the_oldest_have_their_share_of_the_time(share: float, iterations: list[float]) -> None:
    turns, oldest_s, all_s = OrderAlternation(share), 0.0, 0.0
    for seconds in iterations:
        oldest = turns.choose_arrival_order()
        turns.add_time(seconds)
        oldest_s, all_s = oldest_s + oldest * seconds, all_s + seconds
        assert abs(oldest_s - share * all_s) <= max(iterations) + 1e-9


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "serve", "end", "wait"]), st.integers(0, 10**6)), max_size=120
)


@given(STEPS, st.sampled_from(["paper", "tempered"]), st.integers(1, 3))
def test_any_history_keeps_the_invariants(steps: list[tuple[str, int]], form: str, eta: int) -> None:
    policy = mlfq(mlfq=form, levels=6, alpha_s=7.0, eta=eta)
    live: dict[str, Job] = {}
    now = 0.0
    for number, (step, value) in enumerate(steps):
        now += value % 5
        if step == "add":
            job = Job(str(number), now, 1 + value % 5000)
            policy.add(job, now)
            live[job.id] = job
            first_s = job.predict_iteration_s(PROFILE)
            assert policy.quanta[job.level] >= first_s * (1 - 1e-8) or job.level == 5
            assert job.level == 0 or policy.quanta[job.level - 1] < first_s
        elif step == "serve" and live:
            job = next(iter(policy))
            level, attained = job.level, job.level_service_s
            cost = job.predict_iteration_s(PROFILE)
            job.computed_tokens, job.generated_tokens = job.context_tokens, job.generated_tokens + 1
            policy.add_service(job, cost, now)
            used = attained + cost >= policy.quanta[level] * (1 - 1e-9)
            assert used or job.level == level
            assert not used or job.level >= min(level + 1, 5)
        elif step == "end" and live:
            policy.remove(live.pop(sorted(live)[value % len(live)]))
        policy.promote_starved_jobs(now, batch=4)
        assert sorted(names(policy)) == sorted(live)
        assert len(policy) == len(live) == sum(map(len, policy.queues))
        assert all(0 <= job.level < 6 for job in policy)
        assert [job.level for job in policy] == sorted(job.level for job in policy)
        if form == "paper":
            assert all(job.level == 0 or now - job.unserved_since < 7.0 for job in policy)
        enst = policy.enst(now, 4)
        assert all(enst(job) >= 0 for job in policy)


@given(st.lists(st.sampled_from([0.4, 1.0, 2.5]), min_size=1, max_size=60), st.sampled_from([-1, 0, 2]))
def test_decoding_batch_is_booked_like_single_jobs(iterations: list[float], priority: int) -> None:
    together, alone = mlfq(), mlfq()
    for policy in (together, alone):
        for name, mine in (("a", 0), ("b", priority), ("c", 0)):
            policy.add(Job(name, 0, 1, generated_tokens=1, computed_tokens=1, priority=mine), 0)
    for now, seconds in enumerate(iterations, 1):
        together.add_decode_step(list(together)[:2], seconds, now)
        for job in list(alone)[:2]:
            job.generated_tokens += 1
            job.computed_tokens += 1
            alone.add_service(job, seconds, now)
    assert names(together) == names(alone) and together.moved == alone.moved
    assert {k: list(v) for k, v in together._unserved.items()} == {
        k: list(v) for k, v in alone._unserved.items()
    }
    for mine, other in zip(together, alone, strict=True):
        for name in Job.__slots__:
            assert getattr(mine, name) == getattr(other, name), name


@pytest.mark.parametrize("form", ["paper", "tempered"])
def test_a_request_is_promoted_a_bounded_number_of_times_in_the_tempered_form(form: str) -> None:
    policy = mlfq(mlfq=form, alpha_s=1.0)
    job, lived_s = Job("a", 0.0, 1, priority=1), 400.0
    policy.add(job, 0.0)
    for step in range(int(lived_s * 10)):
        policy.promote_starved_jobs(step / 10, 1)
        if job.level == 0:
            policy.add_service(job, policy.quanta[0], step / 10)
    most = log2(1 + lived_s)
    assert (job.promotions <= most) == (form == "tempered") and job.promotions >= 5


LEVELS = 6
COSTS = IterationProfile.create([(1, 1.0), (100, 4.0), (400, 30.0)], [(1, 1.0), (8, 1.0)])


@dataclass(slots=True, eq=False)
class Timed(Job):
    """Job whose iterations take given times in seconds."""

    times: list[float] = field(default_factory=list)

    def predict_iteration_s(self, profile: IterationProfile, batch: int = 1) -> float:
        return self.times[self.generated_tokens] if self.generated_tokens < len(self.times) else 0.0


def run_ours(
    jobs: list[list[float]], alpha_s: float, batch: int, levels: int
) -> list[tuple[float, list[int]]]:
    """Return the end of each iteration and its jobs, in order; all jobs arrive at the start."""
    settings = SchedulerSettings(mlfq="paper", alpha_s=alpha_s, levels=levels, first_quantum_s=1.0)
    policy, now, done = SkipJoinMlfq(COSTS, settings), 0.0, []
    for number, times in enumerate(jobs):
        policy.add(Timed(str(number), 0.0, 1, times=times), 0.0)
    while len(policy):
        policy.promote_starved_jobs(now, batch)
        chosen = list(islice(policy, batch))
        costs = [job.predict_iteration_s(COSTS) for job in chosen]
        now += max(costs)
        done.append((now, [int(job.id) for job in chosen]))
        for job, cost in zip(chosen, costs, strict=True):
            job.generated_tokens += 1
            if job.generated_tokens == len(job.times):  # type: ignore[attr-defined]
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
