"""What one request experienced. Times are seconds from the replay's start.

Invariant: due_s <= sent_s <= first_token_s <= finished_s wherever they are known. Latencies count from due_s,
the time the trace asked for, so a late client never flatters the server.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestRecord:
    """`answer` is a digest of the answer's token ids, where the replay asked for them: equal for equal answers."""

    number: int
    due_s: float
    prompt_tokens: int
    wanted_tokens: int
    model: str | None = None
    target: str = ""
    sent_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    output_tokens: int = 0
    answer: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.finished_s is not None and self.output_tokens > 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def normalized_s(self) -> float | None:
        """End-to-end latency per output token (FastServe, section 6.1)."""
        return (
            None if self.latency_s is None or not self.output_tokens else self.latency_s / self.output_tokens
        )

    @property
    def lag_s(self) -> float | None:
        """How late the client itself was."""
        return None if self.sent_s is None else self.sent_s - self.due_s
