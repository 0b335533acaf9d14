"""Orders to a server, and the events that it reports about its workers. Both are pickled between Ray actors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.fleet.events import FoundRank, LaunchRank
from coldstart.host.launches import Launch
from coldstart.system import runtime


class NodeLostError(Exception):
    """The server or its Ray actor cannot be reached."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Order to start a rank. `master` is the address of a pipeline's first rank and a free port there, where the ranks meet.

    `rate` limits the weight fetch in bytes per second. None means no limit. A worker that is to replace a pipeline
    fetches with lower priority. On a GPU, the server may use `memory` bytes of it: for a rank that a full worker is to
    replace, this is less than the rank has reserved. With `shares_weights`, the rank and that full worker share weights. A
    server that makes no progress for `hang_timeout_s` seconds is killed.
    """

    rank: LaunchRank
    launch: Launch
    deadline_s: float
    hang_timeout_s: float
    master: tuple[str, int] | None = None
    rate: float | None = None
    memory: int = 0
    shares_weights: bool = True


@dataclass(frozen=True, slots=True)
class RankUp:
    """A worker serves requests at `url`.

    It started in `mode` within `start_s` seconds, after the faster modes in `fallbacks` failed. Its server requires the
    API key `key`. `handover_key` signs the messages that hand over requests with their KV cache. It is empty if the
    server does not support this.
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
    """A worker fetched `size` bytes of weights.

    `seconds` is the time between the first and the last byte. `limited` is True if a rate limit applied.
    """

    worker: str
    size: int
    seconds: float
    limited: bool


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A worker exited. `reason` is the cause, and `hung` is True if the worker was killed because it hung."""

    worker: str
    reason: str
    hung: bool = False


WorkerEvent = RankFetched | RankUp | RankEnded


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report of a server: its workers, each with its RankUp event if it is ready, and the number `seq` of its last event."""

    seq: int
    workers: tuple[tuple[FoundRank, RankUp | None], ...] = ()


def build_rank_arguments(args: Arguments, ranks: int) -> Arguments:
    """Return the vLLM arguments for each of `ranks` ranks, with its share of the KV cache and device memory.

    The rest of the device memory is for other ranks or the full model (ParaServe, section 4.1.2). A rank stores KV
    only for its own layers, so the pipeline can hold as many tokens as one worker. The arguments are those of the rank's
    bundle, so they do not depend on the server; `RankOrder.memory` limits the rank further.
    """
    share: tuple[str, ...] = ()
    if kv := args.get_integer("kv_cache_memory_bytes", 0):
        share = ("--kv-cache-memory-bytes", str(kv // ranks))
    elif not runtime.targets_cpu():
        share = ("--gpu-memory-utilization", f"{args.gpu_memory_share() / ranks:.4g}")
    return args.append("--pipeline-parallel-size", str(ranks), *share)


class Node(Protocol):
    """A server of the fleet, as the gateway accesses it."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Return the host and port to which network latency is measured, or None if it is not measured."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server's `NodeServers`, and return its result. Raises NodeLostError if it is unreachable."""
