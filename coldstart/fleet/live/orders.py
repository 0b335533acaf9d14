"""Orders to a server, and events of a server's workers. All are pickled between actors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from coldstart.contract.fallback import Fallback
from coldstart.fleet.events import LaunchRank
from coldstart.host.launches import Launch


class NodeLostError(Exception):
    """The server, or its actor, cannot be reached."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Start this rank. `master` is the rendezvous of a pipeline's ranks: the first rank's address and a free port there.

    Weights are fetched at `rate` bytes/s (None: no limit); with `behind` at a lower priority than other fetches on
    the server. A server that makes no progress for `hang_timeout_s` seconds is killed.
    """

    rank: LaunchRank
    launch: Launch
    deadline_s: float
    master: tuple[str, int] | None = None
    rate: float | None = None
    behind: bool = False
    hang_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class RankUp:
    """A worker answers at `url`, started in `mode` within `start_s` seconds; `fallbacks` are the faster modes that failed.

    Its server requires the API key `key`.
    """

    worker: str
    url: str
    mode: str
    start_s: float
    pid: int
    fallbacks: tuple[Fallback, ...] = ()
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RankFetched:
    """A worker's fetch is complete: `size` bytes in `seconds` from the first to the last byte; `limited` by a rate."""

    worker: str
    size: int
    seconds: float
    limited: bool


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A worker has ended; `ordered` if it was stopped; `own` is False if its server could not be reached, or if it `hung`."""

    worker: str
    reason: str
    ordered: bool
    own: bool = True
    hung: bool = False


WorkerEvent = RankFetched | RankUp | RankEnded


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that a server has now."""

    rank: LaunchRank
    up: RankUp | None
    stopping: bool


@dataclass(frozen=True, slots=True)
class NodeReport:
    """All workers of a server; `seq` is the number of its last event, `incarnation` identifies this life of its actor."""

    incarnation: str
    seq: int
    workers: tuple[FoundWorker, ...] = ()


class Node(Protocol):
    """A server as the fleet uses it. Every method raises NodeLostError."""

    async def launch(self, order: RankOrder) -> None:
        """Start a worker; its result is reported as an event."""

    async def pace(self, worker: str, rate: float | None) -> None:
        """Set the rate of a worker's fetch, in bytes/s; None: no limit."""

    async def stop(self, worker: str) -> None:
        """Stop a worker. An event reports that it has exited, also if the worker is unknown."""

    async def rendezvous(self) -> tuple[str, int]:
        """Return the node's address and a free port on it, at which the ranks of a pipeline meet."""
