"""Gateway of the fleet: sends requests to groups by the routes that it knows, and reports them to the controller afterwards.

Invariant: a request for a model that is ready never waits for the controller or for Ray; only a request that needs a
start does. The controller receives the arrival, route and end of each request in order; after an outage, it receives
all open requests at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import coldstart
from coldstart.fleet.live.contact import Contact, ControllerAwayError, ControllerConnection
from coldstart.fleet.live.messages import (
    GetStatus,
    GroupReleased,
    GroupRoute,
    MoveEnded,
    MoveRequest,
    OpenRequest,
    RefuseRequest,
    RequestArrived,
    RequestEnded,
    RequestOrder,
    RequestRouted,
)
from coldstart.fleet.live.metrics import PREFIX, FleetCollector, GatewayFigures, ModelLoad
from coldstart.fleet.live.moves import Moves
from coldstart.fleet.live.replicas import CONNECT_S, FleetReplica, FleetTicket
from coldstart.fleet.live.status import SCHEMA_VERSION
from coldstart.fleet.live.targets import Targets
from coldstart.host.launches import Catalogue, Launch, Route
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import Metrics
from coldstart.host.live.tickets import AdmissionRefusedError, Ticket, unknown
from coldstart.host.live.upstream import NothingSentError, Replica
from coldstart.host.progress import Progress
from coldstart.host.status import HostFacts

SUSPECT_S = 1.0
TRIES, TRIES_UNSENT = 4, 16
AGAIN_S, AGAIN_MOST_S = 0.1, 1.0


class FleetFront:
    """One gateway of one fleet."""

    resumes: bool = True

    def __init__(
        self,
        link: ControllerConnection,
        *,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log, self.clock = log or Log(quiet=True), clock
        self.contact = Contact(link, self, self.log)
        self.catalogue = Catalogue(())
        self.facts = HostFacts(pid=os.getpid(), version=coldstart.__version__, began=clock())
        self.metrics = Metrics(FleetCollector(self._figures), PREFIX)
        self.targets = Targets(self._group_released)
        self.total = self.again_count = self.resumed_count = 0
        self.controlled: dict[str, Any] = {}
        self.hung: Mapping[str, int] = {}
        self._tickets: dict[str, FleetTicket] = {}
        self.moves = Moves(self._tickets, self.targets, self._move_ended, self.clock, self.log)
        self._number = 0

    def enter(self, asked: str | None) -> Ticket:
        """Implement Front: admit a request."""
        if self.facts.stopping:
            raise self._counted(AdmissionRefusedError(503, "the gateway is stopping", 5.0))
        route = self.catalogue.route(asked)
        if route is None:
            if not self.contact.incarnation:
                raise self._counted(
                    AdmissionRefusedError(503, "the fleet's controller has not started yet", 1.0)
                )
            raise self._counted(unknown(asked))
        self.total += 1
        facts = self.facts.get_model(route.model)
        facts.requests += 1
        ticket = self._enter(route)
        facts.hits += ticket.hit
        return ticket

    def _enter(self, route: Route, tries: int = 0, unsent: int = 0) -> FleetTicket:
        self._number += 1
        number = f"{self.contact.name}/{self._number}"
        future: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        ticket = FleetTicket(number, route, self.clock(), future, tries=tries, unsent=unsent)
        self._tickets[number] = ticket
        if (target := self._free(route.model)) is not None:
            ticket.hit = True
            self._granted(ticket, target)
            self.contact.emit(RequestRouted(number, route.model, target.group))
        else:
            self.contact.emit(RequestArrived(number, route.model))
        return ticket

    def _free(self, model: str) -> FleetReplica | None:
        """Return a group to send to; a full one only if no controller is available to start another group."""
        return self.targets.find(model, self.clock(), overload=not self.connected)

    def _granted(self, ticket: FleetTicket, target: FleetReplica) -> None:
        ticket.target, ticket.dispatched = target, self.clock()
        target.busy += 1
        if not ticket.hit or (target.tail is not None and not target.tail.done()):
            ticket.line_up(target)
        ticket.granted.set_result(target)

    def leave(self, ticket: Ticket) -> None:
        """Implement Front: remove a request that has ended."""
        known = self._tickets.pop(ticket.number, None)
        if known is None:
            return
        self.contact.emit(RequestEnded(ticket.number))
        self.moves.over(known)
        if known.target is not None:
            self.targets.free(known.target)

    async def readmit(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """Implement Front: admit a request again at another group, or at one that the controller starts."""
        assert isinstance(ticket, FleetTicket) and isinstance(replica, FleetReplica)
        if self.moves.rolled_back(ticket, str(error)):
            return ticket
        replica.suspect_until = self.clock() + SUSPECT_S
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
        if self._free(ticket.route.model) is None:
            # Wait: until the controller learns of the group's end, it would send the request there again.
            await asyncio.sleep(min(AGAIN_MOST_S, AGAIN_S * 2**ticket.tries))
        return self._enter(ticket.route, ticket.tries + 1, unsent)

    def progress(self, model: str) -> Progress:
        """Implement Front: return the progress of the model's start, for a waiting client."""
        return Progress(model, "starting" if self.connected else "the controller cannot be reached")

    def _counted(self, refused: AdmissionRefusedError) -> AdmissionRefusedError:
        self.facts.refused[refused.status] += 1
        return refused

    def begin(self) -> None:
        """Find the controller, and stay in contact."""
        self.contact.begin()

    @property
    def connected(self) -> bool:
        """Return whether the controller answers."""
        return self.contact.connected

    def known(self) -> tuple[tuple[str, ...], tuple[OpenRequest, ...]]:
        """Implement Gatekeeper: return the groups that can be sent to, and all open requests."""
        requests = (
            OpenRequest(one.number, one.route.model, one.target.group if one.target else None)
            for one in self._tickets.values()
        )
        return tuple(self.targets.names()), tuple(requests)

    def alone(self) -> None:
        """Implement Gatekeeper: continue without the controller, and grant waiting requests that a known group can answer."""
        for ticket in self._tickets.values():
            if not ticket.granted.done() and (target := self._free(ticket.route.model)) is not None:
                self._granted(ticket, target)

    def obey(self, order: RequestOrder) -> None:
        """Implement Gatekeeper: carry out an order of the controller."""
        ticket = self._tickets.get(order.request)
        if ticket is None:
            return
        if isinstance(order, MoveRequest):
            self.moves.order(ticket, self.targets.routed.get(order.group))
        elif ticket.granted.done():
            return
        elif isinstance(order, RefuseRequest):
            self._refuse(ticket, order)
        elif (target := self.targets.routed.get(order.group)) is not None:
            self._granted(ticket, target)
        else:
            # The group's route was withdrawn while the order was on its way.
            self._renew(ticket)

    def _refuse(self, ticket: FleetTicket, order: RefuseRequest) -> None:
        del self._tickets[ticket.number]
        refused = AdmissionRefusedError(order.status, order.reason, order.retry_s)
        ticket.granted.set_exception(self._counted(refused))
        ticket.granted.exception()  # its client may be disconnected; otherwise asyncio logs it

    def _renew(self, ticket: FleetTicket) -> None:
        """Send the same request to the controller again under a new number."""
        self.contact.emit(RequestEnded(ticket.number))
        del self._tickets[ticket.number]
        self._number += 1
        ticket.number = f"{self.contact.name}/{self._number}"
        self._tickets[ticket.number] = ticket
        self.contact.emit(RequestArrived(ticket.number, ticket.route.model))

    def update(
        self, routes: tuple[GroupRoute, ...], launches: tuple[Launch, ...], hung: Mapping[str, int]
    ) -> None:
        """Implement Gatekeeper: replace the routes, the launches and the numbers of hung servers."""
        self.targets.update(routes)
        self.catalogue, self.hung = Catalogue(launches), hung

    def _group_released(self, group: str) -> None:
        self.contact.emit(GroupReleased(group))

    def _move_ended(self, request: str, moved: bool) -> None:
        self.contact.emit(MoveEnded(request, moved))

    def status(self) -> Mapping[str, object]:
        """Return the gateway's part of the status; the controller supplies servers and models."""
        held = sum(not one.granted.done() for one in self._tickets.values())
        return {
            "schema_version": SCHEMA_VERSION,
            "gateway": {
                "url": self.facts.url,
                "pid": self.facts.pid,
                "version": self.facts.version,
                "uptime_s": self.clock() - self.facts.began,
                "requests": self.total,
                "in_flight": len(self._tickets) - held,
                "held": held,
                "refused": {str(code): count for code, count in sorted(self.facts.refused.items())},
                "again": self.again_count,
                "resumed": self.resumed_count,
                "moved": self.moves.count,
                "client_keys_error": self.facts.client_keys_error,
            },
            "controller": None,
            "servers": [],
            "unusable": {},
            "models": [],
            **self.controlled,
            **({} if self.connected else {"controller": None}),
        }

    async def refreshed(self) -> Mapping[str, object]:
        """Return the status with the controller's current part, or its last part if it cannot be reached."""
        if self.connected:
            try:
                self.controlled = await asyncio.wait_for(self.contact.connection.call(GetStatus()), CONNECT_S)
            except (ControllerAwayError, TimeoutError):
                self.contact.away()
        return self.status()

    def _figures(self) -> GatewayFigures:
        return GatewayFigures(
            self.total,
            self.again_count,
            self.resumed_count,
            self.moves.count,
            self.connected,
            self.facts.refused,
            tuple(self._loads()),
        )

    def _loads(self) -> Iterator[ModelLoad]:
        open_ = Counter((one.route.model, one.granted.done()) for one in self._tickets.values())
        groups = Counter(target.name for target in self.targets.routed.values())
        for name in self.catalogue.launches:
            yield ModelLoad(name, open_[name, False], open_[name, True], groups[name], self.hung.get(name, 0))

    def drain(self) -> None:
        """Reject new and waiting requests."""
        self.facts.stopping = True
        for ticket in list(self._tickets.values()):
            if not ticket.granted.done():
                ticket.granted.set_exception(AdmissionRefusedError(503, "the gateway is stopping", 5.0))
                ticket.granted.exception()

    async def close(self) -> None:
        """Close the connections and end the contact with the controller, which continues to run."""
        self.moves.close()
        await self.contact.close()
        self.targets.close()
