"""State of a simulated request, and the result of a run.

Invariants: latency >= execution + swapping + displacement for each job; 0 <= computed < context + in flight; a job
holds device blocks while it runs, is parked, or loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from coldstart.scheduling.job import Job


class Arrival(Protocol):
    """Row of a trace."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def model(self) -> str | None: ...


class Status(Enum):
    """vLLM's request states, as far as the simulator has them."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SimJob:
    """A job with its memory and its times (seconds of simulated time).

    `generated` tokens are sampled or will be by the iterations in flight; `delivered` of them are known. `flying`
    tokens are in flight; `stale` ones were in flight when the job was evicted. `computed` tokens have KV on the
    device; `hashed` of them were known when they were scheduled, so that vLLM finds their full blocks again. `cached`
    blocks of an evicted job remain there until they are overwritten. The host holds its blocks from `host_from` to
    `host_to`, of which the last look-up of the scheduler `remembered` a number as loadable.

    For a job whose rank is sufficient for a slot but that does not run, `swapping_s` counts the time in which its KV
    is being copied. `displaced_s` counts the time in which its KV is on the host while other jobs hold the blocks.
    """

    job: Job
    output: int
    model: str | None = None
    status: Status = Status.WAITING
    blocks: int = 0
    computed: int = 0
    generated: int = 0
    delivered: int = 0
    flying: int = 0
    stale: int = 0
    evictions: int = 0
    lost: int = 0
    cached: int = 0
    hashed: int = 0
    host_from: int = 0
    host_to: int = 0
    remembered: int | None = None
    scheduled_step: int = 0
    stored_step: int = -1
    stored_s: float = 0.0
    landing_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    executing_s: float = 0.0
    swapping_s: float = 0.0
    displaced_s: float = 0.0

    @property
    def known(self) -> int:
        """Return the number of tokens that the scheduler has seen (vLLM's num_tokens)."""
        return self.job.prompt_tokens + self.delivered

    @property
    def context(self) -> int:
        """Return the number of known tokens and tokens in flight."""
        return self.job.prompt_tokens + self.generated

    @property
    def pending(self) -> int:
        """Return the number of tokens to compute until the next one."""
        return self.job.prompt_tokens + self.generated - self.computed

    @property
    def ending(self) -> bool:
        """Return whether the iterations in flight reach its last token."""
        return self.generated >= self.output

    @property
    def running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def loading(self) -> bool:
        """Return whether its KV is being loaded from the host, or is loaded while the job has no slot."""
        return self.status is Status.LOADING

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


Served = list[tuple[SimJob, int]]
"""Jobs and their tokens in one iteration."""


@dataclass(slots=True)
class Step:
    """One decision: `sampled` jobs get a token; decoding jobs read `context` tokens."""

    served: Served = field(default_factory=list)
    sampled: list[SimJob] = field(default_factory=list)
    prefill_tokens: int = 0
    decodes: int = 0
    context: int = 0


@dataclass(slots=True)
class Outcome:
    """All finished jobs in order of arrival, and counters of the run; `served` sums the jobs of all iterations."""

    jobs: list[SimJob] = field(default_factory=list)
    finished_s: float = 0.0
    iterations: int = 0
    served: int = 0
    crowded: int = 0
    stalled_s: float = 0.0
    evictions: int = 0
    blocks_evicted: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    recomputed_tokens: int = 0
    demotions: int = 0
    promotions: int = 0
    peak_blocks: int = 0
    kv_series: list[tuple[float, int]] = field(default_factory=list)

    @property
    def mean_running(self) -> float:
        return self.served / max(1, self.iterations)
