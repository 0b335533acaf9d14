"""Events that the fleet's core receives, and actions that it returns.

They are the only interface between the core and its two users, the live control and the simulator. Requests use the same
events and actions as on a host.
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
    """A server joined or rejoined the fleet, and runs no workers."""

    server: ServerSpec


@dataclass(frozen=True, slots=True)
class ServerLost:
    """A server was lost, together with all its workers."""

    server: str


@dataclass(frozen=True, slots=True)
class ServerDrained:
    """An operator drained a server, so it accepts no new workers. `streams` are the requests that can migrate."""

    server: str
    streams: frozenset[str] = frozenset()


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
    """The network latency in seconds between a server and the servers named in `seconds` was measured."""

    server: str
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class WeightsFetched:
    """The weights of a worker's rank have been fetched into CPU memory."""

    worker: str


@dataclass(frozen=True, slots=True)
class RankReady:
    """A worker has loaded the weights of its rank and is ready."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker process exited or failed to start, and its memory is free. `reason` is empty if it was ordered to stop.

    `own` is False if it was lost with its server or killed as hung.
    """

    worker: str
    reason: str = ""
    own: bool = True


@dataclass(frozen=True, slots=True)
class StreamMoved:
    """The migration of a stream has ended. `done` is True if it reached its target, False if it was rolled back."""

    request: str
    done: bool


@dataclass(frozen=True, slots=True)
class GroupSuspected:
    """A request to a group failed. The group may be lost, so it receives no requests for a short time."""

    group: str


@dataclass(frozen=True, slots=True)
class LaunchRank:
    """Start the worker of one rank: fetch the missing weights, then load all weights of the rank onto the device.

    `size` is the number of weight bytes of the rank, and `fetch` is how many of them are not yet in CPU memory. The fetch
    must end by `deadline`, which is infinity if no bandwidth was reserved. If the worker fetches, a `SetFetchRate` action
    follows. `number` is the number of its group among the groups of this model. If `beside` names a pipeline worker on the
    same device, this worker loads the full model to replace the pipeline, and its fetch has the lowest priority.
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
    """A worker that is still running after a restart of the gateway: its launch, and whether it is ready or stopping.

    A group is ready if its first rank is ready.
    """

    launch: LaunchRank
    ready: bool
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class FleetRecovered:
    """The gateway has started and found these running servers and workers. Servers in `drained` accept no new workers."""

    servers: tuple[ServerSpec, ...]
    ranks: tuple[FoundRank, ...] = ()
    drained: tuple[str, ...] = ()


WorkerEvent = WeightsFetched | RankReady | WorkerEnded
ServerEvent = ServerJoined | ServerLost | ServerDrained | LinkMeasured | HopsMeasured
Event = (
    RequestArrived
    | RequestEnded
    | Tick
    | GroupSuspected
    | FleetRecovered
    | ModelDeployed
    | ModelRemoved
    | StreamMoved
    | ServerEvent
    | WorkerEvent
)


@dataclass(frozen=True, slots=True)
class SetFetchRate:
    """Limit a worker's weight fetch to `rate` bytes per second, or remove the limit if `rate` is None."""

    worker: str
    rate: float | None


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop a worker that no group uses. A `WorkerEnded` event follows."""

    worker: str


@dataclass(frozen=True, slots=True)
class MoveStream:
    """Migrate a stream from one group to another. A `StreamMoved` event follows unless the stream ends first."""

    request: str
    source: str
    target: str


Action = LaunchRank | SetFetchRate | StopWorker | DispatchRequest | MoveStream | RejectRequest
