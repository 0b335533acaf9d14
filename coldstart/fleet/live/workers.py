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
from dataclasses import replace
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


class Processes:
    """Processes of one fleet, by name.

    `ordered` were sent to their server, `stopping` were ordered to stop, and `dying` wait for an engine's end.
    `rates` are the current rates of fetches in bytes/s; None means no limit.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.launched: dict[str, LaunchRank] = {}
        self.up: dict[str, RankUp] = {}
        self.rates: dict[str, float | None] = {}
        self.fetched: dict[str, RankFetched] = {}
        self.ordered: set[str] = set()
        self.stopping: set[str] = set()
        self.dying: dict[str, str] = {}

    def answering(self, group: Group) -> RankUp | None:
        """Return the process that answers for a group, once it is ready."""
        return self.up.get(group.name if group.single else group.workers[0].name)

    def forget(self, name: str) -> None:
        """Forget the fetch of a process that has ended."""
        self.ordered.discard(name)
        self.rates.pop(name, None)
        self.fetched.pop(name, None)

    def lose(self, server: str) -> bool:
        """Forget a server with all of its processes; return whether it was known."""
        if self.nodes.pop(server, None) is None:
            return False
        for name in [rank.worker for rank in self.launched.values() if rank.server == server]:
            del self.launched[name]
            self.forget(name)
            self.up.pop(name, None)
            self.stopping.discard(name)
            self.dying.pop(name, None)
        return True

    def adopt(self, server: str, node: Node, report: NodeReport) -> None:
        """Add a server with the processes that it had before this process began."""
        self.nodes[server] = node
        for worker in report.workers:
            self.launched[worker.rank.worker] = worker.rank
            self.ordered.add(worker.rank.worker)
            if worker.stopping:
                self.stopping.add(worker.rank.worker)
            if worker.up is not None and worker.rank.rank == 0:
                self.up[worker.up.worker] = worker.up

    def list_ranks(self) -> tuple[events.FoundRank, ...]:
        """Return all found processes; a group is ready if its first rank is."""
        ready = {self.launched[name].group for name in self.up}
        return tuple(
            events.FoundRank(rank, rank.group in ready, name in self.stopping)
            for name, rank in self.launched.items()
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
        self.processes.launched |= {rank.worker: rank for rank in ranks}
        self._tasks.spawn(self._launch(ranks))

    def load_whole(self, worker: str) -> None:
        """Load the full model beside the worker's rank. If that fails the pipeline continues unchanged."""
        rank = self.processes.launched.get(worker)
        if rank is None:
            return
        spec = self._core.models[rank.model].spec
        name = name_full_engine(worker)
        self._log.say("consolidate", worker=worker, server=rank.server)
        whole = replace(rank, worker=name, group=name, rank=0, ranks=1, full=1, deadline=inf)
        self.launch([replace(whole, size=spec.size, fetch=spec.size - rank.size, memory=spec.memory)])

    async def _launch(self, ranks: list[LaunchRank]) -> None:
        first = ranks[0]
        deployment = self._state.models[first.model]
        self._log.say("launch", group=first.group, servers=[rank.server for rank in ranks])
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
        self.processes.rates[worker] = rate
        if worker in self.processes.ordered:
            self._tasks.spawn(self._paced(worker, rate))

    async def _paced(self, worker: str, rate: float | None) -> None:
        if (rank := self.processes.launched.get(worker)) is not None:
            with suppress(NodeLostError, KeyError):  # its end is reported separately
                await self.processes.nodes[rank.server].pace(worker, rate)

    async def _launch_rank(self, order: RankOrder) -> None:
        rank = order.rank
        self.processes.ordered.add(rank.worker)
        paced = replace(order, rate=self.processes.rates.get(rank.worker), behind=is_full_engine(rank.worker))
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
        if name in self.processes.launched:
            self._stop(name)
        else:
            told = events.Released(worker, group)
            asyncio.get_running_loop().call_soon(self._emit, told)

    def _stop(self, name: str) -> None:
        if name not in self.processes.stopping:
            self._order_stop(name)

    def _order_stop(self, name: str) -> None:
        self.processes.stopping.add(name)
        self._tasks.spawn(self._stopped(name, self.processes.launched[name]))

    async def _stopped(self, name: str, rank: LaunchRank) -> None:
        self._log.say("stop", worker=name)
        try:
            await self.processes.nodes[rank.server].stop(name)
        except (NodeLostError, KeyError):
            self._ended(RankEnded(name, f"server {rank.server} cannot be reached", True))

    def _names(self, worker: str) -> list[str]:
        names = (worker, name_full_engine(worker))
        return [name for name in names if name in self.processes.launched and self._worker(name) == worker]

    def process_event(self, event: WorkerEvent) -> None:
        """Process an event of a worker's process."""
        if isinstance(event, RankEnded):
            self._ended(event)
        elif isinstance(event, RankFetched):
            self._has_fetched(event)
        elif (rank := self.processes.launched.get(event.worker)) is not None and rank.rank == 0:
            self._came_up(event, rank)

    def _has_fetched(self, fetched: RankFetched) -> None:
        """Record a completed fetch.

        A fetch for an engine beside a rank runs in the background, so it shows nothing about the link's speed.
        """
        name, rank = fetched.worker, self.processes.launched.get(fetched.worker)
        if rank is None:
            return
        self.processes.fetched[name] = fetched
        took = {"bytes": fetched.size, "seconds": round(fetched.seconds, 3), "limited": fetched.limited}
        self._log.say("fetched", worker=name, server=rank.server, **took)
        if self._worker(name) == name:
            self._emit(events.Fetched(name))
            if not fetched.limited:
                self._measurements.record_fetch(rank.server, fetched.size, fetched.seconds)

    def _came_up(self, up: RankUp, first: LaunchRank) -> None:
        """Record that a group is ready: its first rank answers only when all ranks do."""
        self.processes.up[up.worker] = up
        log = self._log
        log.say("ready", worker=up.worker, mode=up.mode, seconds=round(up.start_s, 4), url=up.url)
        for fallback in up.fallbacks:
            log.say("fallback", worker=up.worker, **fallback.encode())
        worker = self._worker(up.worker)
        if worker != up.worker:
            self._emit(events.Whole(worker))
            return
        ranks = [one for one in self.processes.launched.values() if one.group == first.group]
        for rank in ranks:
            self._emit(events.Fetched(rank.worker))
            self._emit(events.RankReady(rank.worker))
        self._has_joined(up, ranks)

    def _has_joined(self, up: RankUp, ranks: list[LaunchRank]) -> None:
        """Record the time after the largest term of a start; known only if each rank fetched its own weights."""
        costs = self._core.models[ranks[0].model].spec.costs
        servers = self._core.roster.cluster.servers
        if len(ranks) != ranks[0].ranks or any(one.worker not in self.processes.fetched for one in ranks):
            return
        terms = (
            timing.loaded_after(
                costs, one.size, servers[one.server].spec.load, self.processes.fetched[one.worker].seconds
            )
            for one in ranks
        )
        seconds = up.start_s - max(terms)
        self._log.say("joined", group=ranks[0].group, seconds=round(seconds, 3))
        self._measurements.record_start(ranks[0].model, len(ranks), seconds)

    def _worker(self, name: str) -> str:
        """Return the worker of a process. One that was found at the beginning is a separate worker."""
        return name if name in self._core.roster.workers else find_worker(name)

    def _ended(self, ended: RankEnded) -> None:
        rank = self.processes.launched.pop(ended.worker, None)
        if rank is None:
            return
        self.processes.forget(ended.worker)
        was_up = self.processes.up.pop(ended.worker, None) is not None
        ordered = ended.ordered or ended.worker in self.processes.stopping
        self.processes.stopping.discard(ended.worker)
        worker = self._worker(ended.worker)
        if not ordered:
            self._log.say("worker ended", worker=ended.worker, reason=ended.reason)
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
            self._log.say("not consolidated", worker=worker, reason=ended.reason, served=was_up)

    def _die(self, worker: str, left: list[str], reason: str) -> None:
        """End the engine beside a rank that has ended; the worker ends with it."""
        self.processes.dying[worker] = reason
        for name in left:
            self._order_stop(name)
