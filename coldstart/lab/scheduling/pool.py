"""The device's KV blocks, with what evicted requests leave in the prefix cache.

Invariants: 0 <= held <= capacity; blocks are reused as in vLLM's free queue: first those without a hash, then the others
in the order in which they were freed, each request's last block first, so that what survives of a request is a prefix.
Requests share nothing.
"""

from __future__ import annotations

from collections import deque

from coldstart.lab.scheduling.state import SimJob

ENDLESS = 1 << 60


class _Freed:
    """Blocks of one request in the free queue."""

    __slots__ = ("count", "job")

    def __init__(self, job: SimJob | None, count: int) -> None:
        self.job, self.count = job, count


class Pool:
    """`leaving` blocks are held until their copy has landed."""

    def __init__(self, capacity: int | None, block_tokens: int) -> None:
        self.capacity = ENDLESS if capacity is None else capacity
        self.block_tokens = block_tokens
        self.held = self.leaving = self.peak = 0
        self._plain = self.capacity
        self._queue: deque[_Freed] = deque()
        self._cached: dict[SimJob, _Freed] = {}

    @property
    def free(self) -> int:
        return self.capacity - self.held

    def grow(self, job: SimJob, tokens: int) -> bool:
        """Let the job hold `tokens`; False and nothing done where the blocks are not there."""
        extra = -(-tokens // self.block_tokens) - job.blocks
        if extra > 0:
            if extra > self.free:
                return False
            self._take(extra)
            job.blocks += extra
        return True

    def revive(self, job: SimJob) -> int:
        """Take back what survived of an evicted job; the blocks."""
        left = self._cached.pop(job, None)
        if left is None:
            return 0
        count, left.count, left.job = left.count, 0, None
        self.held += count
        self.peak = max(self.peak, self.held)
        job.blocks += count
        job.cached = 0
        return count

    def drop(self, job: SimJob, hashed: int) -> None:
        """Free all the job holds; the first `hashed` blocks stay readable until they are overwritten."""
        hashed = min(hashed, job.blocks)
        self.held -= job.blocks
        self._plain += job.blocks - hashed
        job.blocks, job.cached = 0, hashed
        if hashed:
            freed = _Freed(None if job.finished else job, hashed)
            self._queue.append(freed)
            if freed.job is not None:
                self._cached[job] = freed

    def forget(self, job: SimJob) -> None:
        """The job will not come back."""
        left = self._cached.pop(job, None)
        if left is not None:
            left.job = None

    def _take(self, count: int) -> None:
        self.held += count
        self.peak = max(self.peak, self.held)
        plain = min(count, self._plain)
        self._plain -= plain
        count -= plain
        while count:
            oldest = self._queue[0]
            used = min(count, oldest.count)
            oldest.count -= used
            count -= used
            if oldest.job is not None:
                oldest.job.cached = oldest.count
            if not oldest.count:
                if oldest.job is not None:
                    del self._cached[oldest.job]
                self._queue.popleft()
