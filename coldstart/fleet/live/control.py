"""Gateway and controller of a fleet in one process: it admits requests and executes the actions of the fleet's core.

Invariants: the core receives exactly one arrival event and one end event for each request. Each action of the core leads to
one event: a launch ends with ready or dead ranks, a stop with WorkerEnded, and a move with StreamMoved unless the request
ends first. All code runs on one event loop, so the core processes one event at a time. This module does not need Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import Any
from urllib.parse import urlsplit

from coldstart.errors import UsageError
from coldstart.fleet import events
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event, LaunchRank
from coldstart.fleet.groups import GroupPhase
from coldstart.fleet.live.orders import Node, NodeLostError, NodeReport, RankUp
from coldstart.fleet.live.state import FleetState, ModelDeployment
from coldstart.fleet.live.status import METRIC_PREFIX, METRICS, SCHEMA_VERSION, build_status
from coldstart.fleet.live.workers import Workers
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.host.launches import Catalogue
from coldstart.host.live.log import BackgroundTasks, Log
from coldstart.host.live.metrics import Metrics
from coldstart.host.live.moves import Moves
from coldstart.host.live.request_router import AdmissionRefusedError, RequestRouter, Ticket
from coldstart.host.live.upstream import NothingSentError, Replica, Upstream
from coldstart.host.status import Progress

MAX_TRIES, MAX_UNSENT_TRIES = 4, 16
# In a data center, a slower connection means that the server is down.
CONNECT_TIMEOUT_S = 2.5


class FleetReplica(Replica):
    """A group that serves requests. `up` describes the worker that receives its requests."""

    def __init__(self, group: str, model: str, up: RankUp) -> None:
        url = urlsplit(up.url)
        place = str(url.hostname), url.port or 80
        super().__init__(model, Upstream(place, connect_s=CONNECT_TIMEOUT_S), up.key, up.handover_key)
        self.group, self.mode, self.start_s = group, up.mode, up.start_s


class FleetControl(RequestRouter):
    """Gateway and controller of one fleet."""

    resumes_streams = True
    stopping_reason = "the gateway is stopping"

    def __init__(
        self,
        settings: FleetSettings,
        state: FleetState,
        *,
        clock: Callable[[], float] = time.monotonic,
        log: Log | None = None,
    ) -> None:
        super().__init__(_build_catalogue(state.models), log or Log(quiet=True), clock)
        self.core = FleetCore(settings, models=[one.spec for one in state.models.values()])
        self.state = state
        self.metrics = Metrics(self.status, METRIC_PREFIX, METRICS)
        self.replicas: dict[str, FleetReplica] = {}
        self.readmitted_count = self.resumed_count = 0
        self.tasks = BackgroundTasks(self.log)
        self.workers = Workers(self.core, state, self.emit, self.tasks, self.log)
        self.unusable: dict[str, str] = {}
        self.moves = Moves(self._tickets, self._report_move_end, clock, self.log)
        self._end_move = self.moves.end_move
        self._closed = False

    # Requests

    async def readmit_request(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """Requeue a request after its server failed. Return its new ticket, or None if it has been retried too often.

        Its group receives no requests for a short time. If only the target of a migration failed, return the same ticket,
        whose request continues at its current group.
        """
        assert isinstance(replica, FleetReplica)
        if self.moves.roll_back(ticket, str(error)):
            return ticket
        self.emit(events.GroupSuspected(replica.group))
        # A request that was sent may have crashed its server, so it is retried less often than an unsent request.
        unsent = ticket.unsent_tries + isinstance(error, NothingSentError)
        if ticket.earlier_tries + 1 - unsent > MAX_TRIES or unsent > MAX_UNSENT_TRIES or self.facts.stopping:
            return None
        self.end_request(ticket)
        self.readmitted_count += 1
        generated = len(ticket.continuation.tokens) if ticket.continuation is not None else 0
        self.resumed_count += generated > 0
        tries, reason = ticket.earlier_tries + 1, str(error) or type(error).__name__
        at: dict[str, Any] = {"model": replica.name, "group": replica.group, "made": generated}
        self.log.write("again", number=ticket.ticket_id, tries=tries, **at, reason=reason)
        counts = {"earlier_tries": tries, "unsent_tries": unsent}
        return self._admit(ticket.destination, is_client_request=False, **counts)

    def get_start_progress(self, model: str) -> Progress:
        """Return the start progress of a model, which is sent to waiting clients."""
        return Progress(model, "starting")

    def _report_move_end(self, request: str, moved: bool) -> None:
        self.emit(events.StreamMoved(request, moved))

    # Decisions

    def emit(self, event: Event) -> None:
        """Send an event to the core and execute the resulting actions."""
        if self._closed:
            return
        actions = self.core.handle(event, self.clock())
        if not isinstance(event, (events.RequestArrived, events.RequestEnded)):
            self._update_replicas()
        launches = (action for action in actions if isinstance(action, LaunchRank))
        for _, ranks in groupby(launches, key=lambda rank: rank.group):
            self.workers.launch([*ranks])
        for action in actions:
            self._execute(action)
        self._set_timer(self.core.deadline())

    def _update_replicas(self) -> None:
        """Add groups that have started to serve. Remove groups that have ended, and close their remaining connections."""
        groups = self.core.groups
        for name in self.replicas.keys() - groups.keys():
            self.replicas.pop(name).upstream.close()
        for group in groups.values():
            if group.phase is not GroupPhase.SERVING or group.name in self.replicas:
                continue
            if (up := self.workers.find_first_rank(group)) is not None:
                self.replicas[group.name] = FleetReplica(group.name, group.model, up)

    def _execute(self, action: Action) -> None:
        match action:
            case events.DispatchRequest(request, group):
                self._dispatch(request, self.replicas.get(group))
            case events.MoveStream(request, _, group):
                ticket, replica = self._tickets.get(request), self.replicas.get(group)
                if ticket is not None and replica is not None:
                    self.moves.schedule_move(ticket, replica)
                else:
                    asyncio.get_running_loop().call_soon(self._report_move_end, request, False)
            case events.RejectRequest(request, status, reason, retry_after_s):
                self._refuse(request, AdmissionRefusedError(status, reason, retry_after_s))
            case events.StopWorker(worker):
                self.workers.stop(worker)
            case events.SetFetchRate(worker, rate):
                self.workers.set_fetch_rate(worker, rate)

    # Servers

    def add_server(self, spec: ServerSpec, node: Node) -> None:
        """Add the server `spec`, which runs no workers and is called through `node`."""
        self.unusable.pop(spec.name, None)
        self.log.write("server joined", server=spec.name)
        self.workers.nodes[spec.name] = node
        self.emit(events.ServerJoined(spec))
        if spec.name in self.state.drained:
            self.emit(events.ServerDrained(spec.name))
        self._measure_network(spec.name)

    async def _time_hops(self, server: str) -> None:
        """Measure the network latency between a server and the servers that joined earlier."""
        nodes = self.workers.nodes
        names = list(nodes)
        before = names[: names.index(server)] if server in nodes else []
        places = {other: place for other in before if (place := nodes[other].place) is not None}
        if not places:
            return
        with suppress(NodeLostError, KeyError):  # the loss of the server is reported separately
            found = await nodes[server].call("time_hops", list(places.values()))
            seconds = {other: took for other, took in zip(places, found, strict=True) if took is not None}
            self.emit(events.HopsMeasured(server, seconds))

    def mark_unusable(self, server: str, reason: str) -> None:
        """Treat a server whose node is running as lost, because it cannot be used. The log and the status show `reason`."""
        if self.unusable.get(server) != reason:
            self.log.write("server unusable", server=server, reason=reason)
        self.lose_server(server)
        self.unusable[server] = reason

    def lose_server(self, server: str) -> None:
        """Remove a lost server and report its loss, and that of all its workers, to the core."""
        self.unusable.pop(server, None)
        if not self.workers.remove_server(server):
            return
        self.log.write("server lost", server=server)
        self.emit(events.ServerLost(server))

    def rebuild(self, found: Iterable[tuple[ServerSpec, Node, NodeReport]]) -> None:
        """Adopt the servers and workers that an earlier gateway left running. Call this once, before any other method."""
        servers: list[ServerSpec] = []
        ranks: list[events.FoundRank] = []
        for spec, node, report in found:
            self.workers.adopt(spec.name, node, report)
            servers.append(spec)
            ranks += (rank for rank, _ in report.workers)
        self.log.write("rebuilt", servers=[spec.name for spec in servers], workers=len(ranks))
        self.emit(events.FleetRecovered(tuple(servers), tuple(ranks), tuple(sorted(self.state.drained))))
        for spec in servers:
            self._measure_network(spec.name)

    def _measure_network(self, server: str) -> None:
        """Send the saved link speed of a server to the core, and measure the latency to other servers."""
        if (known := self.state.links.get(server)) is not None:
            self.emit(events.LinkMeasured(server, known))
        self.tasks.spawn(self._time_hops(server))

    # Operators

    def deploy(self, deployment: ModelDeployment) -> None:
        """Deploy a model, or change its launch arguments or limits.

        Servers that were started with other arguments stop once their running requests have finished.

        Raises:
            UsageError: Another model already uses the name.
            OSError: The state file cannot be written.
        """
        name = deployment.spec.name
        before = self.state.models.get(name)
        same = before is not None and before.launch.server_identity == deployment.launch.server_identity
        if before is not None and same:
            known = {**before.spec.joins, **deployment.spec.joins}
            deployment = replace(deployment, spec=replace(deployment.spec, joins=known))
        self._replace_models({**self.state.models, name: deployment})
        if before is not None and not same:
            self.emit(events.ModelRemoved(name))
        self.emit(events.ModelDeployed(deployment.spec))

    def scale(self, model: str, least: int, most: int) -> None:
        """Set the minimum and maximum number of workers of a model.

        Raises UsageError if the model is unknown or a limit is invalid, and OSError if the state file cannot be written.
        """
        known = self._get_deployment(model)
        self.deploy(replace(known, spec=replace(known.spec, least=least, most=most)))

    def remove(self, model: str) -> None:
        """Remove a model. Raises UsageError if it is not deployed, and OSError if the state file cannot be written."""
        self._get_deployment(model)
        self._replace_models({name: one for name, one in self.state.models.items() if name != model})
        self.emit(events.ModelRemoved(model))

    def _replace_models(self, models: Mapping[str, ModelDeployment]) -> None:
        catalogue = _build_catalogue(models)
        self.state.replace_models(models)
        self.catalogue = catalogue

    def drain(self, server: str) -> None:
        """Start no new workers on a server, migrate its streams to other servers, and record the drain in the state file.

        Raises UsageError if the server is unknown, and OSError if the state file cannot be written.
        """
        if server not in self.workers.nodes:
            raise UsageError(f"the fleet has no server {server}", hint="run `coldstart fleet status`")
        self.state.drain(server)
        streams = frozenset(one.ticket_id for one in self._tickets.values() if one.continuation is not None)
        self.emit(events.ServerDrained(server, streams))

    def _get_deployment(self, name: str) -> ModelDeployment:
        if name not in self.state.models:
            raise UsageError(f"model {name} is not deployed", hint="run `coldstart fleet status`")
        return self.state.models[name]

    def status(self) -> Mapping[str, Any]:
        """Return the JSON document that `coldstart fleet status` prints."""
        in_flight = Counter(one.destination.model for one in self._tickets.values() if one.granted.done())
        return {
            "schema_version": SCHEMA_VERSION,
            "gateway": {
                "url": self.facts.url,
                "pid": self.facts.pid,
                "version": self.facts.version,
                "uptime_s": self.clock() - self.facts.began,
                "starts": self.core.starts,
                "requests": sum(one.requests for one in self.facts.models.values()),
                "in_flight": in_flight.total(),
                "held": len(self._tickets) - in_flight.total(),
                "refused": {str(code): count for code, count in sorted(self.facts.refused.items())},
                "readmitted": self.readmitted_count,
                "resumed": self.resumed_count,
                "migrated": self.moves.moved_count,
                "migrated_with_kv": self.moves.moved_with_kv,
                "migrations_failed": self.moves.failed_count,
                "client_keys_error": self.facts.client_keys_error,
            },
            "unusable": dict(self.unusable),
            **build_status(self.core, self.workers, self.state.links, in_flight),
        }

    # End

    def close(self) -> None:
        """Close all connections, cancel the timer and all tasks, and ignore later events."""
        self._closed = True
        self.moves.close()
        self.tasks.cancel()
        self._set_timer(inf)
        for replica in self.replicas.values():
            replica.upstream.close()


def _build_catalogue(models: Mapping[str, ModelDeployment]) -> Catalogue:
    return Catalogue(one.launch for one in models.values())
