"""What the controller says to a server, and what a server says to it. All of it travels between actors as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coldstart.contract.fallback import Fallback
from coldstart.fleet.events import LaunchRank
from coldstart.host.launches import Launch


class NodeLostError(Exception):
    """The server, or its actor, cannot be reached."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Start this rank. `master` is the rendezvous of a pipeline's ranks: the first rank's address and a free port there.

    Weights that are fetched come at `rate` bytes/s (None: as they come), `behind` all that others fetch on that server or not.
    """

    rank: LaunchRank
    launch: Launch
    deadline_s: float
    master: tuple[str, int] | None = None
    rate: float | None = None
    behind: bool = False


@dataclass(frozen=True, slots=True)
class RankUp:
    """A worker answers at `url`; `mode`, `start_s` and `fallbacks` (faster ways that could not be taken) say how it came up."""

    worker: str
    url: str
    mode: str
    start_s: float
    pid: int
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFetched:
    """All that a worker had fetched is there: `size` bytes, in `seconds` from the first to the last; `limited` by a rate."""

    worker: str
    size: int
    seconds: float
    limited: bool


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A worker is no more; `ordered`: it was told to stop; not by its `own` doing where its server could not be reached."""

    worker: str
    reason: str
    ordered: bool
    own: bool = True


WorkerEvent = RankFetched | RankUp | RankEnded


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that a server has now."""

    rank: LaunchRank
    up: RankUp | None
    stopping: bool


@dataclass(frozen=True, slots=True)
class NodeReport:
    """All that a server has; `seq` is the number of the last thing it said, `incarnation` this life of its actor."""

    incarnation: str
    seq: int
    workers: tuple[FoundWorker, ...] = ()


class Node(Protocol):
    """A server as the controller orders it about. Everything raises NodeLostError."""

    async def launch(self, order: RankOrder) -> None:
        """Begin; what becomes of it is said later."""

    async def pace(self, worker: str, rate: float | None) -> None:
        """Let it fetch at another rate, in bytes/s; None: as it comes."""

    async def stop(self, worker: str) -> None:
        """End it; that it has ended is said later, also of one that is not there."""

    async def rendezvous(self) -> tuple[str, int]:
        """Return its address and a free port there, for the ranks of a pipeline."""
