"""Send the core's orders to the servers of a fleet, and report the state of their worker processes to the core.

vLLM cannot extend a rank to a full model. A pipeline is therefore replaced by workers that load the full model on the same
devices (ParaServe, section 6). On the CPU, a rank and its replacement share weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from coldstart.fleet import events, sizing
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Event, LaunchRank
from coldstart.fleet.groups import Group
from coldstart.fleet.live import orders
from coldstart.fleet.live.state import FleetState, update_average
from coldstart.fleet.specification import FleetModel
from coldstart.host.live.log import BackgroundTasks, Log


@dataclass(slots=True)
class EngineProcess:
    """Process of a worker. `rate` limits its weight fetch in bytes per second. None means no limit."""

    rank: LaunchRank
    is_stopping: bool = False
    rate: float | None = None
    up: orders.RankUp | None = None
    fetched: orders.RankFetched | None = None


class Workers:
    """Worker processes of a fleet by name, and its servers in `nodes`. `emit` is called to send an event to the core.

    `hung` counts, by model, the processes that were killed because they hung.
    """

    def __init__(
        self,
        core: FleetCore,
        state: FleetState,
        emit: Callable[[Event], None],
        tasks: BackgroundTasks,
        log: Log,
    ) -> None:
        self._core, self._state = core, state
        self._emit, self._tasks, self._log = emit, tasks, log
        self.processes: dict[str, EngineProcess] = {}
        self.nodes: dict[str, orders.Node] = {}
        self.hung = Counter[str]()

    def find_first_rank(self, group: Group) -> orders.RankUp | None:
        """Return the RankUp event of a group's first rank, which handles its requests, or None if that rank is not ready."""
        process = self.processes.get(group.workers[0].name)
        return process.up if process else None

    def remove_server(self, server: str) -> bool:
        """Remove a server and all its processes. Return whether the server was known."""
        if self.nodes.pop(server, None) is None:
            return False
        for name in [name for name, one in self.processes.items() if one.rank.server == server]:
            del self.processes[name]
        return True

    def adopt(self, server: str, node: orders.Node, report: orders.NodeReport) -> None:
        """Add a server together with the processes that an earlier gateway started on it."""
        self.nodes[server] = node
        for found, up in report.workers:
            self.processes[found.launch.worker] = EngineProcess(found.launch, found.stopping, up=up)

    def launch(self, ranks: list[LaunchRank]) -> None:
        """Start the workers of a group."""
        self.processes |= {rank.worker: EngineProcess(rank) for rank in ranks}
        self._tasks.spawn(self._launch(ranks))

    async def _launch(self, ranks: list[LaunchRank]) -> None:
        first = ranks[0]
        deployed = self._state.models[first.model]
        # A full worker that starts later beside a rank needs the rest of what the rank has reserved.
        part = deployed.spec.part(first.ranks)
        servers = [rank.server for rank in ranks]
        group = self._core.groups.get(first.group)
        choice = group.choice if group is not None and group.choice else None
        self._log.write(
            "launch", group=first.group, servers=servers, beside=first.beside or None, choice=choice
        )
        try:
            master = await self._call(first.server, "rendezvous") if len(ranks) > 1 else None
        except orders.NodeLostError as lost:
            for rank in ranks:
                self._record_unreachable(rank.worker, first.server, lost)
            return
        limits = self._core.settings
        await asyncio.gather(
            *(
                self._send_order(
                    rank,
                    "launch",
                    orders.RankOrder(
                        rank,
                        deployed.launch,
                        limits.hold_s,
                        limits.hang_timeout_s,
                        master,
                        process.rate,
                        min(rank.memory, part),
                        deployed.spec.held_twice < 1,
                    ),
                )
                for rank in ranks
                # The server of a rank without a process was lost.
                if (process := self.processes.get(rank.worker)) is not None
            )
        )

    async def _call(self, server: str, method: str, *args: Any) -> Any:
        """Call a method of a server, and return its result. Raises NodeLostError if the server was lost or is unreachable."""
        if (node := self.nodes.get(server)) is None:
            raise orders.NodeLostError(f"server {server} has left the fleet")
        return await node.call(method, *args)

    async def _send_order(self, rank: LaunchRank, method: str, order: orders.RankOrder | str) -> None:
        """Send an order to the server of a rank. If the server cannot be reached, record that the worker has ended."""
        try:
            await self._call(rank.server, method, order)
        except orders.NodeLostError as lost:
            self._record_unreachable(rank.worker, rank.server, lost)

    def set_fetch_rate(self, worker: str, rate: float | None) -> None:
        """Limit a worker's weight fetch to `rate` bytes per second, or remove the limit if `rate` is None."""
        if (process := self.processes.get(worker)) is not None:
            process.rate = rate
            # A server ignores the rate of a worker that it has not launched; the launch order contains the rate.
            self._tasks.spawn(self._send_fetch_rate(process))

    async def _send_fetch_rate(self, process: EngineProcess) -> None:
        with suppress(orders.NodeLostError):  # the loss of the server is reported separately
            await self._call(process.rank.server, "set_fetch_rate", process.rank.worker, process.rate)

    def _record_unreachable(self, worker: str, server: str, lost: Exception) -> None:
        self._record_end(orders.RankEnded(worker, f"cannot reach server {server}: {lost}"), was_reached=False)

    def stop(self, worker: str) -> None:
        """Stop a worker."""
        process = self.processes.get(worker)
        if process is not None and not process.is_stopping:
            process.is_stopping = True
            self._log.write("stop", worker=worker)
            self._tasks.spawn(self._send_order(process.rank, "stop", worker))

    def process_event(self, event: orders.WorkerEvent) -> None:
        """Process an event that a server reported."""
        if isinstance(event, orders.RankEnded):
            self._record_end(event)
        elif isinstance(event, orders.RankFetched):
            self._record_fetch(event)
        elif (process := self.processes.get(event.worker)) is not None and process.rank.rank == 0:
            self._record_ready(event, process)

    def _record_fetch(self, fetched: orders.RankFetched) -> None:
        """Record a completed fetch. Fetches of a replacement have low priority, so they do not measure the link."""
        process = self.processes.get(fetched.worker)
        if process is None:
            return
        process.fetched, rank = fetched, process.rank
        took = {"bytes": fetched.size, "seconds": round(fetched.seconds, 3), "limited": fetched.limited}
        self._log.write("fetched", worker=rank.worker, server=rank.server, **took)
        self._emit(events.WeightsFetched(rank.worker))
        if not fetched.limited and not rank.beside:
            speed = self._state.record_fetch(rank.server, fetched.size, fetched.seconds)
            if speed is not None:
                self._emit(events.LinkMeasured(rank.server, speed))

    def _record_ready(self, up: orders.RankUp, first: EngineProcess) -> None:
        """Record that a group is ready. Its first rank becomes ready only after all other ranks."""
        first.up = up
        log = self._log
        log.write("ready", worker=up.worker, mode=up.mode, seconds=round(up.start_s, 4), url=up.url)
        for fallback in up.fallbacks:
            log.write("fallback", worker=up.worker, **fallback.encode())
        ranks = [one for one in self.processes.values() if one.rank.group == first.rank.group]
        for one in ranks:
            self._emit(events.WeightsFetched(one.rank.worker))
            self._emit(events.RankReady(one.rank.worker))
        if not first.rank.beside:
            self._record_join_time(up, first.rank, ranks)

    def _record_join_time(self, up: orders.RankUp, first: LaunchRank, ranks: list[EngineProcess]) -> None:
        """Record the seconds from loaded weights to ready if every rank fetched its weights.

        For a single worker with local weights, record instead the seconds until its weights were loaded. Do so as well if the
        group was ready before its runtime should have been: it started from a template, and the bundle's start did not.
        """
        if (deployed := self._state.models.get(first.model)) is None:
            return
        model, costs = deployed.spec, deployed.spec.costs
        loaded_s = up.start_s - model.group_costs(first.ranks).join_s * first.ranks
        if [one.fetched for one in ranks] == [None] and not deployed.launch.weights_from:
            self._record_load_time(model, loaded_s)
            return
        servers = self._core.roster.servers
        terms = [
            sizing.predict_loaded_after_s(
                costs, one.rank.size, servers[one.rank.server].spec.load, one.fetched.seconds
            )
            for one in ranks
            if one.fetched is not None
        ]
        if len(terms) != first.ranks:
            return
        fetched_s = max(one.fetched.seconds for one in ranks if one.fetched)
        if fetched_s < up.start_s < max(terms) <= costs.runtime_s:
            self._record_load_time(model, loaded_s)
            return
        seconds = up.start_s - max(terms)
        self._log.write("joined", group=first.group, seconds=round(seconds, 3))
        joined_s = update_average(model.joins.get(first.ranks), max(0.0, seconds))
        self._correct(replace(model, joins={**model.joins, first.ranks: joined_s}))

    def _record_load_time(self, model: FleetModel, seconds: float) -> None:
        """Record the seconds of a worker's start up to its loaded weights, which were on its machine."""
        costs = model.costs
        library_s = max(0.0, seconds - costs.container_s - costs.context_s)
        library_s = update_average(costs.library_s, library_s)
        self._correct(replace(model, costs=replace(costs, library_s=library_s)))

    def _correct(self, spec: FleetModel) -> None:
        self._state.correct(spec)
        self._emit(events.ModelDeployed(spec))

    def _record_end(self, ended: orders.RankEnded, *, was_reached: bool = True) -> None:
        process = self.processes.pop(ended.worker, None)
        if process is None:
            return
        rank = process.rank
        if ended.hung:
            self.hung[rank.model] += 1
        if process.is_stopping:
            self._emit(events.WorkerEnded(rank.worker))
            return
        self._log.write("worker ended", worker=rank.worker, reason=ended.reason, beside=rank.beside or None)
        own = was_reached and not ended.hung
        self._emit(events.WorkerEnded(rank.worker, ended.reason, own))
