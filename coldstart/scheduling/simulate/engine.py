"""The event loop: arrivals, promotions, choice of the batch, memory, one iteration, again.

Equation: an iteration takes profile.iteration_s(prefill tokens, decoding jobs) + context_s * context of the
decoding jobs, + crowd_s if a live job is not in it, plus whatever copies it must wait for; each job in it is charged
what the policy's profile predicts for it, as the server does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from coldstart.scheduling import IterationProfile, Job, Policy, SkipJoinMlfq, Turns, pick
from coldstart.scheduling.simulate.memory import Memory
from coldstart.scheduling.simulate.placement import Placer
from coldstart.scheduling.simulate.settings import SimSettings
from coldstart.scheduling.simulate.state import Kv, Outcome, SimJob
from coldstart.traces.request import TraceRequest


class Engine:
    """One simulated engine; `run` it once. Arrivals must be in order."""

    def __init__(
        self,
        policy: Policy,
        profile: IterationProfile,
        settings: SimSettings,
        *,
        series: bool = False,
        finished: Callable[[SimJob], None] | None = None,
    ) -> None:
        self.policy, self.profile, self.settings, self.series = policy, profile, settings, series
        self.finished = finished
        self.predicted = policy.profile if isinstance(policy, SkipJoinMlfq) else profile
        self.outcome, self.now = Outcome(), 0.0
        self.live: dict[str, SimJob] = {}
        self.memory = Memory(settings, self.outcome)
        self.placer = Placer(settings, self.memory, self.live)
        self.turns = Turns(settings.oldest_share)
        # The first jobs of two orders would take each other's memory before either has a token: whether the first of
        # the latest iteration got none, so that its order has to go on.
        self.tokenless = False

    def run(self, trace: Iterable[TraceRequest]) -> Outcome:
        """Raises ValueError for a request whose KV can never fit the device."""
        arrivals = _Arrivals(trace, self.settings.request_s)
        while self.live or arrivals.next_s < math.inf:
            if not self.live:
                self.now = max(self.now, arrivals.next_s)
            for job in arrivals.until(self.now):
                self._admit(job)
            self._step(arrivals.next_s)
        self.outcome.finished_s = self.now
        if isinstance(self.policy, SkipJoinMlfq):
            self.outcome.demotions, self.outcome.promotions = self.policy.demotions, self.policy.promotions
        return self.outcome

    def _admit(self, job: SimJob) -> None:
        capacity = self.settings.device_blocks
        if capacity is not None and self.settings.blocks(job.job.prompt_tokens + job.output) > capacity:
            raise ValueError(f"request {job.job.id} needs more KV blocks than the device's {capacity}")
        self.live[job.job.id] = job
        if self.finished is None:
            self.outcome.jobs.append(job)
        self.policy.add(job.job, self.now)
        self.placer.arrived(job, self.now)

    def _step(self, next_arrival: float) -> None:
        self.memory.land(self.now)
        self.policy.tick(self.now, self.settings.batch)
        arrived = (job.job for job in self.live.values())
        order = arrived if self.turns.oldest(self.tokenless) else self.policy
        picked = pick(order, self.settings.batch, self.placer.ready)
        enst = lambda: self.policy.enst(self.now, self.settings.batch)  # noqa: E731
        top = {job.id for job in islice(self.policy, self.settings.batch)}
        placement = self.placer.place([self.live[job.id] for job in picked], top, enst, self.now)
        running = self._budgeted(placement.runnable)
        blocked = self._off_the_device({job.job.id for job, _ in running})
        if not running:
            return self._stall(min(next_arrival, self.memory.next_landing()), blocked)
        return self._iterate(running, placement.wait_s, blocked)

    def _budgeted(self, runnable: list[SimJob]) -> list[tuple[SimJob, int]]:
        """Tokens of each job in this iteration, in rank order, within the token budget."""
        left = self.settings.token_budget or math.inf
        chosen = []
        for job in runnable:
            tokens = int(min(job.job.pending, left))
            if tokens:
                chosen.append((job, tokens))
                left -= tokens
        return chosen

    def _off_the_device(self, running: set[str]) -> list[SimJob]:
        """Jobs whose rank earns a slot now, had their KV been here."""
        if self.settings.device_blocks is None:
            return []
        top = (self.live[job.id] for job in islice(self.policy, self.settings.batch))
        moving = (Kv.HOST, Kv.LOADING, Kv.LEAVING)
        return [j for j in top if j.job.id not in running and (j.kv in moving or self.memory.leaving)]

    def _stall(self, until: float, blocked: list[SimJob]) -> None:
        if not math.isfinite(until) or until <= self.now:
            raise RuntimeError(f"the simulated engine cannot proceed with {len(self.live)} live jobs")
        self.outcome.stalled_s += until - self.now
        self._advance(until - self.now, blocked)

    def _iterate(self, running: list[tuple[SimJob, int]], wait_s: float, blocked: list[SimJob]) -> None:
        prefills = [tokens for job, tokens in running if job.job.prefilling]
        decodes = len(running) - len(prefills)
        seconds = self.profile.iteration_s(sum(prefills), decodes) + self._added_s(running)
        costs = [self._cost(job.job, tokens, decodes) for job, tokens in running]
        self._advance(seconds + wait_s, blocked)
        self.turns.passed(seconds + wait_s)
        self.outcome.iterations += 1
        first = running[0][0].job
        before = first.generated
        for (job, tokens), cost in zip(running, costs, strict=True):
            job.executing_s += seconds
            job.swapping_s += wait_s
            self._progress(job, tokens, cost)
        self.tokenless = first.generated == before
        if self.series:
            self.outcome.kv_series.append((self.now, self.memory.used))

    def _added_s(self, running: list[tuple[SimJob, int]]) -> float:
        """Seconds of one iteration beyond the profile."""
        context = sum(job.job.computed for job, _ in running if not job.job.prefilling)
        crowded = len(running) < len(self.live)
        self.outcome.crowded += crowded
        return self.settings.context_s * context + self.settings.crowd_s * crowded

    def _advance(self, seconds: float, blocked: list[SimJob]) -> None:
        self.now += seconds
        for job in blocked:
            if job.kv is Kv.HOST and not self.memory.leaving:
                job.displaced_s += seconds
            else:
                job.swapping_s += seconds

    def _cost(self, job: Job, tokens: int, decodes: int) -> float:
        return self.predicted.prefill(tokens) if job.prefilling else self.predicted.decode(decodes)

    def _progress(self, job: SimJob, tokens: int, cost: float) -> None:
        inner = job.job
        done = inner.pending - tokens
        inner.computed = inner.context - done
        if done == 0:
            inner.generated += 1
            job.progressed = True
            job.first_token_s = self.now if job.first_token_s is None else job.first_token_s
        if inner.generated >= job.output:
            return self._finish(job)
        return self.policy.served(inner, cost, self.now)

    def _finish(self, job: SimJob) -> None:
        job.finished_s = self.now
        self.policy.remove(job.job)
        self.memory.release(job)
        del self.live[job.job.id]
        if self.finished is not None:
            self.finished(job)


class _Arrivals:
    """Rows as the engine sees them, `delay_s` after they arrived."""

    def __init__(self, trace: Iterable[TraceRequest], delay_s: float) -> None:
        self._rows, self._delay_s = enumerate(trace), delay_s
        self._next = next(self._rows, None)

    @property
    def next_s(self) -> float:
        return self._next[1].arrival_s + self._delay_s if self._next else math.inf

    def until(self, now: float) -> Iterator[SimJob]:
        while self._next and self.next_s <= now:
            number, row = self._next
            yield SimJob(
                Job(str(number), row.arrival_s, row.prompt_tokens, row.output_tokens), model=row.model
            )
            self._next = next(self._rows, None)


def simulate(
    trace: Iterable[TraceRequest],
    policy: Policy,
    profile: IterationProfile,
    settings: SimSettings,
    *,
    series: bool = False,
    finished: Callable[[SimJob], None] | None = None,
) -> Outcome:
    """Replay a trace on a fresh engine. Raises ValueError for a request that can never fit.

    `finished` is given every job at its end; without it they are in the outcome.
    """
    return Engine(policy, profile, settings, series=series, finished=finished).run(trace)
