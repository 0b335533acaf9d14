"""Scheduling state of a request.

Invariant: 0 <= computed <= context, where context = prompt + generated tokens. `computed_tokens` is the number of tokens whose
KV is in device memory, so the next iteration computes context - computed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.scheduling.profile import IterationProfile


@dataclass(slots=True, eq=False)
class Job:
    """Scheduling state of an unfinished request.

    `priority` is set by the client: a job with a negative priority stays in the first queue, and a job with priority n >
    0 joins level n or lower. `level_service_s` is the service in seconds that it has received since it entered its queue.
    `is_within_prompt` is True if its latest iteration computed a prompt chunk other than the last.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    priority: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    level: int = 0
    level_service_s: float = 0.0
    unserved_since: float = 0.0
    promotions: int = 0
    is_within_prompt: bool = False

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    @property
    def pending_tokens(self) -> int:
        """Return the number of tokens that the next iteration computes, not counting prefix cache hits."""
        return max(1, self.context_tokens - max(self.computed_tokens, self.cached_tokens))

    @property
    def is_prefilling(self) -> bool:
        return self.pending_tokens > 1 or self.generated_tokens == 0

    def predict_iteration_s(self, profile: IterationProfile, batch: int = 1) -> float:
        """Return the predicted duration of the job's next iteration in seconds."""
        return profile.prefill(self.pending_tokens) if self.is_prefilling else profile.decode(batch)
