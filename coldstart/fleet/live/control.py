"""Gateway and controller of a fleet, in one process: admits requests, and carries out the decisions of the fleet's core.

Invariants: the core receives one arrival and one end for each request. Every order of the core results in exactly one
event: a launch in ready or dead ranks, a stop in Stopped, a release in Released, a move in Moved unless the request
ends first. All code runs on one event loop, so the core processes one event at a time. Ray is neither needed nor
imported here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import coldstart
from coldstart.errors import UsageError
from coldstart.fleet import events
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event, LaunchRank
from coldstart.fleet.groups import GroupPhase
from coldstart.fleet.live.metrics import PREFIX, FleetCollector, GatewayFigures, ModelLoad
from coldstart.fleet.live.moves import Moves
from coldstart.fleet.live.orders import Node, NodeReport
from coldstart.fleet.live.replicas import FleetReplica, FleetTicket
from coldstart.fleet.live.state import FleetState, Measurements, ModelDeployment
from coldstart.fleet.live.status import SCHEMA_VERSION, fleet_status
from coldstart.fleet.live.workers import Workers
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.host.launches import Catalogue, Route
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import Metrics
from coldstart.host.live.tasks import Tasks
from coldstart.host.live.tickets import AdmissionRefusedError, Ticket, unknown
from coldstart.host.live.upstream import NothingSentError, Replica
from coldstart.host.progress import Progress
from coldstart.host.status import HostFacts

TRIES, TRIES_UNSENT = 4, 16
Recorder = Callable[[float, Event, list[Action]], None]


class FleetControl:
    """Control of one fleet. `record` receives every event and the resulting actions."""

    resumes: bool = True

    def __init__(
        self,
        settings: FleetSettings,
        state: FleetState,
        *,
        clock: Callable[[], float] = time.monotonic,
        log: Log | None = None,
        record: Recorder | None = None,
    ) -> None:
        self.core = FleetCore(settings, models=[one.spec for one in state.models.values()])
        self.state, self.clock, self.log, self.record = state, clock, log or Log(quiet=True), record
        self.catalogue = self._list_launches(state.models)
        self.facts = HostFacts(pid=os.getpid(), version=coldstart.__version__, began=clock())
        self.metrics = Metrics(FleetCollector(self._figures), PREFIX)
        self.replicas: dict[str, FleetReplica] = {}
        self.total = self.again_count = self.resumed_count = 0
        self.tasks = Tasks(self.log)
        self.measurements = Measurements(state, self.core.models, self.tell, self.log)
        self.workers = Workers(self.core, state, self.measurements, self.tell, self.tasks, self.log)
        self.unusable: dict[str, str] = {}
        self._tickets: dict[str, FleetTicket] = {}
        self.moves = Moves(self._tickets, self._move_ended, clock, self.log)
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Requests

    def enter(self, asked: str | None) -> Ticket:
        """Implement Front: admit a request."""
        if self.facts.stopping:
            raise self._counted(AdmissionRefusedError(503, "the gateway is stopping", 5.0))
        route = self.catalogue.route(asked)
        if route is None:
            raise self._counted(unknown(asked))
        self.total += 1
        facts = self.facts.get_model(route.model)
        facts.requests += 1
        ticket = self._admit(route)
        facts.hits += ticket.hit
        return ticket

    def _admit(self, route: Route, tries: int = 0, unsent: int = 0) -> FleetTicket:
        self._number += 1
        number, future = str(self._number), asyncio.get_running_loop().create_future()
        ticket = FleetTicket(number, route, self.clock(), future, hit=True, tries=tries, unsent=unsent)
        self._tickets[number] = ticket
        self.tell(events.Arrived(number, route.model))
        ticket.hit = ticket.target is not None
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Implement Front: remove a request that has ended."""
        known = self._tickets.pop(ticket.number, None)
        if known is not None:
            self.moves.over(known)
            self.tell(events.Ended(ticket.number))

    async def readmit(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """Implement Front: admit a request again; for a moment its group gets no request."""
        assert isinstance(ticket, FleetTicket) and isinstance(replica, FleetReplica)
        if self.moves.rolled_back(ticket, str(error)):
            return ticket
        self.tell(events.Suspected(replica.group))
        # A request that was never sent is harmless to other servers; one that was sent may have killed its
        # server.
        unsent = ticket.unsent + isinstance(error, NothingSentError)
        if ticket.tries + 1 - unsent > TRIES or unsent > TRIES_UNSENT or self.facts.stopping:
            return None
        ticket.passed_on()
        self.leave(ticket)
        self.again_count += 1
        begun = len(ticket.stream.tokens) if ticket.stream is not None else 0
        self.resumed_count += begun > 0
        said: dict[str, Any] = {"model": ticket.route.model, "group": replica.group, "made": begun}
        reason = str(error) or type(error).__name__
        self.log.say("again", number=ticket.number, tries=ticket.tries + 1, **said, reason=reason)
        return self._admit(ticket.route, ticket.tries + 1, unsent)

    def progress(self, model: str) -> Progress:
        """Implement Front: return the progress of the model's start, for a waiting client."""
        return Progress(model, "starting")

    def _counted(self, refused: AdmissionRefusedError) -> AdmissionRefusedError:
        self.facts.refused[refused.status] += 1
        return refused

    def _send(self, request: str, group: str) -> None:
        """Grant a waiting request its group.

        A request whose group was lost still has it here until its connection breaks, and is then admitted again.
        """
        ticket, replica = self._tickets.get(request), self.replicas.get(group)
        if ticket is None or replica is None or ticket.granted.done():
            return
        ticket.target, ticket.dispatched = replica, self.clock()
        if not ticket.hit or (replica.tail is not None and not replica.tail.done()):
            ticket.line_up(replica)
        ticket.granted.set_result(replica)

    def _refuse(self, refuse: events.Refuse) -> None:
        ticket = self._tickets.get(refuse.request)
        if ticket is not None and not ticket.granted.done():
            del self._tickets[refuse.request]
            ticket.refuse(
                self._counted(AdmissionRefusedError(refuse.status, refuse.reason, refuse.retry_after_s))
            )

    def _move(self, request: str, group: str) -> None:
        ticket, replica = self._tickets.get(request), self.replicas.get(group)
        if ticket is not None and replica is not None:
            self.moves.order(ticket, replica)
        else:
            asyncio.get_running_loop().call_soon(self._move_ended, request, False)

    def _move_ended(self, request: str, moved: bool) -> None:
        self.tell(events.Moved(request, moved))

    # Decisions

    def tell(self, event: Event) -> None:
        """Send an event to the core and carry out the resulting actions."""
        if self._closed:
            return
        now = self.clock()
        actions = self.core.handle(event, now)
        if self.record is not None:
            self.record(now, event, actions)
        if not isinstance(event, (events.Arrived, events.Ended)):
            self._update_replicas()
        ranks: dict[str, list[LaunchRank]] = {}
        for action in actions:
            if isinstance(action, LaunchRank):
                ranks.setdefault(action.group, []).append(action)
            else:
                self._do(action)
        for group in ranks.values():
            self.workers.launch(group)
        self._rearm()

    def _update_replicas(self) -> None:
        """Add the groups that serve. Remove those that have ended, which breaks the connections that they still have."""
        groups, processes = self.core.groups, self.workers.processes
        for name in self.replicas.keys() - groups.keys():
            self.replicas.pop(name).upstream.close()
        for group in groups.values():
            if group.phase is not GroupPhase.SERVING or group.name in self.replicas:
                continue
            if (up := processes.answering(group)) is not None:
                self.replicas[group.name] = FleetReplica(group.name, group.model, up)
            elif group.single:
                # It ended before the other workers of its pipeline held the full model.
                died = events.ProcessDied(group.workers[0].name, group.name, "its engine ended")
                asyncio.get_running_loop().call_soon(self.tell, died)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rearm(self) -> None:
        self._disarm()
        if (due := self.core.deadline()) < inf:
            wait = max(0.0, due - self.clock()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(wait, self.tell, events.Tick())

    def _do(self, action: Action) -> None:
        match action:
            case events.Send(request, group):
                self._send(request, group)
            case events.Refuse():
                self._refuse(action)
            case events.Move(request, _, target):
                self._move(request, target)
            case events.Stop(worker):
                self.workers.stop(worker)
            case events.Release(worker, group):
                self.workers.release(worker, group)
            case events.FetchRest(worker):
                self.workers.load_whole(worker)
            case events.Share(worker, rate):
                self.workers.share(worker, rate)

    # Servers

    def joined(self, spec: ServerSpec, node: Node) -> None:
        """Add a server without workers."""
        self.unusable.pop(spec.name, None)
        self.log.say("server joined", server=spec.name)
        self.workers.processes.nodes[spec.name] = node
        self.tell(events.Joined(spec))
        self.measurements.emit_speed(spec.name)
        if spec.name in self.state.drained:
            self.tell(events.Drained(spec.name))

    def unreached(self, server: str, reason: str) -> None:
        """Record that a server cannot be used though its node is alive: it is lost, and the status shows the reason."""
        if self.unusable.get(server) != reason:
            self.log.say("server unusable", server=server, reason=reason)
        self.lose_server(server)
        self.unusable[server] = reason

    def lose_server(self, server: str) -> None:
        """Record that a server and all its workers were lost."""
        self.unusable.pop(server, None)
        if not self.workers.processes.lose(server):
            return
        self.log.say("server lost", server=server)
        self.tell(events.ServerLost(server))

    def rebuild(self, found: Iterable[tuple[ServerSpec, Node, NodeReport]]) -> None:
        """Rebuild the state from the servers and the workers that outlived an earlier process; called once, before all else."""
        servers: list[ServerSpec] = []
        for spec, node, report in found:
            self.workers.processes.adopt(spec.name, node, report)
            servers.append(spec)
        ranks = self.workers.processes.list_ranks()
        self.log.say("rebuilt", servers=[spec.name for spec in servers], workers=len(ranks))
        self.tell(events.Rebuilt(tuple(servers), ranks, tuple(sorted(self.state.drained))))
        for spec in servers:
            self.measurements.emit_speed(spec.name)

    # Operators

    def deploy(self, deployment: ModelDeployment) -> None:
        """Deploy a model, or replace its launch or limits; servers with outdated arguments stop after their requests.

        Raises:
            UsageError: The name refers to another model.
            OSError: The state cannot be saved.
        """
        name = deployment.spec.name
        before = self.state.models.get(name)
        catalogue = self._list_launches({**self.state.models, name: deployment})
        same = before is not None and before.launch.same_server == deployment.launch.same_server
        if before is not None and same:
            known = {**before.spec.joins, **deployment.spec.joins}
            deployment = replace(deployment, spec=replace(deployment.spec, joins=known))
        self.state.deploy(deployment)
        self.catalogue = catalogue
        if before is not None and not same:
            self.tell(events.Removed(name))
        self.tell(events.Deployed(deployment.spec))

    def scale(self, name: str, least: int, most: int) -> None:
        """Set the minimum and maximum number of workers. Raises UsageError for an unknown model or invalid limits."""
        known = self._known(name)
        self.deploy(replace(known, spec=replace(known.spec, least=least, most=most)))

    def remove(self, name: str) -> None:
        """Remove a model. Raises UsageError if it is not deployed, and OSError."""
        self._known(name)
        self.state.remove(name)
        self.catalogue = self._list_launches(self.state.models)
        self.tell(events.Removed(name))

    def drain(self, server: str) -> None:
        """Drain a server: it accepts no new worker. Raises UsageError for an unknown server, and OSError."""
        if server not in self.workers.processes.nodes:
            raise UsageError(f"the fleet has no server {server}", hint="coldstart fleet status")
        self.state.drain(server)
        self.tell(events.Drained(server))

    def _known(self, name: str) -> ModelDeployment:
        if name not in self.state.models:
            raise UsageError(f"model {name} is not deployed", hint="coldstart fleet status")
        return self.state.models[name]

    def _list_launches(self, models: Mapping[str, ModelDeployment]) -> Catalogue:
        return Catalogue(one.launch for one in models.values())

    def status(self) -> Mapping[str, Any]:
        """Implement Front: return the document of `coldstart fleet status`."""
        held = sum(not one.granted.done() for one in self._tickets.values())
        return {
            "schema_version": SCHEMA_VERSION,
            "gateway": {
                "url": self.facts.url,
                "pid": self.facts.pid,
                "version": self.facts.version,
                "uptime_s": self.clock() - self.facts.began,
                "starts": self.core.starts,
                "requests": self.total,
                "in_flight": len(self._tickets) - held,
                "held": held,
                "refused": {str(code): count for code, count in sorted(self.facts.refused.items())},
                "again": self.again_count,
                "resumed": self.resumed_count,
                "moved": self.moves.count,
                "client_keys_error": self.facts.client_keys_error,
            },
            "unusable": dict(self.unusable),
            **fleet_status(self.core, self.workers.processes, self.state.links),
        }

    def _figures(self) -> GatewayFigures:
        counts = self.total, self.again_count, self.resumed_count, self.moves.count
        return GatewayFigures(*counts, self.facts.refused, tuple(self._loads()))

    def _loads(self) -> Iterator[ModelLoad]:
        open_ = Counter((one.route.model, one.granted.done()) for one in self._tickets.values())
        groups = Counter(replica.name for replica in self.replicas.values())
        for name in self.catalogue.launches:
            yield ModelLoad(
                name, open_[name, False], open_[name, True], groups[name], self.workers.hung[name]
            )

    # End

    def stop(self) -> None:
        """Reject new and waiting requests."""
        self.facts.stopping = True
        for ticket in self._tickets.values():
            ticket.refuse(AdmissionRefusedError(503, "the gateway is stopping", 5.0))

    def close(self) -> None:
        """Close all connections, cancel the timer and all tasks, and ignore every later event."""
        self._closed = True
        self.moves.close()
        self.tasks.cancel()
        self._disarm()
        for replica in self.replicas.values():
            replica.upstream.close()
