"""Model servers on one machine of a fleet, started and supervised as on a host (see `host.live.servers`).

Invariant: each worker is listed until it exits, and its exit is reported exactly once. Events are retained until the
gateway requests later events, so that a restarted gateway misses none.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import median
from uuid import uuid4

from coldstart.contract import environment, fallback
from coldstart.contract.weights import LimitedFetch
from coldstart.errors import UsageError
from coldstart.fleet.events import FoundRank
from coldstart.fleet.live import orders
from coldstart.host.launches import Launch
from coldstart.host.live import messages
from coldstart.host.live.moves import enable_handover
from coldstart.host.live.servers import (
    ModelServer,
    ServerStarter,
    StartFailedError,
    await_hang,
    stop_by_force,
)
from coldstart.host.live.starter import StartOrder
from coldstart.system.ipc.addresses import find_free_port
from coldstart.system.proc.scratch import PREFIX, private_directory
from coldstart.weights.prefetch import PrefetchError, client

EVENT_WAIT_S = 5.0
FETCH_POLL_S = 0.25
HOP_SAMPLES, HOP_TIMEOUT_S = 5, 2.0
READ_AHEAD = 0.05
"""Share of a model's weights that may be fetched before its full worker can load them, if memory is short."""


@dataclass(eq=False, slots=True)
class _WorkerProcess:
    order: orders.RankOrder
    server: ModelServer
    place: tuple[str, int]
    key: str
    handover_key: str
    rate_limit: LimitedFetch | None = None
    up: orders.RankUp | None = None
    stopping: bool = False
    hung: str = ""


class NodeServers:
    """Model servers of the machine at `host`. If `selects_device` is set, each server sees only its own GPU."""

    def __init__(self, host: str, servers: ServerStarter, *, selects_device: bool = False) -> None:
        self.host, self.servers, self.selects_device = host, servers, selects_device
        self.processes: dict[str, _WorkerProcess] = {}
        self._events: deque[tuple[int, orders.WorkerEvent]] = deque()
        self._seq = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._private = ExitStack()
        self._sockets: Path | None = None

    async def rendezvous(self) -> tuple[str, int]:
        """Return this machine's address and a free port, where the ranks of a pipeline can meet."""
        return self.host, find_free_port(self.host)

    async def time_hops(self, places: Sequence[tuple[str, int]]) -> list[float | None]:
        """Return the round-trip time to each address in seconds (median of several TCP connects), or None if unreachable."""
        return [await self._time_hop(place) for place in places]

    async def _time_hop(self, place: tuple[str, int]) -> float | None:
        times = []
        try:
            async with asyncio.timeout(HOP_TIMEOUT_S):
                for _ in range(HOP_SAMPLES):
                    began = time.monotonic()
                    _, writer = await asyncio.open_connection(*place)
                    times.append(time.monotonic() - began)
                    writer.close()
        except OSError:  # includes TimeoutError
            return None
        return median(times)

    async def launch(self, order: orders.RankOrder) -> None:
        """Launch a rank, and report the result as an event. Ignore the order if the worker already exists."""
        worker = order.rank.worker
        if worker in self.processes:
            return
        # The port is open to other users and to the network, so the server requires a key that only the gateway has.
        key = messages.find_server_key(order.launch.args) or secrets.token_hex(32)
        rate_limit = self._limit_fetch(order) if order.launch.weights_from else None
        try:
            place = self.host, find_free_port(self.host)
            listen = ("--host", self.host, "--port", str(place[1]))
            env = {str(environment.VLLM_API_KEY): key, **self._get_shared_weights_env(order)}
            gpu_bytes = order.memory if self.selects_device else 0
            if self.selects_device:
                env |= {str(environment.CUDA_VISIBLE_DEVICES): str(order.rank.device)}
            launch = _build_launch(order)
            words, handover_key, more = enable_handover(launch, self.host, on_cpu=not self.selects_device)
            launch = replace(launch, args=launch.args.append(*words))
            server = self.servers.order_start(
                StartOrder(launch, order.deadline_s, listen, env | more, rate_limit, gpu_bytes=gpu_bytes)
            )
        except OSError as error:  # no descriptor, no disk, no process
            self._report(orders.RankEnded(worker, f"cannot start a server: {error.strerror or error}"))
            return
        process = self.processes[worker] = _WorkerProcess(order, server, place, key, handover_key, rate_limit)
        task = asyncio.get_running_loop().create_task(self._supervise(worker, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _limit_fetch(self, order: orders.RankOrder) -> LimitedFetch:
        """Return the limits of a worker's fetch. A full worker loads what its pipeline's rank has fetched, and then frees it.

        On the CPU, prefetcher, rank and full worker share one memory, so the full worker's fetch waits for its engine.
        """
        held = None
        if not self.selects_device and (rank := self.processes.get(order.rank.beside)) is not None:
            held = rank.order.rank.size + int(READ_AHEAD * order.rank.size)
        # The name is unique, because the prefetcher may outlive the server and this actor.
        name, beside = f"{order.rank.worker} {uuid4().hex}", bool(order.rank.beside)
        return LimitedFetch(name, order.rate, beside, order.master is None, held)

    async def set_fetch_rate(self, worker: str, rate: float | None) -> None:
        """Limit the weight fetch of a worker, if any, to `rate` bytes per second. None removes the limit."""
        process = self.processes.get(worker)
        if process is not None and process.rate_limit is not None:
            process.rate_limit = replace(process.rate_limit, rate=rate)

    def _get_shared_weights_env(self, order: orders.RankOrder) -> dict[str, str]:
        """Return the variables that let a rank share weights with the full worker that replaces it, if any."""
        if not order.shares_weights or (order.master is None and not order.rank.beside):
            return {}
        try:
            self._sockets = self._sockets or self._private.enter_context(private_directory(PREFIX))
        except UsageError:  # without a private directory each worker loads its own weights
            return {}
        owner = blake2b((order.rank.beside or order.rank.worker).encode(), digest_size=8).hexdigest()
        return {str(environment.WEIGHTS_SOCKET): str(self._sockets / owner)}

    async def _supervise(self, worker: str, process: _WorkerProcess) -> None:
        began = time.monotonic()
        fetching = asyncio.ensure_future(self._report_fetch_end(worker, process))
        watching = asyncio.ensure_future(self._end_if_hung(process))
        try:
            ready = await process.server.ready
        except StartFailedError as failed:
            await process.server.ended
            reason = str(failed)
        else:
            steps = tuple(fallback.decode_fallbacks(ready.document.get("fallbacks")))
            url = f"http://{process.place[0]}:{process.place[1]}"
            took_s, keys = time.monotonic() - began, (process.key, process.handover_key)
            process.up = orders.RankUp(worker, url, ready.mode, took_s, ready.pid, steps, *keys)
            self._report(process.up)
            reason = await process.server.ended
        fetching.cancel()
        watching.cancel()
        del self.processes[worker]
        self._report(orders.RankEnded(worker, process.hung or reason, hung=bool(process.hung)))

    async def _end_if_hung(self, process: _WorkerProcess) -> None:
        """Kill the server if it hangs. In a pipeline, only the first rank has an API server."""
        order = process.order
        api = process.place if order.rank.rank == 0 else None
        found = await await_hang(process.server, api, lambda: order.hang_timeout_s)
        process.hung = f"the server hung and was killed: {found}"
        process.server.kill()

    async def _report_fetch_end(self, worker: str, process: _WorkerProcess) -> None:
        """Report when the worker's weight fetch is complete.

        Each poll sends the rate again, because the prefetcher is another process, which may start late or restart.
        """
        while process.rate_limit is not None:
            progress = None
            with suppress(PrefetchError, OSError):
                progress = await asyncio.to_thread(client.set_rate_limit, process.rate_limit)
            if progress is not None and progress["ended"]:
                self._report(
                    orders.RankFetched(worker, progress["bytes"], progress["seconds"], progress["limited"])
                )
                return
            if progress is None and process.up is not None:  # weights were local
                return
            await asyncio.sleep(FETCH_POLL_S)

    async def stop(self, worker: str) -> None:
        """Stop a worker, by force if it does not exit in time.

        Its exit is reported as an event, even if the worker is unknown.
        """
        process = self.processes.get(worker)
        if process is None:
            self._report(orders.RankEnded(worker, "unknown worker"))
            return
        process.stopping = True
        await stop_by_force(process.server)

    async def clear(self) -> None:
        """Kill all workers, because the fleet no longer uses them, and wait until they have exited."""
        ended = [process.server.ended for process in self.processes.values()]
        for process in self.processes.values():
            process.stopping = True
            process.server.stop()
            process.server.stop()
        if ended:
            await asyncio.wait(ended)

    def _report(self, event: orders.WorkerEvent) -> None:
        self._seq += 1
        self._events.append((self._seq, event))
        self._changed.set()

    async def report(self) -> orders.NodeReport:
        """Return a report on all workers."""
        found = self.processes.values()
        workers = ((FoundRank(one.order.rank, one.up is not None, one.stopping), one.up) for one in found)
        return orders.NodeReport(self._seq, tuple(workers))

    async def read_events(
        self, after: int, wait_s: float = EVENT_WAIT_S
    ) -> list[tuple[int, orders.WorkerEvent]]:
        """Return the events with numbers above `after`, waiting up to `wait_s` seconds for the first."""
        while self._events and self._events[0][0] <= after:
            self._events.popleft()
        if not self._events:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                return []
        return [one for one in self._events if one[0] > after]


def _build_launch(order: orders.RankOrder) -> Launch:
    """Return the launch of a worker. A rank of a pipeline also gets its rank number and the rendezvous address."""
    rank, master = order.rank, order.master
    if master is None:
        return order.launch
    place = [
        "--nnodes",
        str(rank.ranks),
        "--node-rank",
        str(rank.rank),
        "--master-addr",
        master[0],
        "--master-port",
        str(master[1]),
    ]
    headless = ["--headless"] if rank.rank else []
    return replace(
        order.launch,
        args=orders.build_rank_arguments(order.launch.args, rank.ranks).append(*place, *headless),
    )
