"""The live host: the core decides, this carries out.

Invariant: every order of the core is answered by exactly one event, whatever becomes of the process: a start by Started or
Failed, an order to leave by Left. Everything runs on one event loop, so the core is never asked twice at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf

from coldstart.gateway import reload, resumption
from coldstart.gateway.log import Log
from coldstart.gateway.meter import Meter
from coldstart.gateway.record import Record
from coldstart.gateway.residence import Residence
from coldstart.gateway.servers import ModelServer, Servers, StartFailed
from coldstart.gateway.tasks import Tasks
from coldstart.gateway.templates import Templates
from coldstart.gateway.tickets import AdmissionRefused, Ticket, unknown
from coldstart.gateway.upstream import Replica
from coldstart.host import events, status
from coldstart.host.configuration import HostFile
from coldstart.host.core import Core
from coldstart.host.events import Action, Event
from coldstart.host.launches import Launch, Route
from coldstart.host.model_state import State
from coldstart.host.specification import AWAKE, TEMPLATE

STOPPING = "the host is stopping"


class Driver:
    """One host."""

    def __init__(
        self,
        file: HostFile,
        servers: Servers,
        *,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
        meter: Meter | None = None,
        template_bytes: int = 0,
    ) -> None:
        self.core, self.catalogue = Core(file.models, file.settings), file.catalogue
        self.servers, self.log, self.clock = servers, log or Log(quiet=True), clock
        self.meter = meter or Meter()
        self.record = Record(self.log, clock(), self.status)
        self.facts, self.metrics = self.record.facts, self.record.metrics
        self.residences: dict[str, Residence] = {}
        self.templates = Templates(self, template_bytes)
        self._tickets: dict[str, Ticket] = {}
        self._number, self._entering = 0, False
        self._timer: asyncio.TimerHandle | None = None
        self.tasks = Tasks(self.log)
        self.record.described(file)

    # Requests.

    @property
    def resumes(self) -> bool:
        """As Front."""
        return self.core.settings.resume_streams

    def enter(self, asked: str | None) -> Ticket:
        """Take a request in. Raises AdmissionRefused for a name that means no model; all else `granted` tells."""
        if self.facts.stopping:
            raise self._counted(AdmissionRefused(503, STOPPING, 5.0))
        route = self.catalogue.route(asked)
        if route is None:
            raise self._counted(unknown(asked))
        return self._taken(route, 0)

    def _taken(self, route: Route, tries: int) -> Ticket:
        self._number += 1
        future: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        ticket = Ticket(str(self._number), route, self.clock(), future, tries=tries)
        self._tickets[ticket.number] = ticket
        hits, self._entering = self.core.hits, True
        try:
            self.tell(events.Arrived(ticket.number, route.model))
        finally:
            self._entering = False
        ticket.hit = self.core.hits > hits
        self.record.asked(route.model, ticket.hit)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request was answered, or its client went."""
        if self._tickets.pop(ticket.number, None) is not None:
            self.tell(events.Ended(ticket.number))

    async def again(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """A stream that can go on does so once, at the server that its model gets next.

        Whatever had not begun is its client's to repeat: it may be why the server died.
        """
        if not await resumption.possible(self, ticket, replica):
            return None
        self.leave(ticket)
        return self._taken(ticket.route, ticket.tries + 1)

    def state(self, model: str) -> str:
        """In a word, for a client that waits."""
        known = self.core.models.get(model)
        return str(known.state) if known else "gone"

    def _counted(self, refused: AdmissionRefused) -> AdmissionRefused:
        self.facts.refused[refused.status] += 1
        return refused

    def _refuse(self, number: str, refused: AdmissionRefused) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None and not ticket.granted.done():
            ticket.granted.set_exception(self._counted(refused))
            ticket.granted.exception()  # its client may be gone, and nobody look at it

    def _dispatch(self, number: str, model: str) -> None:
        ticket, residence = self._tickets.get(number), self.residences.get(model)
        if ticket is None or ticket.granted.done() or residence is None:
            return
        ticket.dispatched = self.clock()
        if not self._entering or (residence.tail is not None and not residence.tail.done()):
            ticket.line_up(residence)
        ticket.granted.set_result(residence)

    # The core.

    def tell(self, event: Event) -> None:
        """Tell the core, and carry out what it orders."""
        for action in self.core.on(event, self.clock()):
            self._do(action)
        self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.core.deadline()
        if due < inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - self.clock()) + 0.001, self.tell, events.Tick())

    def _do(self, action: Action) -> None:
        match action:
            case events.Dispatch(number, model):
                self._dispatch(number, model)
            case events.Refuse(number, code, reason, after, detail):
                self._refuse(number, AdmissionRefused(code, reason, after, detail))
            case events.Start(model, tier):
                self.tasks.spawn(self._start(model, tier.name))
            case events.Leave(model, tier):
                residence = self.residences.get(model)
                self.tasks.spawn(residence.leave(tier.name) if residence else self._gone(model))
            case events.Abort(model):
                self.log.say("start aborted", model=model, reason=self._late())
                if model in self.residences:
                    self.tasks.spawn(self.residences[model].end(self._late()))
                else:
                    self.templates.abort(model)
            case events.GiveUp():
                self.templates.give_up()

    def _late(self) -> str:
        return f"it was not ready within {self.core.settings.start_deadline_s:g} s"

    # Models.

    async def _start(self, model: str, tier: str) -> None:
        known = self.residences.get(model)
        if known is not None:
            await known.wake(tier)
            return
        launch, began = self.catalogue.launches[model], self.clock()
        self.log.say("start", model=model, tier=tier)
        await self.templates.before(launch)
        server = self._begun(launch, began)
        if server is None:
            return
        residence = self.residences[model] = Residence(self, launch, server, began)
        try:
            await residence.live()
        finally:
            del self.residences[model]
            self.record.ended(model)
        await self._told(model, residence.last_word())

    def _begun(self, launch: Launch, began: float) -> ModelServer | None:
        """A server; where none can be begun, the core hears that."""
        left = self.core.settings.start_deadline_s - (self.clock() - began)
        try:
            if left <= 0 or self.facts.stopping:
                raise StartFailed(STOPPING if self.facts.stopping else self._late())
            return self.servers.begin(launch, left)
        except StartFailed as late:
            reason = str(late)
        except OSError as error:  # no descriptor, no disk, no process
            reason = f"no server can be started: {error.strerror or error}"
        self.start_failed(launch.name, reason, self.clock() - began)
        self.tasks.spawn(self._told(launch.name, events.Failed(launch.name, reason)))
        return None

    async def _told(self, model: str, word: events.Left | events.Failed) -> None:
        """Tell the core how a server ended, once nothing is left that should not be."""
        known = self.core.models.get(model)
        target = known.target if known else None
        if isinstance(word, events.Failed) or target is None or target.name != TEMPLATE:
            await self.templates.drop(model)
        self.tell(word)
        if known and known.state is State.ASLEEP and not self.templates.holds(model):
            # It was to sleep and could not: nothing of it is left.
            self.tell(events.Outdated(model))

    async def _gone(self, model: str) -> None:
        await self.templates.drop(model)
        self.tell(events.Left(model))

    def started(self, residence: Residence, mode: str, seconds: float) -> None:
        """A server is ready, or awake again."""
        name = residence.launch.name
        self.record.started(name, residence.ready, mode, seconds)
        self.tell(events.Started(name, seconds))
        if self.outdated(residence.launch) or self.templates.leaves(residence):
            self.tell(events.Outdated(name))

    def start_failed(self, name: str, reason: str, seconds: float) -> None:
        """A start came to nothing."""
        if not self.facts.stopping:
            self.record.start_failed(name, reason, seconds)

    def measured(self, name: str, memory: int, tier: str = AWAKE) -> None:
        """What a model really holds in that tier."""
        if tier == AWAKE:
            self.facts.of(name).memory_source = "observed"
        self.tell(events.Measured(name, memory, tier))

    def outdated(self, launch: Launch) -> bool:
        """Whether a server started by these words would be started by others now."""
        now = self.catalogue.launches.get(launch.name)
        return now is not None and now.same_server != launch.same_server

    # The whole host.

    def configure(self, file: HostFile) -> None:
        """Take another configuration, between two requests. Raises Usage and changes nothing where it cannot be taken."""
        reload.configure(self, file)

    def unload(self, model: str | None) -> list[str]:
        """Have a model, or all that nobody pinned, finish what they have and stop; those that do."""
        names = (
            [model] if model is not None else [n for n, m in self.core.models.items() if not m.spec.pinned]
        )
        gone = [name for name in names if self.core.models[name].state in (State.READY, State.ASLEEP)]
        for name in gone:
            self.log.say("unload", model=name)
            self.tell(events.Outdated(name))
        return gone

    def status(self) -> dict[str, object]:
        """The status document."""
        return status.document(self.core, self.facts, self.clock(), time.time())

    def begin(self) -> None:
        """Start what is pinned, and look at the clock from here on."""
        self.templates.keep()
        self.tell(events.Tick())

    def drain(self) -> None:
        """Take nothing new; refuse what waits; let go each model as soon as nothing uses it."""
        self.facts.stopping = True
        for number in [one for one, ticket in self._tickets.items() if not ticket.granted.done()]:
            self._refuse(number, AdmissionRefused(503, STOPPING, 5.0))
            self.tell(events.Ended(number))
        self.tell(events.Configured(()))
        for name, model in list(self.core.models.items()):
            if model.state is State.STARTING and name in self.residences:
                self.tasks.spawn(self.residences[name].end())
        self.templates.drain()

    async def close(self, *, at_once: bool = False) -> None:
        """Wait until every server has gone; `at_once` ends them whatever they do."""
        if at_once:
            for residence in self.residences.values():
                residence.kill()
        await self.tasks.settled()
        await self.templates.close()
        if self._timer is not None:
            self._timer.cancel()
        await self.servers.close()
