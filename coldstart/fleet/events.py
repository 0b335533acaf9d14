"""Events that the fleet's core receives and actions that it returns.

A live controller and the simulator use no other interface to the core. Events and actions for the arrival, end,
dispatch and rejection of requests are those of the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.fleet.specification import FleetModel, ServerSpec
from coldstart.host.events import DispatchRequest as DispatchRequest
from coldstart.host.events import RejectRequest as RejectRequest
from coldstart.host.events import RequestArrived as RequestArrived
from coldstart.host.events import RequestEnded as RequestEnded
from coldstart.host.events import Tick as Tick


@dataclass(frozen=True, slots=True)
class Joined:
    """A server joined, or joined again, without workers."""

    server: ServerSpec


@dataclass(frozen=True, slots=True)
class ServerLost:
    """A server and all its workers were lost."""

    server: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A server accepts no new worker."""

    server: str


@dataclass(frozen=True, slots=True)
class Deployed:
    model: FleetModel


@dataclass(frozen=True, slots=True)
class Removed:
    model: str


@dataclass(frozen=True, slots=True)
class Rate:
    """Measured bandwidth of a server's link, in bytes/s."""

    server: str
    bandwidth: float


@dataclass(frozen=True, slots=True)
class HopsTimed:
    """Measured seconds of one transfer between a server and others, by their names."""

    server: str
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A worker's own part of the weights is in host memory."""

    worker: str


@dataclass(frozen=True, slots=True)
class RankReady:
    """A worker has loaded its part and its runtime is ready."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker's process died or did not start; `own` is False if the cause is that its server could not be reached."""

    worker: str
    reason: str
    own: bool = True


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop order was carried out: the worker's memory is free."""

    worker: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A stream's move ended: at its target, or rolled back to the pipeline."""

    request: str
    done: bool


@dataclass(frozen=True, slots=True)
class Suspected:
    """A request to the group failed. The group gets no requests for a moment, until it is known whether it is lost."""

    group: str


@dataclass(frozen=True, slots=True)
class LaunchRank:
    """Start a rank: fetch `fetch` of its `size` bytes (those not in host memory), and load all onto the device.

    `deadline` is the time at which the fetch must have ended; infinity without a reservation. `Share` follows if it
    fetches. `number` is that of its group among the groups of the model. A worker `beside` a rank of a pipeline, on the
    same device, loads the full model to replace the pipeline; its fetch gives way to all others.
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
    number: int = 0
    beside: str = ""


@dataclass(frozen=True, slots=True)
class FoundRank:
    """A worker that outlived an earlier process of the fleet: its launch, whether it is ready, and whether it is stopping.

    A group is ready if its first rank is.
    """

    launch: LaunchRank
    ready: bool
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """All servers and their workers, sent once when the fleet's process begins; servers in `drained` accept no new worker."""

    servers: tuple[ServerSpec, ...]
    ranks: tuple[FoundRank, ...] = ()
    drained: tuple[str, ...] = ()


Event = (
    RequestArrived
    | RequestEnded
    | Tick
    | Suspected
    | Rebuilt
    | Joined
    | ServerLost
    | Drained
    | Deployed
    | Removed
    | Rate
    | HopsTimed
    | Fetched
    | RankReady
    | WorkerDied
    | Stopped
    | Moved
)


@dataclass(frozen=True, slots=True)
class Share:
    """Rate of a worker's fetch on its server's link from now on, in bytes/s; None: no limit."""

    worker: str
    rate: float | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker, which no group uses. `Stopped` follows."""

    worker: str


@dataclass(frozen=True, slots=True)
class Move:
    """Move the stream from one group to another. `Moved` follows, unless the stream ends first."""

    request: str
    source: str
    target: str


Action = LaunchRank | Share | Stop | DispatchRequest | Move | RejectRequest
