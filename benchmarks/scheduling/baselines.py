"""Orders of FastServe's evaluation (section 4.1): naive MLFQ, fixed priority by prompt length, and the SRPT oracle."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from coldstart.scheduling import Job, Policy, SkipJoinMlfq
from coldstart.vllm.scheduling.scheduler import PolicyScheduler


class _NaiveMlfq(SkipJoinMlfq):
    """Queues without skip-join: each job joins Q1 and moves down one level at a time."""

    def first_level(self, job: Job) -> int:
        return 0

    def next_level(self, job: Job) -> int:
        return min(job.level + 1, len(self.quanta) - 1)


class _Ranked(Policy):
    """Live jobs in order of a key, which changes only when the job is served; equal keys are in order of arrival."""

    def __init__(self, scheduler: PolicyScheduler) -> None:
        self.scheduler, self.profile = scheduler, scheduler.profile
        self._order: list[tuple[float, int, Job]] = []
        self._places: dict[str, tuple[float, int]] = {}
        self._arrived = 0

    def key(self, job: Job) -> float:
        return self.profile.prefill(job.prompt_tokens)

    def add(self, job: Job, now: float) -> None:
        self._arrived += 1
        job.unserved_since = now
        self._insert(job, self._arrived)

    def remove(self, job: Job) -> None:
        self._take_out(job)

    def __iter__(self) -> Iterator[Job]:
        # Iterate over a copy: the caller may serve or evict jobs during the iteration.
        return (job for _, _, job in list(self._order))

    def __len__(self) -> int:
        return len(self._order)

    def _insert(self, job: Job, number: int) -> None:
        self._places[job.id] = (self.key(job), number)
        insort(self._order, (*self._places[job.id], job))

    def _take_out(self, job: Job) -> int:
        place = self._places.pop(job.id)
        del self._order[bisect_left(self._order, place, key=lambda entry: entry[:2])]
        return place[1]


class _Srpt(_Ranked):
    """Shortest remaining processing time. It knows the length of each answer in advance."""

    def key(self, job: Job) -> float:
        left = self.scheduler.requests[job.id].max_tokens - job.generated
        pending = max(1, job.context - max(job.computed, job.cached_tokens))
        decode_s = self.profile.decode(1)
        first_s = self.profile.prefill(pending) if job.prefilling else decode_s
        return first_s + max(0, left - 1) * decode_s

    def add_service(self, job: Job, seconds: float, now: float) -> None:
        super().add_service(job, seconds, now)
        self._insert(job, self._take_out(job))
        self.moved += 1


class NaiveMlfqScheduler(PolicyScheduler):
    def create_ranking(self) -> Policy:
        return _NaiveMlfq(self.profile, self.settings)


class FixedPriorityScheduler(PolicyScheduler):
    def create_ranking(self) -> Policy:
        return _Ranked(self)


class SrptScheduler(PolicyScheduler):
    def create_ranking(self) -> Policy:
        return _Srpt(self)
