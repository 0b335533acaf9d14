"""Server processes of the host's models: start, stop and abort them as the core orders.

Invariant: every order results in exactly one event, whatever happens to the process: a start in Started or Failed, a
leave order in Left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from coldstart.host import events
from coldstart.host.core import Core
from coldstart.host.events import Event
from coldstart.host.launches import Launch
from coldstart.host.live.log import Tasks
from coldstart.host.live.profiles import show_devices
from coldstart.host.live.record import Record
from coldstart.host.live.residence import Meter, Residence
from coldstart.host.live.servers import ModelServer, Ready, Servers, StartFailedError
from coldstart.host.live.templates import Templates
from coldstart.host.model_state import State
from coldstart.host.specification import TEMPLATE

STOPPING = "the host is stopping"
Order = events.Start | events.Leave | events.Abort


class Lifecycle:
    """Servers and templates of one host. `emit` sends an event to the core; `residences` are the servers by model."""

    def __init__(
        self,
        core: Core,
        launches: Mapping[str, Launch],
        servers: Servers,
        *,
        record: Record,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        meter: Meter,
        template_bytes: int,
    ) -> None:
        self.core, self.launches, self.servers = core, launches, servers
        self.record, self.emit, self.clock, self.meter = record, emit, clock, meter
        self.log, self.facts = record.log, record.facts
        self.residences: dict[str, Residence] = {}
        self.templates = Templates(
            servers,
            core.settings,
            residences=self.residences,
            emit=emit,
            meter=meter,
            log=self.log,
            facts=self.facts,
            assumed_bytes=template_bytes,
        )
        self._tasks = Tasks(self.log)

    def carry_out(self, order: Order) -> None:
        """Begin to carry out an order of the core."""
        match order:
            case events.Start(model, tier):
                self._tasks.spawn(self._start(model, tier.name))
            case events.Leave(model, tier, reason):
                residence = self.residences.get(model)
                left = residence.leave(tier.name, reason) if residence else self._end_template(model)
                self._tasks.spawn(left)
            case events.Abort(model):
                self._abort(model)

    def _abort(self, model: str) -> None:
        self.log.write("start aborted", model=model, reason=self._too_late())
        if model in self.residences:
            self._tasks.spawn(self.residences[model].end(self._too_late()))
        else:
            self.templates.abort(model)

    def _too_late(self) -> str:
        return f"the server was not ready within {self.core.settings.ready_timeout_s:g} s"

    async def _start(self, model: str, tier: str) -> None:
        known = self.residences.get(model)
        if known is not None:
            await known.wake(tier)
            return
        launch, began = self.launches[model], self.clock()
        self.log.write("start", model=model, tier=tier)
        await self.templates.prepare(launch)
        waited_s = self.clock() - began
        server = self._begin(launch, began)
        if server is not None:
            await self._live(
                Residence(
                    launch,
                    server,
                    began,
                    waited_s,
                    observer=self,
                    log=self.log,
                    clock=self.clock,
                    hang_timeout_s=lambda: self.core.settings.hang_timeout_s,
                )
            )

    async def _live(self, residence: Residence) -> None:
        name = residence.name
        self.residences[name] = residence
        try:
            await residence.live()
        finally:
            del self.residences[name]
            self.record.record_end(name)
        await self._end(name, residence.end_event())

    def _begin(self, launch: Launch, began: float) -> ModelServer | None:
        """Return a new server; if it cannot be created, report a failed start to the core and return None."""
        left = self.core.settings.ready_timeout_s - (self.clock() - began)
        try:
            if left <= 0 or self.facts.stopping:
                raise StartFailedError(STOPPING if self.facts.stopping else self._too_late())
            return self.servers.begin(launch, left, env=show_devices(launch))
        except StartFailedError as late:
            reason = str(late)
        except OSError as error:  # no descriptor, no disk, no process
            reason = f"cannot start a server: {error.strerror or error}"
        self.report_failed_start(launch.name, reason, self.clock() - began)
        self._tasks.spawn(self._end(launch.name, events.Failed(launch.name, reason)))
        return None

    async def _end(self, model: str, event: events.Left | events.Failed) -> None:
        """Send the core the event that ends a server, and first drop its template if the target tier does not retain it."""
        known = self.core.models.get(model)
        target = known.target if known else None
        if isinstance(event, events.Failed) or target is None or target.name != TEMPLATE:
            await self.templates.drop(model)
        self.emit(event)
        if known and known.state is State.ASLEEP and not self.templates.holds(model):
            # It should have gone to sleep and failed: nothing of it remains.
            self.emit(events.Outdated(model, "it did not go to sleep"))

    async def _end_template(self, model: str) -> None:
        await self.templates.drop(model)
        self.emit(events.Left(model))

    def report_ready(self, launch: Launch, ready: Ready, mode: str, seconds: float) -> None:
        """Record a server that is ready."""
        self.record.record_start(launch.name, ready, mode, seconds)
        self.emit(events.Started(launch.name, seconds))
        if self._is_outdated(launch):
            self.emit(events.Outdated(launch.name))

    def report_failed_start(self, model: str, reason: str, seconds: float) -> None:
        """Record a failed start."""
        if not self.facts.stopping:
            self.record.record_failed_start(model, reason, seconds)

    def report_asleep(self, launch: Launch) -> None:
        """Report that a server is asleep."""
        self.record.record_gpu_memory(launch.name, None)
        self.emit(events.Left(launch.name))
        if self._is_outdated(launch):
            self.emit(events.Outdated(launch.name))

    def report_memory(self, model: str, memory: int) -> None:
        """Report the measured memory of a server."""
        self.record.record_memory(self.core.residents, model, memory)
        self.emit(events.Measured(model, memory))

    async def measure(self, model: str, pid: int) -> int | None:
        """Record its GPU memory; return the memory of its process tree and its template."""
        self.record.record_gpu_memory(model, await asyncio.to_thread(self.meter.gpu_memory, pid))
        return await asyncio.to_thread(self._measure, model, pid, self.templates.list_sharers(model))

    def _measure(self, model: str, pid: int, sharers: Collection[Residence]) -> int | None:
        if (server := self.meter.tree(pid)) is None:
            return None
        own = server - self.templates.measure_lent(sharers)
        return max(1, own) + self.templates.memory_beside(model)

    def _is_outdated(self, launch: Launch) -> bool:
        """Return whether a server of `launch` would now be started with other arguments."""
        now = self.launches.get(launch.name)
        return now is not None and now.same_server != launch.same_server

    def begin(self) -> None:
        """Start the runtime template if the settings require one."""
        self.templates.configure(self.launches.values(), self.core.settings)

    def configure(self, launches: Mapping[str, Launch]) -> None:
        """Apply other launches and the core's settings; retire servers and templates with outdated arguments."""
        self.launches = launches
        running = {name: template.launch for name, template in self.templates.engines()}
        running |= {name: residence.launch for name, residence in self.residences.items()}
        for name, launch in running.items():
            if self._is_outdated(launch) and self.core.models[name].state is not State.STARTING:
                self.emit(events.Outdated(name))
        self.begin()

    def drain(self) -> None:
        """End starts in progress and build no further template."""
        for name, model in list(self.core.models.items()):
            if model.state is State.STARTING and name in self.residences:
                self._tasks.spawn(self.residences[name].end())
        self.templates.drain()

    def kill(self) -> None:
        """End every server at once."""
        for residence in self.residences.values():
            residence.kill()

    async def close(self) -> None:
        """Wait until every server and template has ended."""
        await self._tasks.wait()
        await self.templates.close()
        await self.servers.close()
