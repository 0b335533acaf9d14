"""One stream's way from a pipeline to the single worker that takes over (ParaServe, section 6.2), pure.

    attached --prepare--> preparing --ready--> draining(k) --drained--> moving(kv or recompute) --first token--> resumed
    preparing, draining, moving --timeout or failure--> rolled back: the group goes on

The gateway asks of every token whether it is to be sent. Invariant: the client gets tokens 0, 1, 2, ... once each and in
order, whoever makes them and whenever they come; what a side that is no longer asked still sends is dropped.
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
    """How the state gets there: its KV is sent, or the prompt and what was generated are computed again."""

    KV = "kv"
    RECOMPUTE = "recompute"


class StreamSide(StrEnum):
    GROUP = "group"
    WORKER = "worker"


@dataclass(slots=True)
class HandoverPace:
    """How many streams move to one worker at once: one more while each of so many came through within `target_s`, half as
    many after one that did not (additive increase, multiplicative decrease; RFC 5681's congestion avoidance).

    Those that move share the worker's steps with each other, and its device with the pipeline that still serves: the more,
    the longer each client waits; who is not moved yet waits for nothing.
    """

    target_s: float = 0.35
    most: int = 8
    at_once: int = 1
    _since: int = 0

    def moved(self, gap_s: float) -> None:
        """A stream came through, `gap_s` seconds after it was stopped."""
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
    """What of a request decides whether it can be moved: another sampler state or other answers could come out of it."""

    choices: int = 1
    logprobs: bool = False
    structured: bool = False
    seeded: bool = False

    @property
    def movable(self) -> bool:
        return self.choices == 1 and not (self.logprobs or self.structured or self.seeded)


@dataclass(slots=True)
class Handover:
    """A stream; `sent` tokens have gone to the client. Times in seconds on one clock."""

    request: Request
    phase: HandoverPhase = HandoverPhase.ATTACHED
    sent: int = 0
    means: Means | None = None
    deadline: float = float("inf")

    @property
    def owner(self) -> StreamSide:
        """Whose tokens count."""
        return (
            StreamSide.WORKER
            if self.phase in (HandoverPhase.MOVING, HandoverPhase.RESUMED)
            else StreamSide.GROUP
        )

    @property
    def settled(self) -> bool:
        return self.phase in (HandoverPhase.RESUMED, HandoverPhase.ROLLED_BACK)

    def prepare(self, now: float, patience_s: float) -> bool:
        """Whether the stream will move; one that cannot stays with the group until it ends, and the group with it."""
        if self.phase not in (HandoverPhase.ATTACHED, HandoverPhase.ROLLED_BACK) or not self.request.movable:
            return False
        self.phase, self.deadline = HandoverPhase.PREPARING, now + patience_s
        return True

    def ready(self) -> int | None:
        """The worker can take it: the group is to stop it. The number of tokens sent so far."""
        if self.phase is not HandoverPhase.PREPARING:
            return None
        self.phase = HandoverPhase.DRAINING
        return self.sent

    def drained(self, means: Means) -> int | None:
        """The group has stopped: the worker is asked to go on from this token."""
        if self.phase is not HandoverPhase.DRAINING:
            return None
        self.phase, self.means = HandoverPhase.MOVING, means
        return self.sent

    def token(self, side: StreamSide, index: int) -> bool:
        """Whether token `index` of that side goes to the client. Raises Gap where the owner skipped one."""
        if side is not self.owner or index < self.sent:
            return False
        if index > self.sent:
            raise TokenGapError(f"the {side} sent token {index} after {self.sent - 1}")
        self.sent += 1
        if self.phase is HandoverPhase.MOVING:
            self.phase, self.deadline = HandoverPhase.RESUMED, float("inf")
        return True

    def failed(self) -> int | None:
        """It did not come about: the group is to go on from this token, by computing again what it has dropped."""
        if self.phase in (HandoverPhase.ATTACHED, HandoverPhase.RESUMED, HandoverPhase.ROLLED_BACK):
            return None
        self.phase, self.deadline = HandoverPhase.ROLLED_BACK, float("inf")
        return self.sent

    def tick(self, now: float) -> int | None:
        """As `failed`, once the deadline is past."""
        return self.failed() if now >= self.deadline else None
