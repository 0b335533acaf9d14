"""Orders to a server and events of its workers. Both are pickled between Ray actors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.fleet.events import FoundRank, LaunchRank
from coldstart.host.launches import Launch
from coldstart.system import runtime

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
"""vLLM's default of --gpu-memory-utilization."""


class NodeLostError(Exception):
    """The server or its Ray actor cannot be reached."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Order to start a rank. `master` is the rendezvous of a pipeline: the address of the first rank and a free port there.

    `rate` limits the weight fetch in bytes per second; None: no limit. A worker that will replace a pipeline fetches with
    lower priority. A server without progress for `hang_timeout_s` seconds is killed.
    """

    rank: LaunchRank
    launch: Launch
    deadline_s: float
    hang_timeout_s: float
    master: tuple[str, int] | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class RankUp:
    """A worker serves requests at `url`, started in `mode` in `start_s` seconds; `fallbacks` are faster modes that failed.

    Its server requires the API key `key`. `handover_key` signs messages that hand over requests with their KV cache;
    empty if the server does not support this.
    """

    worker: str
    url: str
    mode: str
    start_s: float
    pid: int | None
    fallbacks: tuple[Fallback, ...] = ()
    key: str = field(default="", repr=False)
    handover_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RankFetched:
    """A weight fetch is complete: `size` bytes in `seconds` between first and last byte; `limited`: a rate applied."""

    worker: str
    size: int
    seconds: float
    limited: bool


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A worker has exited."""

    worker: str
    reason: str
    hung: bool = False


WorkerEvent = RankFetched | RankUp | RankEnded


@dataclass(frozen=True, slots=True)
class NodeReport:
    """All workers of a server, each with its RankUp event if it is ready; `seq` is the number of the last event."""

    seq: int
    workers: tuple[tuple[FoundRank, RankUp | None], ...] = ()


def build_rank_arguments(args: Arguments, ranks: int) -> Arguments:
    """Return the vLLM arguments of one of `ranks` ranks, with its share of KV cache and device memory.

    The share leaves memory on the device for other ranks or the full model (ParaServe, section 4.1.2). A rank stores KV
    only for its layers, so the pipeline holds as many tokens as one worker.
    """
    share: tuple[str, ...] = ()
    if kv := args.number("kv_cache_memory_bytes", 0):
        share = ("--kv-cache-memory-bytes", str(kv // ranks))
    elif not runtime.targets_cpu():
        used = args.value("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION)
        share = ("--gpu-memory-utilization", f"{float(used) / ranks:.4g}")
    return args.append("--pipeline-parallel-size", str(ranks), *share)


class Node(Protocol):
    """A server of the fleet. `place` is an address to which the network latency is measured; None: not measured."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Return host and port."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server's `NodeServers`. Raises NodeLostError."""
