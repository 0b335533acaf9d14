"""Skip-join multi-level feedback queues (FastServe, section 4.1, Algorithm 1).

Invariants: a job joins the highest queue whose quantum covers its first iteration. A job is demoted only
after it has used its quantum, by at least eta levels and to a level whose quantum covers its next iteration.
A job without service for alpha seconds moves to the tail of Q1; in the tempered form, alpha doubles with each such
promotion of the job. The chunks of one prompt are one iteration of the paper: they use the quantum together, and the job
is not demoted between them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from coldstart.scheduling import enst, quanta
from coldstart.scheduling.job import Job
from coldstart.scheduling.policy import Policy
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.queues import LevelQueues
from coldstart.scheduling.settings import SchedulerSettings


class SkipJoinMlfq(Policy):
    """Queues Q1 to Qn of live jobs; `demotions` and `promotions` are counted since the start."""

    def __init__(self, profile: IterationProfile, settings: SchedulerSettings | None = None) -> None:
        self.profile = profile
        self.settings = s = settings or SchedulerSettings()
        first = s.first_quantum_s if s.first_quantum_s is not None else profile.shortest_s
        levels = s.levels if s.levels is not None else quanta.count_levels(profile, first)
        self.quanta = quanta.geometric(first, levels)
        self._used = [quantum * (1 - 1e-9) for quantum in self.quanta]
        self.queues = LevelQueues(levels)
        self.demotions = self.promotions = 0
        # By patience, each sorted by unserved_since: `_touch` sets it to now and moves the job to the end.
        self._unserved: dict[float, OrderedDict[str, Job]] = {}
        self._patience_growth = 2.0 if s.mlfq == "tempered" else 1.0
        self._promoted: set[str] = set()
        # Predicted prefill time of each job whose prompt is not computed, beyond the shortest iteration.
        self._prefill_s: dict[str, float] = {}
        self._all_prefill_s = 0.0

    def first_level(self, job: Job) -> int:
        """Return the highest level whose quantum covers the job's first iteration (skip-join)."""
        return quanta.join_level(self.quanta, job.next_s(self.profile))

    def next_level(self, job: Job) -> int:
        """Return the level of a job that has used its quantum."""
        asked = quanta.join_level(self.quanta, job.next_s(self.profile))
        return min(max(job.level + self.settings.eta, asked), len(self.quanta) - 1)

    def add(self, job: Job, now: float) -> None:
        level = 0 if job.priority < 0 else max(self.first_level(job), job.priority)
        self.queues.push(job, min(level, len(self.quanta) - 1))
        job.attained_s = 0.0
        self._touch(job, now)
        self._note_prefill(job)

    def remove(self, job: Job) -> None:
        self.queues.remove(job)
        del self._unserved[self._patience(job)][job.id]
        self._promoted.discard(job.id)
        self._all_prefill_s -= self._prefill_s.pop(job.id, 0.0)

    def add_service(self, job: Job, seconds: float, now: float) -> None:
        super().add_service(job, seconds, now)
        self._touch(job, now)
        if job.id in self._prefill_s:
            self._note_prefill(job)
        if self._used_quantum(job) and job.priority >= 0 and not job.within_prompt:
            self._demote(job)

    def add_decode_step(self, jobs: Iterable[Job], seconds: float, now: float) -> None:
        # Equivalent to add_service() for each job, in a third of the time.
        used, unserved, growth = self._used, self._unserved, self._patience_growth
        for job in jobs:
            job.generated += 1
            job.computed += 1
            job.attained_s = attained = job.attained_s + seconds
            job.unserved_since = now
            unserved[growth**job.promotions].move_to_end(job.id)
            if attained >= used[job.level] and job.priority >= 0:
                self._demote(job)

    def tick(self, now: float, batch: int) -> None:
        limit = self.alpha(batch)
        for patience, alike in sorted(self._unserved.items()):
            for _ in range(len(alike)):
                job = next(iter(alike.values()))
                if now - job.unserved_since < limit * patience:
                    break
                if not self._promote(job, now, batch):
                    return

    def _patience(self, job: Job) -> float:
        """Return the factor of the job's starvation limit.

        Each promotion lets the job evict others, which evict it when they are promoted. In the tempered form the limit doubles
        with each promotion, so a request that lives for T seconds is promoted at most log2(1 + T / alpha) times.
        """
        return float(self._patience_growth**job.promotions)

    def alpha(self, batch: int) -> float:
        """Return the current starvation limit in seconds.

        The load is the time in which each job can have one iteration: decoding jobs share one, prompts add up.
        """
        load_s = len(self) / batch * self.profile.decode(batch) + max(0.0, self._all_prefill_s)
        return max(self.settings.alpha_s, self.settings.alpha_growth * load_s)

    def enst(self, now: float, batch: int) -> Callable[[Job], float]:
        execute = enst.execute_times(self.queues.counts(), self.quanta, batch)
        limit = self.alpha(batch)

        def soonest(job: Job) -> float:
            promoted, executed = job.unserved_since + limit * self._patience(job) - now, execute[job.level]
            return executed if executed < promoted else max(0.0, promoted)

        return soonest

    def __iter__(self) -> Iterator[Job]:
        return iter(self.queues)

    def __len__(self) -> int:
        return sum(map(len, self._unserved.values()))

    def _used_quantum(self, job: Job) -> bool:
        return job.attained_s >= self._used[job.level]

    def _demote(self, job: Job) -> None:
        self._promoted.discard(job.id)
        level = self.next_level(job)
        job.attained_s = 0.0
        if level != job.level:
            self.queues.move(job, level)
            self.moved += 1
            job.demotions += 1
            self.demotions += 1

    def _promote(self, job: Job, now: float, batch: int) -> bool:
        """Move the longest unserved job to Q1; return False if Q1 has as many promoted jobs as allowed."""
        if job.level == 0:
            self._touch(job, now)
            return True
        if len(self._promoted) + 1 > max(1.0, self.settings.promoted_share * batch):
            return False
        self.queues.move(job, 0)
        self.moved += 1
        self._promoted.add(job.id)
        job.attained_s = 0.0
        del self._unserved[self._patience(job)][job.id]
        job.promotions += 1
        self.promotions += 1
        self._touch(job, now)
        return True

    def _note_prefill(self, job: Job) -> None:
        self._all_prefill_s -= self._prefill_s.pop(job.id, 0.0)
        if job.prefilling:
            self._prefill_s[job.id] = left_s = job.next_s(self.profile) - self.profile.shortest_s
            self._all_prefill_s += left_s
        if not self._prefill_s:
            self._all_prefill_s = 0.0  # without the rounding errors of the sum

    def _touch(self, job: Job, now: float) -> None:
        job.unserved_since = now
        alike = self._unserved.setdefault(self._patience(job), OrderedDict())
        alike[job.id] = job
        alike.move_to_end(job.id)
