"""Handover of one stream from a pipeline to a single worker (ParaServe, section 6.2), without I/O.

attached --prepare--> preparing --ready--> draining(k) --drained--> moving(kv or recompute) --first token--> resumed
preparing, draining, moving --timeout or failure--> rolled back: the group continues

The gateway asks for every token whether to send it. Invariant: the client gets tokens 0, 1, 2, ... once each and in
order, whichever side generates them; later tokens of a side that no longer owns the stream are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HandoverPhase(StrEnum):
    ATTACHED = "attached"
    PREPARING = "preparing"
    DRAINING = "draining"
    MOVING = "moving"
    RESUMED = "resumed"
    ROLLED_BACK = "rolled back"


class Means(StrEnum):
    """Method of moving the state: its KV cache is sent, or the prompt and the generated tokens are computed again."""

    KV = "kv"
    RECOMPUTE = "recompute"


class StreamSide(StrEnum):
    GROUP = "group"
    WORKER = "worker"


@dataclass(slots=True)
class HandoverPace:
    """Number of streams that move to one worker at once (additive increase, multiplicative decrease; RFC 5681).

    The number grows by one after as many moves within `target_s`, and is halved after a slower move. Moving streams
    share the worker's iterations with each other, and its device with the pipeline that still serves: more moves at
    once make each client wait longer, and a stream that has not moved yet does not wait.
    """

    target_s: float = 0.35
    most: int = 8
    at_once: int = 1
    _since: int = 0

    def moved(self, gap_s: float) -> None:
        """Record the move of a stream that paused for `gap_s` seconds."""
        if gap_s > self.target_s:
            self.at_once, self._since = max(1, self.at_once // 2), 0
            return
        self._since += 1
        if self._since >= self.at_once:
            self.at_once, self._since = min(self.most, self.at_once + 1), 0


class TokenGapError(RuntimeError):
    """A side skipped a token: its stream cannot be continued."""


@dataclass(frozen=True, slots=True)
class Request:
    """Properties of a request that decide whether it can move without a different sampler state or answer."""

    choices: int = 1
    logprobs: bool = False
    structured: bool = False
    seeded: bool = False

    @property
    def movable(self) -> bool:
        return self.choices == 1 and not (self.logprobs or self.structured or self.seeded)


@dataclass(slots=True)
class Handover:
    """One stream; `sent` tokens have been sent to the client. Times in seconds on one clock."""

    request: Request
    phase: HandoverPhase = HandoverPhase.ATTACHED
    sent: int = 0
    means: Means | None = None
    deadline: float = float("inf")

    @property
    def owner(self) -> StreamSide:
        """Return the side whose tokens are sent to the client."""
        return (
            StreamSide.WORKER
            if self.phase in (HandoverPhase.MOVING, HandoverPhase.RESUMED)
            else StreamSide.GROUP
        )

    @property
    def is_settled(self) -> bool:
        return self.phase in (HandoverPhase.RESUMED, HandoverPhase.ROLLED_BACK)

    def prepare(self, now: float, patience_s: float) -> bool:
        """Start a move and return True, or return False if the stream must remain with the group until its end."""
        if self.phase not in (HandoverPhase.ATTACHED, HandoverPhase.ROLLED_BACK) or not self.request.movable:
            return False
        self.phase, self.deadline = HandoverPhase.PREPARING, now + patience_s
        return True

    def ready(self) -> int | None:
        """Return the number of tokens sent so far, now that the worker is ready and the group must stop the stream."""
        if self.phase is not HandoverPhase.PREPARING:
            return None
        self.phase = HandoverPhase.DRAINING
        return self.sent

    def drained(self, means: Means) -> int | None:
        """Return the first token that the worker must generate, now that the group has stopped; None if it does not drain."""
        if self.phase is not HandoverPhase.DRAINING:
            return None
        self.phase, self.means = HandoverPhase.MOVING, means
        return self.sent

    def token(self, side: StreamSide, index: int) -> bool:
        """Return whether token `index` of that side goes to the client. Raises TokenGapError if the owner skipped one."""
        if side is not self.owner or index < self.sent:
            return False
        if index > self.sent:
            raise TokenGapError(f"the {side} sent token {index}, expected token {self.sent}")
        self.sent += 1
        if self.phase is HandoverPhase.MOVING:
            self.phase, self.deadline = HandoverPhase.RESUMED, float("inf")
        return True

    def failed(self) -> int | None:
        """Roll the move back; return the token from which the group continues by recomputation, or None."""
        if self.phase in (HandoverPhase.ATTACHED, HandoverPhase.RESUMED, HandoverPhase.ROLLED_BACK):
            return None
        self.phase, self.deadline = HandoverPhase.ROLLED_BACK, float("inf")
        return self.sent

    def tick(self, now: float) -> int | None:
        """Roll the move back, as `failed` does, if the deadline has passed."""
        return self.failed() if now >= self.deadline else None
