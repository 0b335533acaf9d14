"""A simulated job's KV, and what a run leaves behind.

Invariant: held device blocks never exceed the pool; latency = queueing + execution + swapping + displacement for each job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coldstart.scheduling.job import Job


class Kv(Enum):
    """Where a job's KV is. A job without any (new, or dropped) is ready: it computes its context again."""

    NONE = "none"
    DEVICE = "device"
    LEAVING = "leaving"
    HOST = "host"
    LOADING = "loading"


@dataclass(slots=True, eq=False)
class SimJob:
    """A job with its memory and its clock readings (seconds of simulated time).

    Where its rank earns a slot and it does not run, `swapping_s` counts the time in which a copy is under way, of its own KV
    or of what makes room for it, `displaced_s` that in which its KV is on the host and others hold its room.
    """

    job: Job
    kv: Kv = Kv.NONE
    blocks: int = 0
    landing_s: float = 0.0
    progressed: bool = True
    first_token_s: float | None = None
    finished_s: float | None = None
    executing_s: float = 0.0
    swapping_s: float = 0.0
    displaced_s: float = 0.0
    model: str | None = None

    @property
    def output(self) -> int:
        return self.job.output_tokens or 1


@dataclass(slots=True)
class Outcome:
    """Every finished job in order of arrival, and the run's counters."""

    jobs: list[SimJob] = field(default_factory=list)
    finished_s: float = 0.0
    iterations: int = 0
    crowded: int = 0
    stalled_s: float = 0.0
    blocks_out: int = 0
    blocks_in: int = 0
    recomputed_tokens: int = 0
    demotions: int = 0
    promotions: int = 0
    peak_blocks: int = 0
    kv_series: list[tuple[float, int]] = field(default_factory=list)
