"""Worker processes of the fleet: carries out the core's orders, and reports the end of each process to the core.

A worker is one process, except a worker of a pipeline that loads the full model (ParaServe, section 6). That worker
has a second engine in addition to that of its rank, named and launched as a separate group, and has ended when both
have. vLLM cannot extend a rank to a full model in place.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from coldstart.fleet import events, timing
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Event, LaunchRank
from coldstart.fleet.groups import Group, find_worker, is_full_engine, name_full_engine
from coldstart.fleet.live.orders import (
    Node,
    NodeLostError,
    NodeReport,
    RankEnded,
    RankFetched,
    RankOrder,
    RankUp,
    WorkerEvent,
)
from coldstart.fleet.live.state import FleetState, Measurements
from coldstart.host.live.log import Log, Tasks


@dataclass(slots=True)
class EngineProcess:
    """Process of a rank, or of the full model beside a rank.

    `is_ordered`: it was sent to its server. `rate` is that of its fetch in bytes/s; None means no limit.
    """

    rank: LaunchRank
    is_ordered: bool = False
    is_stopping: bool = False
    rate: float | None = None
    up: RankUp | None = None
    fetched: RankFetched | None = None


class Processes(dict[str, EngineProcess]):
    """Processes of one fleet by name, and its servers; `dying` workers wait for an engine's end, with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, Node] = {}
        self.dying: dict[str, str] = {}

    def answering(self, group: Group) -> RankUp | None:
        """Return the process that serves a group's requests, once it is ready."""
        process = self.get(group.name if group.single else group.workers[0].name)
        return process.up if process else None

    def lose(self, server: str) -> bool:
        """Forget a server with all of its processes; return whether it was known."""
        if self.nodes.pop(server, None) is None:
            return False
        for name in [name for name, one in self.items() if one.rank.server == server]:
            del self[name]
            self.dying.pop(name, None)
        return True

    def adopt(self, server: str, node: Node, report: NodeReport) -> None:
        """Add a server with the processes that it had before this process began."""
        self.nodes[server] = node
        for worker in report.workers:
            up = worker.up if worker.rank.rank == 0 else None
            self[worker.rank.worker] = EngineProcess(worker.rank, True, worker.stopping, up=up)

    def list_ranks(self) -> tuple[events.FoundRank, ...]:
        """Return all found processes; a group is ready if its first rank is."""
        ready = {one.rank.group for one in self.values() if one.up}
        return tuple(
            events.FoundRank(one.rank, one.rank.group in ready, one.is_stopping) for one in self.values()
        )


class Workers:
    """Workers of one fleet; `emit` sends an event to the core. `hung` counts killed processes by model."""

    def __init__(
        self,
        core: FleetCore,
        state: FleetState,
        measurements: Measurements,
        emit: Callable[[Event], None],
        tasks: Tasks,
        log: Log,
    ) -> None:
        self._core, self._state, self._measurements = core, state, measurements
        self._emit, self._tasks, self._log = emit, tasks, log
        self.processes = Processes()
        self.hung = Counter[str]()

    def launch(self, ranks: list[LaunchRank]) -> None:
        """Start a group."""
        self.processes |= {rank.worker: EngineProcess(rank) for rank in ranks}
        self._tasks.spawn(self._launch(ranks))

    def load_whole(self, worker: str) -> None:
        """Load the full model beside the worker's rank. If that fails the pipeline continues unchanged."""
        if (known := self.processes.get(worker)) is None:
            return
        rank = known.rank
        spec = self._core.models[rank.model].spec
        name = name_full_engine(worker)
        self._log.write("consolidate", worker=worker, server=rank.server)
        whole = replace(rank, worker=name, group=name, rank=0, ranks=1, full=1, deadline=inf)
        self.launch([replace(whole, size=spec.size, fetch=spec.size - rank.size, memory=spec.memory)])

    async def _launch(self, ranks: list[LaunchRank]) -> None:
        first = ranks[0]
        deployment = self._state.models[first.model]
        self._log.write("launch", group=first.group, servers=[rank.server for rank in ranks])
        try:
            master = await self.processes.nodes[first.server].rendezvous() if len(ranks) > 1 else None
        except (NodeLostError, KeyError) as lost:
            for rank in ranks:
                self._unreached(rank.worker, first.server, lost)
            return
        settings = self._core.settings
        orders = [
            RankOrder(
                rank, deployment.launch, settings.hold_s, master, hang_timeout_s=settings.hang_timeout_s
            )
            for rank in ranks
        ]
        await asyncio.gather(*map(self._launch_rank, orders))

    def share(self, worker: str, rate: float | None) -> None:
        """Set the rate of a worker's fetch, in bytes/s; None: no limit."""
        if (process := self.processes.get(worker)) is not None:
            process.rate = rate
            if process.is_ordered:
                self._tasks.spawn(self._paced(process))

    async def _paced(self, process: EngineProcess) -> None:
        with suppress(NodeLostError, KeyError):  # its end is reported separately
            await self.processes.nodes[process.rank.server].pace(process.rank.worker, process.rate)

    async def _launch_rank(self, order: RankOrder) -> None:
        rank = order.rank
        if (process := self.processes.get(rank.worker)) is None:  # its server was lost
            return
        process.is_ordered = True
        paced = replace(order, rate=process.rate, behind=is_full_engine(rank.worker))
        try:
            await self.processes.nodes[rank.server].launch(paced)
        except (NodeLostError, KeyError) as lost:
            self._unreached(rank.worker, rank.server, lost)

    def _unreached(self, worker: str, server: str, lost: Exception) -> None:
        self._ended(RankEnded(worker, f"server {server} cannot be reached: {lost}", False, own=False))

    def stop(self, worker: str) -> None:
        """End all processes of the worker."""
        for name in self._names(worker):
            self._stop(name)

    def release(self, worker: str, group: str) -> None:
        """End the worker's process for that group."""
        name = group if is_full_engine(group) else worker
        if name in self.processes:
            self._stop(name)
        else:
            told = events.Released(worker, group)
            asyncio.get_running_loop().call_soon(self._emit, told)

    def _stop(self, name: str) -> None:
        if not self.processes[name].is_stopping:
            self._order_stop(name)

    def _order_stop(self, name: str) -> None:
        process = self.processes[name]
        process.is_stopping = True
        self._tasks.spawn(self._stopped(name, process.rank))

    async def _stopped(self, name: str, rank: LaunchRank) -> None:
        self._log.write("stop", worker=name)
        try:
            await self.processes.nodes[rank.server].stop(name)
        except (NodeLostError, KeyError):
            self._ended(RankEnded(name, f"server {rank.server} cannot be reached", True))

    def _names(self, worker: str) -> list[str]:
        names = (worker, name_full_engine(worker))
        return [name for name in names if name in self.processes and self._worker(name) == worker]

    def process_event(self, event: WorkerEvent) -> None:
        """Process an event of a worker's process."""
        if isinstance(event, RankEnded):
            self._ended(event)
        elif isinstance(event, RankFetched):
            self._has_fetched(event)
        elif (process := self.processes.get(event.worker)) is not None and process.rank.rank == 0:
            self._came_up(event, process)

    def _has_fetched(self, fetched: RankFetched) -> None:
        """Record a completed fetch.

        A fetch for an engine beside a rank runs in the background, so it shows nothing about the link's speed.
        """
        name, process = fetched.worker, self.processes.get(fetched.worker)
        if process is None:
            return
        process.fetched, rank = fetched, process.rank
        took = {"bytes": fetched.size, "seconds": round(fetched.seconds, 3), "limited": fetched.limited}
        self._log.write("fetched", worker=name, server=rank.server, **took)
        if self._worker(name) == name:
            self._emit(events.Fetched(name))
            if not fetched.limited:
                self._measurements.record_fetch(rank.server, fetched.size, fetched.seconds)

    def _came_up(self, up: RankUp, first: EngineProcess) -> None:
        """Record that a group is ready: its first rank answers only when all ranks do."""
        first.up = up
        log = self._log
        log.write("ready", worker=up.worker, mode=up.mode, seconds=round(up.start_s, 4), url=up.url)
        for fallback in up.fallbacks:
            log.write("fallback", worker=up.worker, **fallback.encode())
        worker = self._worker(up.worker)
        if worker != up.worker:
            self._emit(events.Whole(worker))
            return
        ranks = [one for one in self.processes.values() if one.rank.group == first.rank.group]
        for one in ranks:
            self._emit(events.Fetched(one.rank.worker))
            self._emit(events.RankReady(one.rank.worker))
        self._has_joined(up, first.rank, ranks)

    def _has_joined(self, up: RankUp, first: LaunchRank, ranks: list[EngineProcess]) -> None:
        """Record the time after the largest term of a start; known only if each rank fetched its own weights."""
        costs = self._core.models[first.model].spec.costs
        servers = self._core.roster.servers
        terms = [
            timing.loaded_after(costs, one.rank.size, servers[one.rank.server].spec.load, one.fetched.seconds)
            for one in ranks
            if one.fetched is not None
        ]
        if len(terms) != first.ranks:
            return
        seconds = up.start_s - max(terms)
        self._log.write("joined", group=first.group, seconds=round(seconds, 3))
        self._measurements.record_start(first.model, len(terms), seconds)

    def _worker(self, name: str) -> str:
        """Return the worker of a process. One that was found at the beginning is a separate worker."""
        return name if name in self._core.roster.workers else find_worker(name)

    def _ended(self, ended: RankEnded) -> None:
        process = self.processes.pop(ended.worker, None)
        if process is None:
            return
        rank, ordered = process.rank, ended.ordered or process.is_stopping
        worker = self._worker(ended.worker)
        if not ordered:
            self._log.write("worker ended", worker=ended.worker, reason=ended.reason)
        if ended.hung:
            self.hung[rank.model] += 1
        tell = self._emit
        left = self._names(worker)
        known = self._core.roster.workers.get(worker)
        if reason := self.processes.dying.get(worker):
            if not left:
                del self.processes.dying[worker]
                tell(events.WorkerDied(worker, reason))
        elif known is None or not left:
            tell(events.Stopped(worker) if ordered else events.WorkerDied(worker, ended.reason, ended.own))
        elif known.stopping:
            return
        elif ordered:
            tell(events.Released(worker, rank.group))
        elif rank.group in known.groups and known.whole:
            tell(events.ProcessDied(worker, rank.group, ended.reason))
        elif ended.worker == worker:
            self._die(worker, left, ended.reason)
        else:
            self._log.write(
                "not consolidated", worker=worker, reason=ended.reason, served=process.up is not None
            )

    def _die(self, worker: str, left: list[str], reason: str) -> None:
        """End the engine beside a rank that has ended; the worker ends with it."""
        self.processes.dying[worker] = reason
        for name in left:
            self._order_stop(name)
