"""One request of a trace, and what went wrong while reading others.

Invariant: arrival_s >= 0 seconds from the trace's start, prompt_tokens >= 1, output_tokens >= 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coldstart.errors import UsageError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`hash_ids` name the prompt's prefix blocks (Mooncake: 512 tokens each); equal ids mean equal tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    model: str | None = None
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BadRow:
    line: int
    reason: str


class TraceError(UsageError):
    """A trace that cannot be used: an unknown format, a missing column, or a refused malformed row."""


@dataclass(slots=True)
class TraceReport:
    """Filled while a trace is read: rows given out, rows skipped, the first `keep` with their reasons."""

    rows: int = 0
    skipped: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)
    keep: int = 100

    def skip(self, line: int, reason: str) -> None:
        self.skipped += 1
        if len(self.bad_rows) < self.keep:
            self.bad_rows.append(BadRow(line, reason))
