"""Workers by name and their resources: every change of device memory and link reservations goes through this module.

Invariants: a worker holds its device memory from its launch until its process is known to have ended; on each device,
free memory and the memory of workers add up to its size; a lost server holds no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from math import inf

from coldstart.fleet import timing
from coldstart.fleet.events import FetchRest, FoundRank, LaunchRank, Share, Stop
from coldstart.fleet.groups import (
    FleetWorker,
    Group,
    GroupPhase,
    is_full_engine,
    name_background_fetch,
    name_full_engine,
)
from coldstart.fleet.reservations import BandwidthReservations
from coldstart.fleet.sizing import Demand, Offer, Place, Scheme, choose
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec


class FleetServer:
    """State of one server."""

    def __init__(self, spec: ServerSpec, now: float) -> None:
        self.spec, self.draining = spec, False
        self.free = [spec.memory] * spec.devices
        self.reservations = BandwidthReservations(spec.network, now)

    def offer(self, now: float) -> Offer:
        fetch = 0.0 if self.draining else self.reservations.offer(now)
        return Offer(self.spec.name, fetch, self.spec.load, max(self.free))

    def take(self, memory: int) -> int:
        """Allocate `memory` bytes on the device with the least sufficient free memory; return its number.

        Raises:
            ValueError: No device has enough free memory.
        """
        fitting = [(free, number) for number, free in enumerate(self.free) if free >= memory]
        if not fitting:
            raise ValueError(f"no device of {self.spec.name} has {memory} bytes free")
        device = min(fitting)[1]
        self.free[device] -= memory
        return device

    def give(self, device: int, memory: int) -> None:
        self.free[device] += memory


class Roster:
    """Workers, and servers in the order in which they joined.

    A benchmark's subclass may place models otherwise, or know weights that need no fetch.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.servers: dict[str, FleetServer] = {}
        self.workers: dict[str, FleetWorker] = {}
        self._stirred: dict[str, None] = {}

    def join(self, spec: ServerSpec, now: float) -> None:
        self.servers[spec.name] = FleetServer(spec, now)

    def open(self, avoided: Collection[str] = ()) -> Iterator[FleetServer]:
        return (
            server
            for server in self.servers.values()
            if not server.draining and server.spec.name not in avoided
        )

    def offers(self, now: float, least: int = 0, avoided: Collection[str] = ()) -> list[Offer]:
        """Return the offer of every server with a device that has `least` bytes free."""
        return [server.offer(now) for server in self.open(avoided) if max(server.free) >= least]

    def shares(self) -> Iterator[Share]:
        """Yield the rates of fetches that changed since the last call."""
        stirred, self._stirred = self._stirred, {}
        for server in stirred:
            if server in self.servers:
                yield from itertools.starmap(Share, self.servers[server].reservations.list_changed_rates())

    def _reservations(self, server: FleetServer) -> BandwidthReservations:
        """Return the server's reservations for a change."""
        self._stirred[server.spec.name] = None
        return server.reservations

    def place(
        self, model: str, demand: Demand, required: int, now: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        """Return the scheme of a start by Algorithm 1 of ParaServe over the offers of the reservations (Algorithm 2).

        None: the model must wait. Servers in `avoided` are not used.
        """
        most = self.settings.most_ranks
        offers = self.offers(now, min(map(demand.part, range(1, most + 1))), avoided)
        return choose(demand, offers, required=required, consolidate=self.settings.consolidate, most=most)

    def count_missing(self, server: FleetServer, model: str, size: int) -> int:
        """Return how many of `size` bytes of the model's weights the server must fetch."""
        return size

    def launch(
        self, name: str, model: FleetModel, demand: Demand, scheme: Scheme, keep: int, now: float
    ) -> tuple[Group, list[LaunchRank]]:
        """Allocate memory and links for a scheme; return its group and the launch orders."""
        keep = min(keep, max(1, scheme.full))
        group = Group(name, model.name, [], keep, 0, since=now, predicted_s=scheme.ttft_s)
        group.capacity = model.batch * group.keep
        orders = [self._start(group, model, demand, scheme, rank, now) for rank in range(len(scheme.places))]
        return group, orders

    def _start(
        self, group: Group, model: FleetModel, demand: Demand, scheme: Scheme, rank: int, now: float
    ) -> LaunchRank:
        place, name = scheme.places[rank], f"{group.name}.{rank}"
        server = self.servers[place.server]
        device = server.take(place.memory)
        fetch = self.count_missing(server, model.name, place.size)
        deadline = now + self._budget(demand, scheme, place, server.spec.load)
        if fetch and deadline < inf:
            self._reservations(server).claim(name, fetch, deadline, now)
        elif fetch:
            self._reservations(server).join(name, fetch, now)
        worker = FleetWorker(name, model.name, place.server, device, place.memory, place.size, 0, place.full)
        worker.rest, worker.whole = model.size - place.size, len(scheme.places) == 1
        worker.groups.append(group.name)
        group.workers.append(worker)
        self.workers[name] = worker
        where = place.server, device, place.size, fetch, place.memory, deadline
        return LaunchRank(name, group.name, model.name, rank, len(scheme.places), scheme.full, *where)

    def adopt(self, parts: list[FoundRank], model: FleetModel, now: float) -> Group | None:
        """Adopt a group that an earlier process of the fleet launched; return None if it is incomplete.

        A worker that is stopping, or will be stopped, retains its memory until it has ended.
        """
        first = parts[0].launch
        whole = len(parts) == first.ranks and not any(part.stopping for part in parts)
        whole = whole and all(part.launch.server in self.servers for part in parts)
        group = Group(first.group, model.name, [], 1, model.batch, since=now)
        for part in sorted(parts, key=lambda one: one.launch.rank):
            launch = part.launch
            server = self.servers.get(launch.server)
            if server is None or launch.worker in self.workers:
                continue
            rest, full = model.size - launch.size, launch.memory >= model.memory
            # An engine beside it reserves its own memory.
            beside = name_full_engine(launch.worker) in self.workers
            memory = max(launch.size, launch.memory - model.memory) if beside and full else launch.memory
            server.free[launch.device] -= memory
            where = launch.server, launch.device, memory, launch.size, rest, full
            worker = FleetWorker(launch.worker, model.name, *where, part.ready, launch.ranks == 1, not whole)
            self.workers[launch.worker] = worker
            if whole:
                worker.groups.append(group.name)
                group.workers.append(worker)
        return group if whole else None

    def _budget(self, demand: Demand, scheme: Scheme, place: Place, load: float) -> float:
        """Return the seconds in which the rank must be fetched: the paper's D minus the current time."""
        if not scheme.meets:
            return inf
        ranks = len(scheme.places)
        after = timing.ttft_s(demand.group_costs(ranks), 0.0, ranks, scheme.full, demand.waited_s)
        term = demand.ttft_s - after
        return timing.fetch_budget_s(demand.costs, place.size, load, term)

    def measured(self, server: str, bandwidth: float, now: float) -> None:
        """Record the measured speed of a server's link, in bytes/s."""
        if (known := self.servers.get(server)) is not None:
            self._reservations(known).measured(bandwidth, now)

    def fetched(self, worker: FleetWorker, now: float) -> None:
        self._reservations(self.servers[worker.server]).finished(worker.name, now)

    def fetch_rest(self, worker: FleetWorker, now: float) -> FetchRest:
        server = self.servers[worker.server]
        size = self.count_missing(server, worker.model, worker.rest)
        if size:
            server.reservations.trail(name_background_fetch(worker.name), size, now)
        return FetchRest(worker.name, size)

    def complete_worker(self, worker: FleetWorker, now: float) -> None:
        worker.whole = True
        server = self.servers[worker.server]
        server.reservations.finished(name_background_fetch(worker.name), now)

    def grow(self, worker: FleetWorker, memory: int) -> bool:
        """Enlarge the worker to `memory` bytes for the full model. Return False if its device has too little free memory."""
        free, more = self.servers[worker.server].free, memory - worker.memory
        if free[worker.device] < more:
            return False
        free[worker.device] -= more
        worker.memory, worker.full = memory, True
        return True

    def shrink(self, worker: FleetWorker, memory: int) -> None:
        """Reduce the worker's device memory to `memory` bytes."""
        if memory < worker.memory:
            self.servers[worker.server].give(worker.device, worker.memory - memory)
            worker.memory = memory

    def released(self, worker: FleetWorker, model: FleetModel, group: str) -> None:
        """Free the memory of the worker's process for that group: its rank, or the full model beside it."""
        left = max(worker.size, worker.memory - model.memory) if is_full_engine(group) else model.memory
        self.shrink(worker, left)

    def stop(self, group: Group, now: float) -> Iterator[Stop]:
        """Order the workers of a group to stop, unless they work for another group."""
        group.phase = GroupPhase.LEAVING
        for worker in group.workers:
            if group.name in worker.groups:
                worker.groups.remove(group.name)
            if worker.groups or worker.stopping or worker.name not in self.workers:
                continue
            worker.stopping = True
            self._release_link(worker, now)
            yield Stop(worker.name)

    def remove_worker(self, worker: FleetWorker, now: float) -> None:
        """Free the memory and link of a worker whose process has ended."""
        if self.workers.pop(worker.name, None) is None or worker.server not in self.servers:
            return
        self._release_link(worker, now)
        self.servers[worker.server].give(worker.device, worker.memory)

    def lose(self, server: str) -> list[FleetWorker]:
        """Remove a lost server; return its workers."""
        self.servers.pop(server, None)
        lost = [worker for worker in self.workers.values() if worker.server == server]
        for worker in lost:
            del self.workers[worker.name]
        return lost

    def _release_link(self, worker: FleetWorker, now: float) -> None:
        server = self.servers.get(worker.server)
        if server is not None:
            self._reservations(server).finished(worker.name, now)
            server.reservations.finished(name_background_fetch(worker.name), now)
