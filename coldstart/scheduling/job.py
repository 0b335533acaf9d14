"""One request as the policies see it.

Invariant: 0 <= computed <= context, where context = prompt + generated tokens; `computed` counts the tokens
whose KV exists in device memory, so context - computed tokens enter the job's next iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.scheduling.profile import IterationProfile


@dataclass(slots=True, eq=False)
class Job:
    """A live request.

    `output_tokens` is known to the simulator and to the SRPT oracle only. `priority` is the caller's wish:
    below zero the job stays in the first queue, above zero it joins no queue higher than that one.
    `attained_s` is the service received since it entered its present queue, `blocked_s` the time that its rank
    had earned a slot while its KV was not on the device.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int = 0
    priority: int = 0
    generated: int = 0
    computed: int = 0
    level: int = 0
    attained_s: float = 0.0
    unserved_since: float = 0.0
    demotions: int = 0
    promotions: int = 0
    blocked_s: float = 0.0

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.generated

    @property
    def pending(self) -> int:
        """Tokens that the next iteration has to compute, after prefix-cache hits."""
        return max(1, self.context - max(self.computed, self.cached_tokens))

    @property
    def prefilling(self) -> bool:
        return self.pending > 1 or self.generated == 0

    def next_s(self, profile: IterationProfile, batch: int = 1) -> float:
        """Predicted time of the job's next iteration, in seconds."""
        return profile.prefill(self.pending) if self.prefilling else profile.decode(batch)

    def remaining_s(self, profile: IterationProfile, batch: int = 1) -> float:
        """What is left to do; only where the output length is known. Raises ValueError otherwise."""
        if self.output_tokens is None:
            raise ValueError(f"job {self.id}: SRPT needs the output length, which only a trace knows")
        left = max(0, self.output_tokens - self.generated - 1)
        return self.next_s(profile, batch) + left * profile.decode(batch)
