"""Skip-join multi-level feedback queues (FastServe, sections 4.1 and 4.2, Algorithm 1).

Invariants: a job is in exactly one queue, at level job.level, and joins the highest queue whose quantum covers its first
iteration. A job is demoted only after it has used its quantum, by at least eta levels and to a level whose quantum covers its
next iteration. A job without service for alpha seconds moves to the tail of Q1; in the tempered variant, alpha doubles with
each such promotion of the job. The chunks of a prompt together count as one iteration in the sense of the paper: their
times add up, and the job is not demoted between them.

Equations: the quantum of a queue is twice that of the queue above. ENST(i), the estimated next scheduled time of job i, is
min(T_promote(i), T_execute(i)). T_promote(i) is the time until job i is promoted, B is the batch size, and T_execute(i) =
1/B * sum over jobs j of higher priority of the quanta from j's level down to i's, exclusive. T_execute depends only on the
level, so one pass over the queues gives it for every job.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count

from coldstart.scheduling.job import Job
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings

DECODE_TOKENS_COVERED = 4096
"""Tokens that a job can decode before it reaches the last queue, with the default number of levels."""
# Measured times of the same iteration differ in the last digits, but must lead to the same level.
_SLACK = 1 - 1e-9


class SkipJoinMlfq:
    """Queues Q1 to Qn of unfinished jobs, with `quanta` in seconds. Iterating yields every job, highest priority first.

    The engine calls `add` when a job arrives, `add_service` after each iteration for each job that ran,
    `promote_starved_jobs` before each decision, and `remove` when a job ends. Times are in seconds on one clock. `moved`
    counts the moves between queues.
    """

    def __init__(self, profile: IterationProfile, settings: SchedulerSettings | None = None) -> None:
        self.profile = profile
        self.settings = s = settings or SchedulerSettings()
        first = s.first_quantum_s if s.first_quantum_s is not None else profile.shortest_iteration_s
        longest = max(profile.prefill.ys[-1], DECODE_TOKENS_COVERED * profile.decode.ys[0])
        levels = s.levels or next(n for n in count(1) if first * 2.0 ** (n - 1) >= longest)
        self.quanta = [first * 2.0**level for level in range(levels)]
        self._quantum_limits = [quantum * _SLACK for quantum in self.quanta]
        self.queues = [OrderedDict[str, Job]() for _ in self.quanta]
        self.demotions = self.promotions = self.moved = 0
        # Jobs below Q1, grouped by patience factor; each group is sorted by unserved_since, which `_mark_served` sets to now.
        self._unserved: dict[float, OrderedDict[str, Job]] = {}
        self._patience_growth = 2.0 if s.mlfq == "tempered" else 1.0
        self._promoted: set[str] = set()
        # Predicted prefill time, beyond the shortest iteration, of each job whose prompt is not computed yet.
        self._prefill_s: dict[str, float] = {}
        self._total_prefill_s = 0.0

    def compute_first_level(self, job: Job) -> int:
        """Return the highest level whose quantum covers the job's first iteration (skip-join), or the level below the last."""
        return bisect_left(self.quanta, job.predict_iteration_s(self.profile) * _SLACK)

    def add(self, job: Job, now: float) -> None:
        level = 0 if job.priority < 0 else max(self.compute_first_level(job), job.priority)
        self._enqueue(job, min(level, len(self.quanta) - 1))
        job.level_service_s = 0.0
        self._mark_served(job, now)
        self._update_prefill_time(job)

    def remove(self, job: Job) -> None:
        del self.queues[job.level][job.id]
        if job.level:
            del self._unserved[self._patience_factor(job)][job.id]
        self._promoted.discard(job.id)
        self._total_prefill_s -= self._prefill_s.pop(job.id, 0.0)

    def add_service(self, job: Job, seconds: float, now: float) -> None:
        """Record `seconds` of service that ended at `now`, and demote the job if it has used its quantum."""
        job.level_service_s += seconds
        self._mark_served(job, now)
        if job.id in self._prefill_s:
            self._update_prefill_time(job)
        used_quantum = job.level_service_s >= self._quantum_limits[job.level]
        if used_quantum and job.priority >= 0 and not job.is_within_prompt:
            self._demote(job)

    def add_decode_step(self, jobs: Iterable[Job], seconds: float, now: float) -> None:
        """Record an iteration that generated one token for each job.

        Equivalent to `add_service` for each job, but 3 times faster.
        """
        used, unserved, growth = self._quantum_limits, self._unserved, self._patience_growth
        for job in jobs:
            job.generated_tokens += 1
            job.computed_tokens += 1
            job.level_service_s = attained = job.level_service_s + seconds
            job.unserved_since = now
            if job.level:
                unserved[growth**job.promotions].move_to_end(job.id)
            if attained >= used[job.level] and job.priority >= 0:
                self._demote(job)

    def promote_starved_jobs(self, now: float, batch: int) -> None:
        """Promote starved jobs to the first queue. `batch` is the current batch size."""
        limit = self.compute_starvation_limit_s(batch)
        for patience, same_patience in sorted(self._unserved.items()):
            while same_patience:
                job = next(iter(same_patience.values()))
                if now - job.unserved_since < limit * patience:
                    break
                if not self._promote(job, now, batch):
                    return

    def _patience_factor(self, job: Job) -> float:
        """Return the factor by which the job's starvation limit is multiplied.

        Promoted jobs evict other jobs, which evict them in turn when they are promoted. In the tempered variant, the
        limit doubles with each promotion, so a request that lives for T seconds is promoted at most log2(1 + T / alpha)
        times.
        """
        return float(self._patience_growth**job.promotions)

    def compute_starvation_limit_s(self, batch: int) -> float:
        """Return the current starvation limit in seconds.

        The load is the time that one iteration of every job takes: decoding jobs share iterations, but prefill times add up.
        """
        load_s = len(self) / batch * self.profile.decode(batch) + max(0.0, self._total_prefill_s)
        return max(self.settings.alpha_s, self.settings.alpha_growth * load_s)

    def enst(self, now: float, batch: int) -> Callable[[Job], float]:
        """Return a function that predicts the next scheduled time of a job (ENST), in seconds from now."""
        execute, above, limit = [0.0], 0, self.compute_starvation_limit_s(batch)
        for queue, quantum in zip(self.queues, self.quanta, strict=True):
            above += len(queue)
            execute.append(execute[-1] + quantum * above / batch)

        def next_time(job: Job) -> float:
            promoted = job.unserved_since + limit * self._patience_factor(job) - now
            return execute[job.level] if execute[job.level] < promoted else max(0.0, promoted)

        return next_time

    def __iter__(self) -> Iterator[Job]:
        return chain.from_iterable(queue.values() for queue in self.queues)

    def __len__(self) -> int:
        return sum(map(len, self.queues))

    def _enqueue(self, job: Job, level: int) -> None:
        job.level = level
        self.queues[level][job.id] = job

    def _move(self, job: Job, level: int) -> None:
        del self.queues[job.level][job.id]
        self._enqueue(job, level)
        self.moved += 1

    def _demote(self, job: Job) -> None:
        self._promoted.discard(job.id)
        level = min(max(job.level + self.settings.eta, self.compute_first_level(job)), len(self.quanta) - 1)
        job.level_service_s = 0.0
        if level != job.level:
            self._move(job, level)
            self._mark_served(job, job.unserved_since)
            self.demotions += 1

    def _promote(self, job: Job, now: float, batch: int) -> bool:
        """Move a starved job to Q1. Return False if Q1 already contains the maximum number of promoted jobs."""
        if len(self._promoted) + 1 > max(1.0, self.settings.promoted_share * batch):
            return False
        self._move(job, 0)
        self._promoted.add(job.id)
        job.level_service_s = 0.0
        del self._unserved[self._patience_factor(job)][job.id]
        job.promotions += 1
        self.promotions += 1
        self._mark_served(job, now)
        return True

    def _update_prefill_time(self, job: Job) -> None:
        self._total_prefill_s -= self._prefill_s.pop(job.id, 0.0)
        if job.is_prefilling:
            left_s = job.predict_iteration_s(self.profile) - self.profile.shortest_iteration_s
            self._prefill_s[job.id] = left_s
            self._total_prefill_s += left_s
        if not self._prefill_s:
            self._total_prefill_s = 0.0  # drop the rounding errors of the sum

    def _mark_served(self, job: Job, now: float) -> None:
        job.unserved_since = now
        if job.level:
            same_patience = self._unserved.setdefault(self._patience_factor(job), OrderedDict())
            same_patience[job.id] = job
            same_patience.move_to_end(job.id)


class OrderAlternation:
    """Alternation between the order of the policy and arrival order, which is used for the fraction `share` of the time.

    Invariant: |time in arrival order - share * total time| is at most the time of one iteration, or of one run of iterations
    in the same order. During its share, arrival order makes each job progress at least as fast as under FCFS. With enough KV
    memory and iterations of equal cost, each latency is at most 1/share times that of FCFS, plus two iterations; with
    unequal costs, this is approximate.
    """

    def __init__(self, share: float) -> None:
        self.share, self._uses_arrival_order = share, False
        self._arrival_order_s = self._total_s = 0.0

    def add_time(self, seconds: float) -> None:
        """Add the duration of the latest iteration, in seconds."""
        self._total_s += seconds
        self._arrival_order_s += seconds * self._uses_arrival_order

    def choose_arrival_order(self) -> bool:
        """Return whether the next iteration serves requests in arrival order, and remember this for `add_time`."""
        self._uses_arrival_order = self.share > 0 and self._arrival_order_s <= self.share * self._total_s
        return self._uses_arrival_order
