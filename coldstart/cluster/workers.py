"""The processes of the fleet's workers as the controller orders them about, and what each one's end means for the core.

A worker is one process, but for one out of a pipeline that loads the whole model (ParaServe, section 6): that has an engine
beside the one of its rank, named and launched as a group of its own, and is gone when both are. Nothing in vLLM grows a rank
into a whole model in place.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from coldstart.cluster.node import Said
from coldstart.cluster.orders import (
    Node,
    NodeLost,
    NodeReport,
    RankEnded,
    RankFetched,
    RankOrder,
    RankUp,
)
from coldstart.fleet import events, timing
from coldstart.fleet.events import LaunchRank
from coldstart.fleet.groups import WHOLE, Group

if TYPE_CHECKING:
    from coldstart.cluster.control import FleetControl


class Workers:
    """Those of one controller, by the process's name. `stopping` were ordered to stop; `dying` wait for an engine's end.

    `rates` are what those that fetch were last told.
    """

    def __init__(self, control: FleetControl) -> None:
        self.control = control
        self.nodes: dict[str, Node] = {}
        self.launched: dict[str, LaunchRank] = {}
        self.up: dict[str, RankUp] = {}
        self.rates: dict[str, float | None] = {}
        self.fetched: dict[str, RankFetched] = {}
        self._ordered: set[str] = set()
        self.stopping: set[str] = set()
        self.dying: dict[str, str] = {}

    def answering(self, group: Group) -> RankUp | None:
        """Who answers for a group."""
        return self.up.get(group.name if group.single else group.workers[0].name)

    # Orders.

    def launch(self, ranks: list[LaunchRank]) -> None:
        """Start a group."""
        self.launched |= {rank.worker: rank for rank in ranks}
        self.control.tasks.spawn(self._launch(ranks))

    def load_whole(self, worker: str) -> None:
        """Load the whole model beside the worker's rank. Where that fails the pipeline stays one."""
        rank = self.launched.get(worker)
        if rank is None:
            return
        spec = self.control.core.models[rank.model].spec
        name = worker + WHOLE
        self.control.log.say("consolidate", worker=worker, server=rank.server)
        whole = replace(rank, worker=name, group=name, rank=0, ranks=1, full=1, deadline=inf)
        self.launch([replace(whole, size=spec.size, fetch=spec.size - rank.size, memory=spec.memory)])

    async def _launch(self, ranks: list[LaunchRank]) -> None:
        first = ranks[0]
        deployment = self.control.state.models[first.model]
        self.control.log.say("launch", group=first.group, servers=[rank.server for rank in ranks])
        try:
            master = await self.nodes[first.server].meeting() if len(ranks) > 1 else None
        except (NodeLost, KeyError) as lost:
            for rank in ranks:
                self._unreached(rank.worker, first.server, lost)
            return
        patience = self.control.core.settings.hold_s
        orders = [RankOrder(rank, deployment.launch, patience, master) for rank in ranks]
        await asyncio.gather(*map(self._launch_rank, orders))

    def share(self, worker: str, rate: float | None) -> None:
        """It has another part of its server's link."""
        self.rates[worker] = rate
        if worker in self._ordered:
            self.control.tasks.spawn(self._paced(worker, rate))

    async def _paced(self, worker: str, rate: float | None) -> None:
        if (rank := self.launched.get(worker)) is not None:
            with suppress(NodeLost, KeyError):  # gone, as will be said
                await self.nodes[rank.server].pace(worker, rate)

    async def _launch_rank(self, order: RankOrder) -> None:
        rank = order.rank
        self._ordered.add(rank.worker)
        paced = replace(order, rate=self.rates.get(rank.worker), behind=rank.worker.endswith(WHOLE))
        try:
            await self.nodes[rank.server].launch(paced)
        except (NodeLost, KeyError) as lost:
            self._unreached(rank.worker, rank.server, lost)

    def _unreached(self, worker: str, server: str, lost: Exception) -> None:
        self._ended(RankEnded(worker, f"server {server} is gone: {lost}", False, own=False))

    def stop(self, worker: str) -> None:
        """End all that the worker is."""
        for name in self._processes(worker):
            self._stop(name)

    def release(self, worker: str, group: str) -> None:
        """End what the worker runs for that group."""
        name = group if group.endswith(WHOLE) else worker
        if name in self.launched:
            self._stop(name)
        else:
            told = events.Released(worker, group)
            asyncio.get_running_loop().call_soon(self.control.tell, told)

    def _stop(self, name: str) -> None:
        if name not in self.stopping:
            self.stopping.add(name)
            self.control.tasks.spawn(self._stopped(name))

    async def _stopped(self, name: str) -> None:
        """Once no gateway sends to it any more."""
        if (rank := self.launched.get(name)) is not None:
            await self.control.desks.let_go(rank.group, self.control.core.settings.hold_s)
            await self._asked_to_stop(name, rank)

    async def _asked_to_stop(self, name: str, rank: LaunchRank) -> None:
        self.control.log.say("stop", worker=name)
        try:
            await self.nodes[rank.server].stop(name)
        except (NodeLost, KeyError):
            self._ended(RankEnded(name, f"server {rank.server} is gone", True))

    def _processes(self, worker: str) -> list[str]:
        names = (worker, worker + WHOLE)
        return [name for name in names if name in self.launched and self._worker(name) == worker]

    # What is said.

    def said(self, event: Said) -> None:
        """A server has something to say of a process."""
        if isinstance(event, RankEnded):
            self._ended(event)
        elif isinstance(event, RankFetched):
            self._has_fetched(event)
        elif (rank := self.launched.get(event.worker)) is not None and rank.rank == 0:
            self._came_up(event, rank)

    def _has_fetched(self, fetched: RankFetched) -> None:
        """What loads beside a rank has no part in its server's foreground, and says nothing of the link."""
        name, rank = fetched.worker, self.launched.get(fetched.worker)
        if rank is None:
            return
        self.fetched[name] = fetched
        took = {"bytes": fetched.size, "seconds": round(fetched.seconds, 3), "limited": fetched.limited}
        self.control.log.say("fetched", worker=name, server=rank.server, **took)
        if self._worker(name) == name:
            self.control.tell(events.Fetched(name))
            if not fetched.limited:
                self.control.link_measured(rank.server, fetched.size, fetched.seconds)

    def _came_up(self, up: RankUp, first: LaunchRank) -> None:
        """The first rank answers only when all do: the others are up before they have done anything, and say so."""
        self.up[up.worker] = up
        log = self.control.log
        log.say("ready", worker=up.worker, mode=up.mode, seconds=round(up.start_s, 4), url=up.url)
        for fallback in up.fallbacks:
            log.say("fallback", worker=up.worker, **fallback.to_json())
        worker = self._worker(up.worker)
        if worker != up.worker:
            self.control.tell(events.Whole(worker))
            return
        ranks = [one for one in self.launched.values() if one.group == first.group]
        for rank in ranks:
            self.control.tell(events.Fetched(rank.worker))
            self.control.tell(events.RankReady(rank.worker))
        self._has_joined(up, ranks)

    def _has_joined(self, up: RankUp, ranks: list[LaunchRank]) -> None:
        """What the start took after its largest term; known only of one that fetched its weights, each rank its own."""
        costs, servers = (
            self.control.core.models[ranks[0].model].spec.costs,
            self.control.core.roster.cluster.servers,
        )
        if len(ranks) != ranks[0].ranks or any(one.worker not in self.fetched for one in ranks):
            return
        terms = (
            timing.loaded_after(
                costs, one.size, servers[one.server].spec.load, self.fetched[one.worker].seconds
            )
            for one in ranks
        )
        seconds = up.start_s - max(terms)
        self.control.log.say("joined", group=ranks[0].group, seconds=round(seconds, 3))
        self.control.start_measured(ranks[0].model, len(ranks), seconds)

    def _worker(self, name: str) -> str:
        """Whose process that is. One found by a controller that began again is a worker by itself."""
        return name if name in self.control.core.roster.workers else name.removesuffix(WHOLE)

    def _ended(self, ended: RankEnded) -> None:
        rank = self.launched.pop(ended.worker, None)
        if rank is None:
            return
        self._forget(ended.worker)
        was_up = self.up.pop(ended.worker, None) is not None
        ordered = ended.ordered or ended.worker in self.stopping
        self.stopping.discard(ended.worker)
        worker = self._worker(ended.worker)
        if not ordered:
            self.control.log.say("worker ended", worker=ended.worker, reason=ended.reason)
        tell = self.control.tell
        left = self._processes(worker)
        known = self.control.core.roster.workers.get(worker)
        if reason := self.dying.get(worker):
            if not left:
                del self.dying[worker]
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
            self.control.log.say("not consolidated", worker=worker, reason=ended.reason, served=was_up)

    def _die(self, worker: str, left: list[str], reason: str) -> None:
        """Its rank is no more: what loads beside it ends at once, and then it is gone."""
        self.dying[worker] = reason
        for name in left:
            self.stopping.add(name)
            self.control.tasks.spawn(self._asked_to_stop(name, self.launched[name]))

    def _forget(self, name: str) -> None:
        self._ordered.discard(name)
        self.rates.pop(name, None)
        self.fetched.pop(name, None)

    # Servers.

    def lose(self, server: str) -> bool:
        """Forget a server with all that was on it; whether it was known."""
        if self.nodes.pop(server, None) is None:
            return False
        for name in [rank.worker for rank in self.launched.values() if rank.server == server]:
            del self.launched[name]
            self._forget(name)
            self.up.pop(name, None)
            self.stopping.discard(name)
            self.dying.pop(name, None)
        return True

    def find(self, server: str, node: Node, report: NodeReport) -> None:
        """What a server has, for a controller that has begun."""
        self.nodes[server] = node
        for worker in report.workers:
            self.launched[worker.rank.worker] = worker.rank
            self._ordered.add(worker.rank.worker)
            if worker.stopping:
                self.stopping.add(worker.rank.worker)
            if worker.up is not None and worker.rank.rank == 0:
                self.up[worker.up.worker] = worker.up

    def found(self) -> tuple[events.FoundRank, ...]:
        """All of it; a group is ready when its first rank is."""
        ready = {self.launched[name].group for name in self.up}
        return tuple(
            events.FoundRank(rank, rank.group in ready, name in self.stopping)
            for name, rank in self.launched.items()
        )
