"""What the fleet's core is told, and what it orders. A live controller and the simulator speak nothing else to it.

Requests arrive, end, are dispatched and refused in the host's own words.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.fleet.specification import FleetModel, ServerSpec
from coldstart.host.events import Arrived, Ended, Refuse, Tick


@dataclass(frozen=True, slots=True)
class Joined:
    """A server is there, or there again, empty."""

    server: ServerSpec


@dataclass(frozen=True, slots=True)
class ServerLost:
    """A server is gone with all that was on it."""

    server: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A server is to take nothing new."""

    server: str


@dataclass(frozen=True, slots=True)
class Deployed:
    model: FleetModel


@dataclass(frozen=True, slots=True)
class Removed:
    model: str


@dataclass(frozen=True, slots=True)
class Rate:
    """A server's link as measured, in bytes/s."""

    server: str
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """A worker's own part is in host memory."""

    worker: str


@dataclass(frozen=True, slots=True)
class RankReady:
    """A worker has its part loaded and its runtime up."""

    worker: str


@dataclass(frozen=True, slots=True)
class Whole:
    """A worker holds the whole model: it can serve alone."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker's process ended by itself, or never came up; not by its `own` doing where its server could not be reached."""

    worker: str
    reason: str
    own: bool = True


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """Of a worker that serves two groups, what it ran for that one ended by itself; for the other it goes on."""

    worker: str
    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """The order to release was carried out: what the worker ran for that group is no more."""

    worker: str
    group: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The order to stop was carried out: its memory is free."""

    worker: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A stream's move ended: on the worker, or rolled back to the group."""

    request: str
    done: bool


@dataclass(frozen=True, slots=True)
class Routed:
    """A request that a gateway has sent to that group already, by the routes it knows."""

    request: str
    model: str
    group: str


@dataclass(frozen=True, slots=True)
class LaunchRank:
    """Start a rank: fetch `fetch` of its `size` bytes (what is not in host memory), and load them on that device.

    `deadline` is when the fetch must have ended; infinity where nothing is promised. `Share` follows where it fetches.
    """

    worker: str
    group: str
    model: str
    rank: int
    ranks: int
    full: int
    server: str
    device: int
    size: int
    fetch: int
    memory: int
    deadline: float


@dataclass(frozen=True, slots=True)
class FoundRank:
    """A worker that outlived the controller: as it was launched, whether it is ready, and whether it was told to stop."""

    launch: LaunchRank
    ready: bool
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The servers with all that they have, told once by a controller that has started again; `drained` take nothing new."""

    servers: tuple[ServerSpec, ...]
    ranks: tuple[FoundRank, ...] = ()
    drained: tuple[str, ...] = ()


Event = (
    Arrived
    | Ended
    | Tick
    | Routed
    | Rebuilt
    | Joined
    | ServerLost
    | Drained
    | Deployed
    | Removed
    | Rate
    | Fetched
    | RankReady
    | Whole
    | WorkerDied
    | ProcessDied
    | Released
    | Stopped
    | Moved
)


@dataclass(frozen=True, slots=True)
class Share:
    """A worker that fetches has this part of its server's link from now on, in bytes/s; None: all there is."""

    worker: str
    rate: float | None


@dataclass(frozen=True, slots=True)
class FetchRest:
    """Fetch the other ranks' `size` bytes behind everybody else's, and load them beside."""

    worker: str
    size: int


@dataclass(frozen=True, slots=True)
class Release:
    """End what the worker runs for that group: it serves on for another one. `Released` follows."""

    worker: str
    group: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker; nobody uses it. `Stopped` follows."""

    worker: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to that group now; one that had begun elsewhere goes on from the tokens it has."""

    request: str
    group: str


@dataclass(frozen=True, slots=True)
class Move:
    """Hand the stream over from the group to the worker. `Moved` follows, unless it ends before."""

    request: str
    source: str
    target: str


Action = LaunchRank | Share | FetchRest | Release | Stop | Send | Move | Refuse

__all__ = [
    "Action",
    "Arrived",
    "Deployed",
    "Drained",
    "Ended",
    "Event",
    "FetchRest",
    "Fetched",
    "FoundRank",
    "Joined",
    "LaunchRank",
    "Move",
    "Moved",
    "ProcessDied",
    "RankReady",
    "Rate",
    "Rebuilt",
    "Refuse",
    "Release",
    "Released",
    "Removed",
    "Routed",
    "Send",
    "ServerLost",
    "Share",
    "Stop",
    "Stopped",
    "Tick",
    "Whole",
    "WorkerDied",
]
