"""The live host: the core decides, this carries out.

Invariant: every order of the core is answered by exactly one event, whatever becomes of the process: a start by Started or
Failed, an order to leave by Left. Everything runs on one event loop, so the core is never asked twice at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

import coldstart
from coldstart.gateway.log import Log
from coldstart.gateway.metrics import HostStatus, Metrics
from coldstart.gateway.residence import Residence
from coldstart.gateway.servers import Servers
from coldstart.gateway.tickets import AdmissionRefused, Ticket
from coldstart.gateway.upstream import Upstream
from coldstart.host import events, status
from coldstart.host.configuration import HostFile
from coldstart.host.core import Core
from coldstart.host.events import Action, Event
from coldstart.host.launches import Launch
from coldstart.host.model_state import State
from coldstart.host.status import HostFacts, LastStart

STOPPING = "the host is stopping"


class Driver:
    """One host. `measure` gives the bytes that a process and its descendants hold, or None where that says nothing."""

    def __init__(
        self,
        file: HostFile,
        servers: Servers,
        *,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[int], int | None] = lambda pid: None,
    ) -> None:
        self.core, self.catalogue = Core(file.models, file.settings), file.catalogue
        self.servers, self.log, self.clock, self.measure = servers, log or Log(quiet=True), clock, measure
        self.facts = HostFacts(pid=os.getpid(), version=coldstart.__version__, began=clock())
        self.residences: dict[str, Residence] = {}
        self._tickets: dict[str, Ticket] = {}
        self._number, self._entering = 0, False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.metrics = Metrics(HostStatus(self.status))
        self._describe(file)

    # Requests.

    def enter(self, asked: str | None) -> Ticket:
        """Take a request in. Raises AdmissionRefused for a name that means no model; all else `granted` tells."""
        if self.facts.stopping:
            raise self._counted(AdmissionRefused(503, STOPPING, 5.0))
        route = self.catalogue.route(asked)
        if route is None:
            raise self._counted(AdmissionRefused(404, _unknown(asked)))
        self._number += 1
        future: asyncio.Future[Upstream] = asyncio.get_running_loop().create_future()
        ticket = Ticket(str(self._number), route, self.clock(), future)
        self._tickets[ticket.number] = ticket
        hits, self._entering = self.core.hits, True
        try:
            self.tell(events.Arrived(ticket.number, route.model))
        finally:
            self._entering = False
        ticket.hit = self.core.hits > hits
        facts = self.facts.of(route.model)
        facts.requests += 1
        facts.hits += ticket.hit
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request was answered, or its client went."""
        if self._tickets.pop(ticket.number, None) is not None:
            self.tell(events.Ended(ticket.number))

    async def again(self, ticket: Ticket, upstream: Upstream, error: Exception) -> Ticket | None:
        """A request whose server broke off before it said anything: a host has no second one to ask."""
        return None

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
            case events.Refuse(number, code, reason, after):
                self._refuse(number, AdmissionRefused(code, reason, after))
            case events.Start(model, tier):
                self._spawn(self._start(model, tier.name))
            case events.Leave(model, tier):
                self._leave(model, tier.name)
            case events.Abort(model):
                late = f"it was not ready within {self.core.settings.start_deadline_s:g} s"
                self.log.say("start aborted", model=model, reason=late)
                if model in self.residences:
                    self._spawn(self.residences[model].end(late))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.say("internal error", reason=f"{type(error).__name__}: {error}")

    # Models.

    async def _start(self, model: str, tier: str) -> None:
        known = self.residences.get(model)
        if known is not None:
            await known.wake(tier)
            return
        launch = self.catalogue.launches[model]
        self.log.say("start", model=model, tier=tier)
        try:
            server = self.servers.begin(launch, self.core.settings.start_deadline_s)
        except OSError as error:  # no descriptor, no disk, no process
            reason = f"no server can be started: {error.strerror or error}"
            self.start_failed(model, reason, 0.0)
            self.tell(events.Failed(model, reason))
            return
        residence = self.residences[model] = Residence(self, launch, server)
        try:
            await residence.live()
        finally:
            del self.residences[model]
            self.facts.of(model).mode = self.facts.of(model).pid = None
        self.tell(residence.last_word())
        if model in self.core.models and self.core.models[model].state is State.ASLEEP:
            # It was to sleep and could not: nothing of it is left.
            self.tell(events.Outdated(model))

    def _leave(self, model: str, tier: str) -> None:
        residence = self.residences.get(model)
        if residence is None:
            asyncio.get_running_loop().call_soon(self.tell, events.Left(model))
        else:
            self._spawn(residence.leave(tier))

    def started(self, residence: Residence, mode: str, seconds: float) -> None:
        """A server is ready, or awake again."""
        name, facts = residence.launch.name, self.facts.of(residence.launch.name)
        document = residence.ready.document
        facts.starts += 1
        facts.mode, facts.pid = residence.ready.mode, residence.ready.pid
        phases, fallbacks = document.get("phases", {}), document.get("fallbacks", ())
        facts.last_start = LastStart(time.time(), mode, seconds, phases, fallbacks)
        self._remember(name, mode, seconds, None)
        self.facts.start_s += seconds
        self.metrics.started(name, mode, seconds)
        self.log.say("ready", model=name, mode=mode, seconds=round(seconds, 4), pid=facts.pid)
        for fallback in fallbacks:
            self.log.say("fallback", model=name, **fallback)
        self.tell(events.Started(name, seconds))
        if self.outdated(residence.launch):
            self.tell(events.Outdated(name))

    def start_failed(self, name: str, reason: str, seconds: float) -> None:
        """A start came to nothing."""
        self.facts.failed_starts += 1
        self._remember(name, None, seconds, reason)
        self.metrics.start_failed(name)
        self.log.say("start failed", model=name, seconds=round(seconds, 4), reason=reason)

    def measured(self, name: str, memory: int) -> None:
        """What a serving model really holds."""
        self.facts.of(name).memory_source = "observed"
        self.tell(events.Measured(name, memory))

    def outdated(self, launch: Launch) -> bool:
        """Whether a server started by these words would be started by others now."""
        now = self.catalogue.launches.get(launch.name)
        return now is not None and now.same_server != launch.same_server

    def _remember(self, name: str, mode: str | None, seconds: float, error: str | None) -> None:
        row = {"model": name, "at_unix_s": time.time(), "mode": mode, "seconds": seconds, "error": error}
        self.facts.recent_starts.append(row)

    # The whole host.

    def configure(self, file: HostFile) -> None:
        """Take another configuration, between two requests. Raises Usage and changes nothing where it cannot be taken."""
        before, self.catalogue = self.catalogue, file.catalogue
        try:
            self.tell(events.Configured(file.models, file.settings))
        except BaseException:
            self.catalogue = before
            raise
        self._describe(file)
        for name, residence in list(self.residences.items()):
            if self.outdated(residence.launch) and self.core.models[name].state is not State.STARTING:
                self.tell(events.Outdated(name))

    def _describe(self, file: HostFile) -> None:
        for name, launch in file.catalogue.launches.items():
            facts = self.facts.of(name)
            facts.aliases = [given for given, _ in launch.names() if given not in (name, *launch.adapters)]
            facts.adapters = list(launch.adapters)
            if facts.memory_source != "observed":
                facts.memory_source = file.sources.get(name, "file")
        for name in [name for name in self.facts.models if name not in file.catalogue.launches]:
            if name not in self.core.models:
                del self.facts.models[name]

    def status(self) -> dict[str, object]:
        """The status document."""
        return status.document(self.core, self.facts, self.clock(), time.time())

    def begin(self) -> None:
        """Start what is pinned, and look at the clock from here on."""
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
                self._spawn(self.residences[name].end())

    async def close(self, *, at_once: bool = False) -> None:
        """Wait until every server has gone; `at_once` ends them whatever they do."""
        if at_once:
            for residence in self.residences.values():
                residence.kill()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._timer is not None:
            self._timer.cancel()
        await self.servers.close()


def _unknown(asked: str | None) -> str:
    return "the request names no model" if asked is None else f"The model `{asked}` does not exist."
