"""Workers of a fleet and the resources that they reserve. Only this module changes reservations of device memory and links.

Invariants: the device memory of a worker is reserved from its launch until its process is known to have ended; on each
device, the free memory and the memory of its workers add up to the device's size; a lost server has no reservations.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from math import floor, inf, log

from coldstart.fleet import sizing
from coldstart.fleet.events import FoundRank, LaunchRank, SetFetchRate, StopWorker
from coldstart.fleet.groups import Deployment, Group, GroupPhase, GroupWorker
from coldstart.fleet.reservations import BandwidthReservations
from coldstart.fleet.sizing import Offer, Place, Scheme, choose
from coldstart.fleet.specification import FleetModel, FleetSettings, Overlap, ServerSpec

STEP = 1.05


class FleetServer:
    """Free device memory of one server, and the bandwidth reservations on its link."""

    def __init__(self, spec: ServerSpec, now: float) -> None:
        self.spec, self.draining = spec, False
        self.free = [spec.memory] * spec.devices
        self.reservations = BandwidthReservations(spec.network, now)

    def offer(self, now: float) -> Offer:
        fetch = 0.0 if self.draining else self.reservations.offer(now)
        return Offer(self.spec.name, fetch, self.spec.load, max(self.free))

    def take(self, memory: int) -> int:
        """Reserve `memory` bytes on the fullest device that has enough (best fit). Return the index of the device."""
        device = min((free, number) for number, free in enumerate(self.free) if free >= memory)[1]
        self.free[device] -= memory
        return device


class Roster:
    """Workers of a fleet, and its servers in the order in which they joined.

    Benchmarks subclass it to place models differently, or to model servers that already have weights.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.servers: dict[str, FleetServer] = {}
        self.workers: dict[str, GroupWorker] = {}
        self.hops: dict[tuple[str, str], float] = {}
        self._stirred: dict[str, None] = {}
        # Index of servers. `_idle` has those without a fetch, whose offers do not depend on the time, by the rates of
        # link and load, in order of free memory and name. `_stale` has those that changed since the last update.
        self._idle: dict[tuple[float, float], list[tuple[int, str]]] = {}
        self._at: dict[str, tuple[tuple[float, float], tuple[int, str]]] = {}
        self._fetching: dict[str, None] = {}
        self._stale: dict[str, None] = {}

    def time_hops(self, server: str, seconds: Mapping[str, float]) -> None:
        """Record the measured network latency between a server and other servers, in seconds by server name."""
        for other, took_s in seconds.items():
            first, second = sorted((server, other))
            if first in self.servers and second in self.servers:
                self.hops[first, second] = took_s

    def join(self, spec: ServerSpec, now: float) -> None:
        self.servers[spec.name] = FleetServer(spec, now)
        self._stale[spec.name] = None

    def drain(self, server: str) -> None:
        """Stop placing workers on the server."""
        self.servers[server].draining = True
        self._stale[server] = None

    def open(self, avoided: Collection[str] = ()) -> Iterator[FleetServer]:
        return (
            server
            for server in self.servers.values()
            if not server.draining and server.spec.name not in avoided
        )

    def _update_index(self) -> None:
        for name in self._stale:
            if name in self._at:
                link, entry = self._at.pop(name)
                entries = self._idle[link]
                del entries[bisect_left(entries, entry)]
                if not entries:
                    del self._idle[link]
            self._fetching.pop(name, None)
            server = self.servers.get(name)
            if server is None or server.draining:
                continue
            if server.reservations.link.pending:
                self._fetching[name] = None
                continue
            link, entry = (server.reservations.link.rate, server.spec.load), (max(server.free), name)
            self._at[name] = link, entry
            insort(self._idle.setdefault(link, []), entry)
        self._stale.clear()

    def find_most_free(self) -> int:
        """Return the largest number of free bytes on any device of the servers that accept workers."""
        self._update_index()
        fetching = (max(self.servers[name].free) for name in self._fetching)
        return max((*(entries[-1][0] for entries in self._idle.values()), *fetching), default=0)

    def list_offers(self, model: FleetModel, now: float, avoided: Collection[str] = ()) -> list[Offer]:
        """Return the offers from which Algorithm 1 chooses servers for the model. Servers in `avoided` make no offer.

        Among idle servers with equal links, the algorithm prefers those with the least memory that is enough. Therefore only
        a few of them make an offer: the smallest that can hold a rank, and the smallest that can hold a full worker.
        """
        self._update_index()
        sizes, count = range(2, self.settings.most_ranks + 1), self.settings.most_ranks + len(avoided)
        needs = {model.memory}.union(map(model.part, sizes))
        needs.update(map(model.full_memory, sizes))
        least, found = min(needs), list[Offer]()
        for (fetch, load), entries in self._idle.items():
            chosen: dict[tuple[int, str], None] = {}
            for need in needs:
                first = bisect_left(entries, (need, ""))
                chosen.update(dict.fromkeys(entries[first : first + count]))
            found += [Offer(name, fetch, load, free) for free, name in chosen if name not in avoided]
        for name in self._fetching:
            server = self.servers[name]
            if name not in avoided and max(server.free) >= least:
                found.append(server.offer(now))
        return found

    def list_changed_rates(self) -> Iterator[SetFetchRate]:
        """Yield an action for each fetch whose rate changed since the last call."""
        stirred, self._stirred = self._stirred, {}
        for server in stirred:
            if server in self.servers:
                yield from itertools.starmap(
                    SetFetchRate, self.servers[server].reservations.list_changed_rates()
                )

    def _reservations(self, server: FleetServer) -> BandwidthReservations:
        """Return the reservations of a server, and mark the server as changed."""
        self._stirred[server.spec.name] = self._stale[server.spec.name] = None
        return server.reservations

    def place(
        self, model: FleetModel, required: int, now: float, waited_s: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        """Choose a placement with ParaServe's Algorithm 1, from the offers that link reservations allow (Algorithm 2).

        `required` is the number of workers that the model needs. The oldest request has waited `waited_s` seconds. Servers
        in `avoided` are not used. Return None if the model must wait.
        """
        offers = self.list_offers(model, now, avoided)
        return choose(model, offers, self.settings, required=required, waited_s=waited_s, hops=self.hops)

    def count_missing(self, server: FleetServer, model: str, size: int) -> int:
        """Return how many of a model's `size` weight bytes the server must fetch: all, unless a subclass models a cache."""
        return size

    def launch(
        self, deployment: Deployment, scheme: Scheme, keep: int, now: float
    ) -> tuple[Group, list[LaunchRank]]:
        """Reserve memory and bandwidth for the placement `scheme`. Return its group and the launch actions of its ranks.

        After consolidation, up to `keep` of its workers remain.
        """
        keep, model = min(keep, max(1, scheme.full)), deployment.spec
        name = deployment.name_next_group()
        group = Group(
            name,
            model.name,
            [],
            keep,
            model.batch,
            since=now,
            predicted_s=scheme.ttft_s,
            choice=scheme.reason,
        )
        orders = []
        for rank, place in enumerate(scheme.places):
            server, name = self.servers[place.server], f"{group.name}.{rank}"
            device, fetch = server.take(place.memory), self.count_missing(server, model.name, place.size)
            self._stale[place.server] = None
            deadline = now + _find_fetch_budget_s(model, scheme, place, server.spec.load)
            if fetch:
                self._reservations(server).claim(name, fetch, deadline, now)
            where = place.server, device, place.size, fetch, place.memory, deadline, deployment.number
            order = LaunchRank(name, group.name, model.name, rank, len(scheme.places), scheme.full, *where)
            self._add(group, order, full=place.full)
            orders.append(order)
        return group, orders

    def launch_beside(
        self, rank: GroupWorker, deployment: Deployment, now: float
    ) -> tuple[Group, LaunchRank]:
        """Launch a worker with the full model in part of the rank's memory. Return its group and the launch action.

        The group has no capacity until it replaces the group of the rank.
        """
        model, server = deployment.spec, self.servers[rank.server]
        group = Group(
            deployment.name_next_group(),
            model.name,
            [],
            0,
            model.batch,
            since=now,
            replaces=rank.launch.group,
        )
        name, fetch = f"{group.name}.0", self.count_missing(server, model.name, model.size - rank.launch.size)
        if fetch:
            server.reservations.trail(name, fetch, now)
        rank.memory -= model.memory
        place = rank.server, rank.launch.device
        where = *place, model.size, fetch, model.memory, inf, deployment.number, rank.name
        order = LaunchRank(name, group.name, model.name, 0, 1, 1, *where)
        self._add(group, order, full=True)
        return group, order

    def _add(self, group: Group, order: LaunchRank, *, full: bool) -> GroupWorker:
        worker = GroupWorker(order, order.memory, full)
        group.workers.append(worker)
        self.workers[order.worker] = worker
        return worker

    def adopt(
        self, parts: list[FoundRank], model: FleetModel, replaced: Collection[str], now: float
    ) -> Group | None:
        """Adopt a group that an earlier gateway launched. Return None if the group is incomplete.

        A worker that is stopping, or that must be stopped, keeps its memory until it has ended. The replacements of the
        ranks in `replaced` already use part of the memory of these ranks.
        """
        first = parts[0].launch
        whole = len(parts) == first.ranks and not any(part.stopping for part in parts)
        whole = whole and all(part.launch.server in self.servers for part in parts)
        group = Group(first.group, model.name, [], 1, model.batch, since=now)
        ready = any(part.ready and part.launch.rank == 0 for part in parts)
        for part in sorted(parts, key=lambda one: one.launch.rank):
            launch = part.launch
            server = self.servers.get(launch.server)
            if server is None or launch.worker in self.workers:
                continue
            full = launch.memory >= model.memory
            worker = self._add(group, launch, full=full)
            worker.memory -= model.memory if full and launch.worker in replaced else 0
            worker.ready, worker.stopping = ready, not whole
            server.free[launch.device] -= worker.memory
            self._stale[launch.server] = None
        return group if whole else None

    def record_bandwidth(self, server: str, bandwidth: float, now: float) -> None:
        """Record the measured speed of a server's link in bytes per second, rounded down by up to 5%.

        Rounding hides measurement noise, so that servers with equal links compare as equal and the fullest of them is
        chosen.
        """
        if (known := self.servers.get(server)) is not None:
            self._reservations(known).measured(STEP ** floor(log(bandwidth, STEP)), now)
            # Update the index now, so that no later decision must do so for all servers.
            self._update_index()

    def record_fetched(self, worker: GroupWorker, now: float) -> None:
        self._reservations(self.servers[worker.server]).finished(worker.name, now)

    def record_loaded(self, worker: GroupWorker, now: float) -> None:
        """Record that a worker has loaded its weights and is ready."""
        worker.ready = True

    def grow_worker(self, worker: GroupWorker, memory: int) -> bool:
        """Increase a worker's reservation to `memory` bytes. Return False if its device does not have enough free memory."""
        free, more = self.servers[worker.server].free, memory - worker.memory
        if free[worker.launch.device] < more:
            return False
        free[worker.launch.device] -= more
        worker.memory, worker.full = memory, True
        self._stale[worker.server] = None
        return True

    def stop(self, group: Group, now: float) -> Iterator[StopWorker]:
        """Yield an order to stop each worker of a group."""
        group.phase = GroupPhase.LEAVING
        for worker in group.workers:
            if not worker.stopping and worker.name in self.workers:
                worker.stopping = True
                self._release_link(worker, now)
                yield StopWorker(worker.name)

    def remove_worker(self, worker: GroupWorker, now: float) -> None:
        """Release the memory and bandwidth of a worker whose process has exited."""
        if self.workers.pop(worker.name, None) is None or worker.server not in self.servers:
            return
        self._release_link(worker, now)
        self.servers[worker.server].free[worker.launch.device] += worker.memory
        self._stale[worker.server] = None

    def lose(self, server: str) -> list[GroupWorker]:
        """Remove a lost server, and return the workers that it had."""
        self.servers.pop(server, None)
        self._stale[server] = None
        self.hops = {pair: seconds for pair, seconds in self.hops.items() if server not in pair}
        lost = [worker for worker in self.workers.values() if worker.server == server]
        for worker in lost:
            del self.workers[worker.name]
        return lost

    def _release_link(self, worker: GroupWorker, now: float) -> None:
        server = self.servers.get(worker.server)
        if server is not None:
            self._reservations(server).finished(worker.name, now)


def _find_fetch_budget_s(model: FleetModel, scheme: Scheme, place: Place, load: float) -> float:
    """Return the seconds within which the weights of a rank must be fetched: the paper's D minus the current time.

    The load time is subtracted unless loading overlaps with the fetch.
    """
    if not scheme.meets or model.ttft_s == inf:
        return inf
    term_s = model.ttft_s - (scheme.ttft_s - scheme.term_s)
    return term_s if model.costs.overlap is Overlap.FULL else term_s - sizing.fetch_s(place.size, load)
