"""Events that the core of a fleet receives, and actions that it returns.

They are the only interface between the core and its two users, the live control and the simulator. The events and actions of
requests are the same as for a host.
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
class ServerJoined:
    """A server without workers joined or rejoined the fleet."""

    server: ServerSpec


@dataclass(frozen=True, slots=True)
class ServerLost:
    """A server was lost with all its workers."""

    server: str


@dataclass(frozen=True, slots=True)
class ServerDrained:
    """An operator drained a server: it accepts no new workers."""

    server: str


@dataclass(frozen=True, slots=True)
class ModelDeployed:
    model: FleetModel


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    model: str


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """The bandwidth of a server's network link was measured, in bytes per second."""

    server: str
    bandwidth: float


@dataclass(frozen=True, slots=True)
class HopsMeasured:
    """The transfer times between a server and other servers were measured, in seconds by server name."""

    server: str
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class WeightsFetched:
    """The weights of a worker's rank are in CPU memory."""

    worker: str


@dataclass(frozen=True, slots=True)
class RankReady:
    """A worker has loaded the weights of its rank and is ready."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The process of a worker exited or did not start; `own` is False if its server could not be reached."""

    worker: str
    reason: str
    own: bool = True


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """A worker that was ordered to stop has exited, and its memory is free."""

    worker: str


@dataclass(frozen=True, slots=True)
class StreamMoved:
    """The migration of a stream ended: `done` is true at its target, false if it was rolled back."""

    request: str
    done: bool


@dataclass(frozen=True, slots=True)
class GroupSuspected:
    """A request to the group failed. The group receives no requests for a moment, because it may be lost."""

    group: str


@dataclass(frozen=True, slots=True)
class LaunchRank:
    """Start the worker of one rank: fetch the missing weights, and load all weights of the rank onto the device.

    `size` are the bytes of weights of the rank, of which `fetch` are not in CPU memory. The fetch must end before `deadline`;
    infinity without a bandwidth reservation. A `SetFetchRate` action follows if the worker fetches. `number` is the number of
    its group for this model. A worker with `beside`, the name of a pipeline worker on the same device, loads the full model to
    replace the pipeline, with the lowest fetch priority.
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
    """Worker that still runs after a restart of the fleet gateway: its launch, and whether it is ready or stopping.

    A group is ready if its first rank is ready.
    """

    launch: LaunchRank
    ready: bool
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class FleetRecovered:
    """All servers and workers that exist when the gateway starts; servers in `drained` accept no new workers."""

    servers: tuple[ServerSpec, ...]
    ranks: tuple[FoundRank, ...] = ()
    drained: tuple[str, ...] = ()


Event = (
    RequestArrived
    | RequestEnded
    | Tick
    | GroupSuspected
    | FleetRecovered
    | ServerJoined
    | ServerLost
    | ServerDrained
    | ModelDeployed
    | ModelRemoved
    | LinkMeasured
    | HopsMeasured
    | WeightsFetched
    | RankReady
    | WorkerDied
    | WorkerStopped
    | StreamMoved
)


@dataclass(frozen=True, slots=True)
class SetFetchRate:
    """Set the rate of a worker's weight fetch, in bytes per second; None removes the limit."""

    worker: str
    rate: float | None


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop a worker that no group uses. `WorkerStopped` follows."""

    worker: str


@dataclass(frozen=True, slots=True)
class MoveStream:
    """Migrate a stream from one group to another. `StreamMoved` follows, unless the stream ends first."""

    request: str
    source: str
    target: str


Action = LaunchRank | SetFetchRate | StopWorker | DispatchRequest | MoveStream | RejectRequest
