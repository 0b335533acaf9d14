"""Event loop of the simulated engine: arrivals, a decision, one iteration, its tokens.

Equation: an iteration takes profile.iteration_s(prefill tokens, decoding jobs) + context_s * context of the decoding
jobs, + crowd_s if a live job is not in it, plus the copies that it must wait for. The decision for an iteration is
made `depth` - 1 iterations before its start, while earlier iterations still run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from coldstart.errors import UsageError
from coldstart.lab.scheduling.placed import PlacedScheduler
from coldstart.lab.scheduling.settings import CONTEXT_SHARE, SimSettings
from coldstart.lab.scheduling.state import Arrival, Outcome, SimJob, Step
from coldstart.lab.scheduling.stock import StockScheduler
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import SkipJoinMlfq
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import FCFS, SchedulerSettings

MOST_EMPTY = 8
"""Maximum number of consecutive empty iterations: a decision may wait for the report of the one before."""


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One iteration; `sampled` are the jobs that sample a token in it, each with its earlier number of evictions."""

    end_s: float
    sampled: list[tuple[SimJob, int]]
    steps: int


class Engine:
    """One simulated engine; `run` may be called once. Its arrivals must be ordered by time."""

    def __init__(
        self,
        profile: IterationProfile,
        settings: SchedulerSettings,
        machine: SimSettings,
        *,
        series: bool = False,
        finished: Callable[[SimJob], None] | None = None,
    ) -> None:
        self.profile, self.settings, self.machine, self.series = profile, settings, machine, series
        self.finished = finished
        self.outcome, self.now = Outcome(), 0.0
        self.scheduler = scheduler(profile, settings, machine, self.outcome)
        self.live: dict[SimJob, None] = {}
        self._flight: deque[_Iteration] = deque()
        self._busy_until, self._stuck = 0.0, 0
        given = machine.context_s
        self._context_s = CONTEXT_SHARE * profile.decode(1) if given is None else given

    def run(self, trace: Iterable[Arrival]) -> Outcome:
        """Run the trace. Raises ValueError or UsageError for a request whose KV never fits the device."""
        arrivals = _Arrivals(trace, self.machine.request_s)
        while self.live or arrivals.next_s < math.inf:
            if not self.live:
                self.now = max(self.now, arrivals.next_s)
            for job in arrivals.take_until(self.now):
                self._admit(job)
            self._step(arrivals.next_s)
        self.outcome.finished_s = self.now
        self.outcome.peak_blocks = self.scheduler.pool.peak
        ranking = getattr(self.scheduler, "ranking", None)
        if isinstance(ranking, SkipJoinMlfq):
            self.outcome.demotions, self.outcome.promotions = ranking.demotions, ranking.promotions
        return self.outcome

    def _admit(self, job: SimJob) -> None:
        needed, capacity = self._blocks(job), self.scheduler.pool.capacity
        if needed > capacity:
            raise ValueError(
                f"request {job.job.id} needs {needed} KV blocks, more KV blocks than the device's {capacity}"
            )
        self.live[job] = None
        if self.finished is None:
            self.outcome.jobs.append(job)
        self.scheduler.add(job, self.now)

    def _step(self, next_arrival: float) -> None:
        self.scheduler.land(self.now)
        self.scheduler.start_s = max(self.now, self._busy_until)
        step = self.scheduler.schedule(self.now)
        if step.served:
            self._launch(step)
            if len(self._flight) >= self.machine.depth:
                self._deliver(self._flight.popleft())
            return
        if self._flight:
            self._deliver(self._flight.popleft())
        else:
            self._stall(min(next_arrival, self.scheduler.next_landing()))
        # An empty iteration ends at once and reports the copies that have landed.
        self.scheduler.processed, self.scheduler.reported_s = self.scheduler.steps, self.now

    def _launch(self, step: Step) -> None:
        """Queue the chosen iteration after those in flight."""
        self._stuck = 0
        crowded = len(step.served) < len(self.live)
        seconds = self.profile.iteration_s(step.prefill_tokens, step.decodes) + self._context_s * step.context
        seconds += self.machine.crowd_s * crowded
        wait_s, self.scheduler.wait_s = self.scheduler.wait_s, 0.0
        self._busy_until = max(self.now, self._busy_until) + seconds + wait_s
        sampled = [(job, job.evictions) for job in step.sampled]
        self._flight.append(_Iteration(self._busy_until, sampled, self.scheduler.steps))
        self.outcome.crowded += crowded
        self._account(step, seconds, wait_s)

    def _account(self, step: Step, seconds: float, wait_s: float) -> None:
        outcome = self.outcome
        outcome.iterations += 1
        outcome.served += len(step.served)
        for job, _ in step.served:
            job.executing_s += seconds
            job.swapping_s += wait_s
        self._hold_up(seconds + wait_s)
        if self.series:
            outcome.kv_series.append((self._busy_until, self.scheduler.pool.held))

    def _hold_up(self, seconds: float) -> None:
        for job in self.scheduler.blocked():
            if job.landing_s is not None:
                job.swapping_s += seconds
            else:
                job.displaced_s += seconds

    def _deliver(self, iteration: _Iteration) -> None:
        self.now = max(self.now, iteration.end_s)
        self.scheduler.processed, self.scheduler.reported_s = iteration.steps, iteration.end_s
        for job, evictions in iteration.sampled:
            if job.evictions == evictions:
                job.flying -= 1
            else:
                job.stale -= 1
            job.delivered += 1
            if job.first_token_s is None:
                job.first_token_s = self.now
            if job.delivered >= job.output:
                self._finish(job)

    def _finish(self, job: SimJob) -> None:
        job.finished_s = self.now
        self.scheduler.finish(job)
        del self.live[job]
        if self.finished is not None:
            self.finished(job)

    def _stall(self, until: float) -> None:
        if not math.isfinite(until) or until <= self.now:
            self._stuck += 1
            if self._stuck > MOST_EMPTY:
                raise self._deadlock()
            return
        self.outcome.stalled_s += until - self.now
        self._hold_up(until - self.now)
        self.now = until

    def _deadlock(self) -> Exception:
        """Return the error of a scheduler that runs no job.

        Placement counts one block beyond the tokens of an evicted job, so a job as large as the device may not return.
        """
        blocks, capacity = max(map(self._blocks, self.live)), self.scheduler.pool.capacity
        if blocks < capacity:
            return RuntimeError(
                f"the scheduler chose none of {len(self.live)} unfinished jobs {self._stuck} times in a row"
            )
        return UsageError(
            f"{self.settings.policy} cannot continue any of {len(self.live)} requests: one of them needs all {capacity} KV"
            " blocks of the device",
            hint=f"--kv-blocks {blocks + 1}, or shorter requests: --max-prompt, --max-output",
        )

    def _blocks(self, job: SimJob) -> int:
        """Return the number of KV blocks of a job at its end."""
        return self.machine.blocks(job.job.prompt_tokens + job.output)


def scheduler(
    profile: IterationProfile, settings: SchedulerSettings, machine: SimSettings, outcome: Outcome
) -> StockScheduler:
    """Return the server's scheduler by its name; it uses its own profile for predictions if the settings contain one."""
    predicted = profile if settings.profile is None else settings.iteration_profile()
    if settings.policy == FCFS:
        return StockScheduler(machine, settings, outcome)
    return PlacedScheduler(machine, settings, outcome, predicted)


class _Arrivals:
    """Requests as the engine receives them, `delay_s` seconds after their arrival."""

    def __init__(self, trace: Iterable[Arrival], delay_s: float) -> None:
        self._rows, self._delay_s = enumerate(trace), delay_s
        self._next = next(self._rows, None)

    @property
    def next_s(self) -> float:
        return self._next[1].arrival_s + self._delay_s if self._next else math.inf

    def take_until(self, now: float) -> Iterator[SimJob]:
        while self._next and self.next_s <= now:
            number, row = self._next
            job = Job(str(number), row.arrival_s, row.prompt_tokens, row.output_tokens)
            yield SimJob(job, max(1, row.output_tokens or 1), row.model)
            self._next = next(self._rows, None)


def simulate(
    trace: Iterable[Arrival],
    profile: IterationProfile,
    settings: SchedulerSettings,
    machine: SimSettings | None = None,
    *,
    series: bool = False,
    finished: Callable[[SimJob], None] | None = None,
) -> Outcome:
    """Replay a trace on a new engine. Raises ValueError for a request that never fits.

    `finished` receives every job at its end; without it the jobs are in the outcome.
    """
    engine = Engine(profile, settings, machine or SimSettings(), series=series, finished=finished)
    return engine.run(trace)
