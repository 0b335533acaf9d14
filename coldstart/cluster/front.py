"""The fleet's gateway: a request for a model that serves goes to it by the routes known here, and the controller is told after.

Invariant: what is asked of a model that serves is never kept waiting for the controller, nor for Ray; only a request that needs
a start is. The controller hears in order of each request's coming, going and end, or, where it was away, of all at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from uuid import uuid4

import coldstart
from coldstart.cluster import wire
from coldstart.cluster.metrics import FleetMetrics
from coldstart.cluster.moves import Moves
from coldstart.cluster.replicas import CONNECT_S, FleetReplica, FleetTicket
from coldstart.cluster.status import SCHEMA_VERSION
from coldstart.gateway.log import Log
from coldstart.gateway.tickets import AdmissionRefused, Ticket, unknown
from coldstart.gateway.upstream import NothingSent, Replica
from coldstart.host.launches import Catalogue, Route
from coldstart.host.status import HostFacts

SUSPECT_S = 1.0
TRIES, TRIES_UNSENT = 4, 16
AGAIN_S, AGAIN_MOST_S = 0.1, 1.0
AWAY_S = 0.25


class ControllerAway(Exception):
    """Nobody answers for the controller."""


class ControllerLink(Protocol):
    """The way to the controller."""

    async def call(self, method: str, *args: Any) -> Any:
        """Raises ControllerAway."""


class FleetFront:
    """One gateway of one fleet."""

    resumes = True

    def __init__(
        self, link: ControllerLink, *, log: Log | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.link, self.log, self.clock = link, log or Log(quiet=True), clock
        self.name, self.incarnation = uuid4().hex, ""
        self.catalogue = Catalogue(())
        self.facts = HostFacts(pid=os.getpid(), version=coldstart.__version__, began=clock())
        self.metrics = FleetMetrics(self)
        self.targets: dict[str, FleetReplica] = {}
        self.connected = False
        self.total = self.again_count = self.resumed_count = 0
        self.moves = Moves(self)
        self.controlled: dict[str, Any] = {}
        self._tickets: dict[str, FleetTicket] = {}
        self._leaving: dict[str, FleetReplica] = {}
        self._number, self._after = 0, 0
        self._happened: list[list[Any]] = []
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # Requests.

    def enter(self, asked: str | None) -> Ticket:
        """As Front."""
        if self.facts.stopping:
            raise self._counted(AdmissionRefused(503, "the gateway is stopping", 5.0))
        route = self.catalogue.route(asked)
        if route is None:
            if not self.incarnation:
                raise self._counted(AdmissionRefused(503, "the fleet's controller is not there yet", 1.0))
            raise self._counted(unknown(asked))
        self.total += 1
        facts = self.facts.of(route.model)
        facts.requests += 1
        ticket = self._enter(route, 0)
        facts.hits += ticket.hit
        return ticket

    def _enter(self, route: Route, tries: int) -> FleetTicket:
        self._number += 1
        number = f"{self.name}/{self._number}"
        future: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        ticket = self._tickets[number] = FleetTicket(number, route, self.clock(), future, tries=tries)
        if (target := self._free(route.model)) is not None:
            ticket.hit = True
            self._granted(ticket, target)
            self.happened("routed", number, route.model, target.group)
        else:
            self.happened("arrived", number, route.model)
        return ticket

    def _free(self, model: str) -> FleetReplica | None:
        """The first group with room, as the controller would choose; any, while nobody could start another one."""
        now = self.clock()
        known = [t for t in self.targets.values() if t.name == model and t.suspect_until <= now]
        first = next((target for target in known if target.busy < target.capacity), None)
        if first is None and known and not self.connected:
            return min(known, key=lambda target: target.busy)
        return first

    def _granted(self, ticket: FleetTicket, target: FleetReplica) -> None:
        ticket.target, ticket.dispatched = target, self.clock()
        target.busy += 1
        if not ticket.hit or (target.tail is not None and not target.tail.done()):
            ticket.line_up(target)
        ticket.granted.set_result(target)

    def leave(self, ticket: Ticket) -> None:
        """As Front."""
        known = self._tickets.pop(ticket.number, None)
        if known is None:
            return
        self.happened("ended", ticket.number)
        self.moves.over(known)
        if known.target is not None:
            self.freed(known.target)

    def freed(self, target: FleetReplica) -> None:
        """One request less is there."""
        target.busy -= 1
        self._let_go(target)

    def has(self, ticket: FleetTicket) -> bool:
        """Whether that request is still here, under its number."""
        return self._tickets.get(ticket.number) is ticket

    async def again(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """As Front: somewhere else, or where the controller starts another group."""
        assert isinstance(ticket, FleetTicket) and isinstance(replica, FleetReplica)
        if self.moves.rolled_back(ticket, str(error)):
            return ticket
        replica.suspect_until = self.clock() + SUSPECT_S
        # What was never sent does no harm elsewhere; what was may be why its server died.
        most = TRIES_UNSENT if isinstance(error, NothingSent) else TRIES
        if ticket.tries >= most or self.facts.stopping:
            return None
        ticket.passed_on()
        self.leave(ticket)
        self.again_count += 1
        begun = len(ticket.stream.tokens) if ticket.stream is not None else 0
        self.resumed_count += begun > 0
        self.log.say(
            "again", model=ticket.route.model, group=replica.group, tries=ticket.tries + 1, tokens=begun
        )
        if self._free(ticket.route.model) is None:
            # The controller hears of the end in a moment; before that it would send it there again.
            await asyncio.sleep(min(AGAIN_MOST_S, AGAIN_S * 2**ticket.tries))
        return self._enter(ticket.route, ticket.tries + 1)

    def state(self, model: str) -> str:
        """As Front."""
        return "starting" if self.connected else "the controller is away"

    def _counted(self, refused: AdmissionRefused) -> AdmissionRefused:
        self.facts.refused[refused.status] += 1
        return refused

    # The controller.

    def begin(self) -> None:
        """Find the controller, and stay in touch."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pull()), loop.create_task(self._report())]

    def happened(self, *what: Any) -> None:
        """The controller is to hear of it, after what happened before."""
        self._happened.append(list(what))
        self._news.set()

    async def _report(self) -> None:
        """Send what happened, in order; what could not be sent is told by attaching."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not self.connected:
                await asyncio.sleep(AWAY_S)
                self._news.set()
                continue
            batch, self._happened = self._happened, []
            if not batch:
                continue
            try:
                answer = await self.link.call("report", self.name, self.incarnation, batch)
            except ControllerAway:
                self._alone()
                continue
            if "attach" in answer:
                self._alone()

    async def _pull(self) -> None:
        while True:
            try:
                if not self.connected:
                    await self._attach()
                answer = await self.link.call("pull", self.name, self.incarnation, self._after)
            except ControllerAway:
                self._alone()
                await asyncio.sleep(AWAY_S)
                continue
            if "attach" in answer:
                self._alone()
                continue
            try:
                self._take(answer)
            except Exception as error:  # noqa: BLE001 - what was answered is no good; who serves goes on serving
                self.log.say("internal error", reason=f"{type(error).__name__}: {error}")
                self._alone()
                await asyncio.sleep(AWAY_S)

    def _alone(self) -> None:
        """The controller is away: what waits for it, and need not, does so no longer."""
        if self.connected:
            self.log.say("controller away")
        self.connected = False
        for ticket in self._tickets.values():
            if not ticket.granted.done() and (target := self._free(ticket.route.model)) is not None:
                self._granted(ticket, target)

    async def _attach(self) -> None:
        """Tell all there is: what happened before is in it."""
        self._happened = []
        open_ = [
            [one.number, one.route.model, one.target.group if one.target else ""]
            for one in self._tickets.values()
        ]
        groups = [*self.targets, *self._leaving]
        answer = await self.link.call("attach", self.name, groups, open_)
        if answer["incarnation"] != self.incarnation:
            self.incarnation, self._after = answer["incarnation"], 0
        self.connected = True
        self.log.say("controller found", incarnation=self.incarnation, requests=len(open_))

    def _take(self, answer: Mapping[str, Any]) -> None:
        if "routes" in answer:
            self._routed(answer["routes"])
            self.catalogue = Catalogue(wire.thing(one) for one in answer["models"])
        for number, order in answer["orders"]:
            self._after = max(self._after, number)
            self._ordered(order)

    def _ordered(self, order: list[Any]) -> None:
        what, request, *given = order
        ticket = self._tickets.get(request)
        if what == "move":
            if ticket is not None:
                self.moves.order(ticket, self.targets.get(given[0]))
            return
        if ticket is None or ticket.granted.done():
            return
        if what == "refuse":
            del self._tickets[request]
            ticket.granted.set_exception(self._counted(AdmissionRefused(*given)))
            ticket.granted.exception()  # its client may be gone, and nobody look at it
        elif (target := self.targets.get(given[0])) is not None:
            self._granted(ticket, target)
        else:
            # That group went while the order came.
            self._renew(ticket)

    def _renew(self, ticket: FleetTicket) -> None:
        """The same request as a new one of the controller's."""
        self.happened("ended", ticket.number)
        del self._tickets[ticket.number]
        self._number += 1
        ticket.number = f"{self.name}/{self._number}"
        self._tickets[ticket.number] = ticket
        self.happened("arrived", ticket.number, ticket.route.model)

    def _routed(self, routes: list[Mapping[str, Any]]) -> None:
        now = {str(route["group"]): route for route in routes}
        for name in [name for name in self.targets if name not in now]:
            target = self.targets.pop(name)
            target.withdrawn = True
            self._leaving[name] = target
            self._let_go(target)
        for name, route in now.items():
            if name not in self.targets:
                self.targets[name] = FleetReplica(route)
            self.targets[name].capacity = int(route["capacity"])

    def _let_go(self, target: FleetReplica) -> None:
        """Nothing of ours is there, and nothing will be."""
        if target.withdrawn and not target.busy and self._leaving.pop(target.group, None) is not None:
            self.happened("released", target.group)
            target.upstream.close()

    # All of it.

    def status(self) -> Mapping[str, object]:
        """The gateway's part of the status; servers and models are the controller's."""
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
            },
            "controller": None,
            "servers": [],
            "models": [],
            **self.controlled,
            **({} if self.connected else {"controller": None}),
        }

    async def refreshed(self) -> Mapping[str, object]:
        """The status with what the controller says now; with what it said last, while it is away."""
        if self.connected:
            try:
                self.controlled = await asyncio.wait_for(self.link.call("status"), CONNECT_S)
            except (ControllerAway, TimeoutError):
                self._alone()
        return self.status()

    def load(self) -> Iterator[tuple[str, int, int]]:
        """Of each deployed model: requests that wait, and that are being answered."""
        waiting: Counter[str] = Counter()
        busy: Counter[str] = Counter()
        for one in self._tickets.values():
            (busy if one.granted.done() else waiting)[one.route.model] += 1
        return ((name, waiting[name], busy[name]) for name in self.catalogue.launches)

    def drain(self) -> None:
        """Take nothing new, and refuse what waits."""
        self.facts.stopping = True
        for ticket in list(self._tickets.values()):
            if not ticket.granted.done():
                ticket.granted.set_exception(AdmissionRefused(503, "the gateway is stopping", 5.0))
                ticket.granted.exception()

    async def close(self) -> None:
        """Leave the controller alone."""
        self.moves.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for target in (*self.targets.values(), *self._leaving.values()):
            target.upstream.close()
