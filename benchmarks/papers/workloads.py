"""Random workloads for the queues of the server on the engine of FastServe's experiments; every iteration is checked.

Invariants: each live job is in exactly one queue; no token is lost or computed twice; KV memory is neither lost nor exceeded;
a job that waits in the first queue runs after the jobs ahead of it had one iteration each; in the paper's form, a job that had
no service for alpha seconds is in the first queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.papers.engine import OPT_2_7B, Engine, Served, mlfq
from coldstart.scheduling.job import Job

Requests = Sequence[tuple[float, int, int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests (arrival in seconds, prompt, output) and the engine that serves them; `alpha_s` is the starvation limit."""

    requests: Requests
    batch: int
    kv_tokens: int
    strategy: str
    alpha_s: float


def draw(seed: int) -> Workload:
    """Return 2 to 12 requests that compete for a small batch and for KV memory."""
    random, now, requests = Random(seed), 0.0, list[tuple[float, int, int]]()
    for _ in range(random.randint(2, 12)):
        now += random.choice((0.0, random.expovariate(5)))
        prompt = min(2000, max(1, round(random.lognormvariate(4.5, 1.5))))
        requests.append((now, prompt, min(60, max(1, round(random.lognormvariate(2, 1.2))))))
    sizes = [prompt + output + 1 for _, prompt, output in requests]
    return Workload(
        requests,
        random.randint(1, 4),
        random.randint(max(sizes), sum(sizes)),
        random.choice(("proactive", "reactive", "recompute")),
        random.choice((0.05, 0.3, 2.0)),
    )


class CheckedEngine(Engine):
    """Engine whose iterations are checked. `longest_wait_s` is the longest time of a request without service."""

    def __init__(self, load: Workload, form: str) -> None:
        order = mlfq(load.alpha_s, form)
        super().__init__(OPT_2_7B, order, load.batch, strategy=load.strategy, kv_tokens=load.kv_tokens)
        self.load, self.form = load, form
        self.longest_wait_s = 0.0
        self._turn: dict[str, int] = {}
        self._prompt_turns = 0
        self._waits_since: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    def serve(self) -> list[Served]:
        """Serve the workload, and return its requests. Raises AssertionError if an invariant does not hold."""
        done = self.run(self.load.requests)
        assert all(one.end_s >= one.first_s > one.arrival_s for one in done), "a request has no end"
        generated = [self._tokens[str(number)] for number in range(len(done))]
        assert generated == [one.output for one in done], "tokens were lost, or generated twice"
        assert self.held == 0, "KV memory was not returned"
        return done

    def _place(self, chosen: list[Job]) -> list[Job]:
        jobs = list(self.policy)
        assert len({job.id for job in jobs}) == len(jobs) == len(self.policy), "a job is in two queues"
        assert [job.level for job in jobs] == sorted(job.level for job in jobs), "a lower queue is ahead"
        self._check_waits(jobs)
        placed = super()._place(chosen)
        # While a copy is on its way, others run: these iterations are no turns of the first queue.
        self._prompt_turns += all(self._arrives.get(job.id, 0.0) <= self._now for job in placed)
        assert self.held == sum(job.computed for job in jobs) <= self.capacity, (
            "KV memory is not that of the jobs"
        )
        return placed

    def _check_waits(self, jobs: list[Job]) -> None:
        first = [job for job in jobs if job.level == 0]
        for place, job in enumerate(first):
            due = self._turn.setdefault(job.id, self._prompt_turns + place)
            assert self._prompt_turns <= due, f"job {job.id} was passed in the first queue"
        for job in jobs:
            if job.level > 0:
                self._turn.pop(job.id, None)
                starved = self._now - job.unserved_since >= self.load.alpha_s
                assert self.form != "paper" or not starved, f"job {job.id} starves in queue {job.level + 1}"

    def _advance(self, job: Job, seconds: float) -> None:
        since_s = self._waits_since.get(job.id, job.arrival_s)
        self.longest_wait_s = max(self.longest_wait_s, self._now - seconds - since_s)
        self._waits_since[job.id] = self._now
        self._turn.pop(job.id, None)
        self._tokens[job.id] = self._tokens.get(job.id, 0) + 1
        super()._advance(job, seconds)


def check(seeds: range, form: str) -> dict[str, Any]:
    """Serve a workload of each seed in one form of the queues, and return evictions and waits. Raises AssertionError."""
    evictions, waits = list[int](), list[float]()
    for seed in seeds:
        engine = CheckedEngine(draw(seed), form)
        try:
            evictions += [one.evictions for one in engine.serve()]
        except AssertionError as problem:
            raise AssertionError(f"workload {seed}, {form}: {problem}") from problem
        waits.append(engine.longest_wait_s)
    return {
        "workloads": len(seeds),
        "requests": len(evictions),
        "evictions_per_request": sum(evictions) / len(evictions),
        "most_evictions": max(evictions),
        "longest_wait_s": max(waits),
        "mean_wait_s": sum(waits) / len(waits),
    }
