"""Orders to a server, and events of a server's workers. All are pickled between actors."""

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
    """The server, or its actor, cannot be reached."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Start this rank. `master` is the rendezvous of a pipeline's ranks: the first rank's address and a free port there.

    Weights are fetched at `rate` bytes/s (None: no limit); those of a worker beside a rank at a lower priority than other
    fetches on the server. A server that makes no progress for `hang_timeout_s` seconds is killed.
    """

    rank: LaunchRank
    launch: Launch
    deadline_s: float
    hang_timeout_s: float
    master: tuple[str, int] | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class RankUp:
    """A worker answers at `url`, started in `mode` within `start_s` seconds; `fallbacks` are the faster modes that failed.

    Its server requires the API key `key`. It hands over running requests with their KV for messages signed with
    `handover_key`; empty if it cannot.
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
    """A worker's fetch is complete: `size` bytes in `seconds` from the first to the last byte; `limited` by a rate."""

    worker: str
    size: int
    seconds: float
    limited: bool


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A worker has ended."""

    worker: str
    reason: str
    hung: bool = False


WorkerEvent = RankFetched | RankUp | RankEnded


@dataclass(frozen=True, slots=True)
class NodeReport:
    """All workers of a server, with what each reported when it was ready; `seq` is the number of its last event."""

    seq: int
    workers: tuple[tuple[FoundRank, RankUp | None], ...] = ()


def build_rank_arguments(args: Arguments, ranks: int) -> Arguments:
    """Return the arguments of one of `ranks` ranks, which claims its share of the KV cache and of the device.

    The fleet counts a rank with the memory of its share (ParaServe, section 4.1.2), so that other ranks or the full model
    may be on the same device. It has the KV of its layers only, so the pipeline holds as many tokens as one worker.
    """
    share: tuple[str, ...] = ()
    if kv := args.number("kv_cache_memory_bytes", 0):
        share = ("--kv-cache-memory-bytes", str(kv // ranks))
    elif not runtime.targets_cpu():
        used = args.value("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION)
        share = ("--gpu-memory-utilization", f"{float(used) / ranks:.4g}")
    return args.append("--pipeline-parallel-size", str(ranks), *share)


class Node(Protocol):
    """A server as the fleet uses it. Connections to `place` measure the time to the server; None: they are not measured."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Return the address."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of its `NodeServers`. Raises NodeLostError."""
