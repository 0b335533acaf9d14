"""The warm templates of a host: one with the runtime imported, of which all starts are forked, and engine templates of models.

The runtime template is nobody's tier: it makes every way back from `stopped` shorter, and its memory is booked as the host's
own. It is given up when a model would not fit beside it. An engine template is its model's tier `template`: it is built
before the model's first server, which is forked from it, stays when the server leaves for that tier, and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from coldstart.host import events
from coldstart.host.events import Event
from coldstart.host.launches import FORKED, Launch
from coldstart.host.live.log import Log
from coldstart.host.live.meter import Meter
from coldstart.host.live.residence import MEASURE_FIRST_S, PATIENCE_S, Residence
from coldstart.host.live.servers import ModelServer, Ready, Servers, StartFailedError
from coldstart.host.live.tasks import Tasks
from coldstart.host.specification import TEMPLATE, HostSettings

RUNTIME, ENGINE = "runtime", "engine"
# One that died or did not come up is built again after so long.
AGAIN_S = 60.0
# What it shares with each server that is forked from it is no longer its own.
LOOK_S = 10.0


@dataclass(eq=False)
class TemplateProcess:
    """A template process; `pid` is 0 until it is ready, and where it is the user's own, which is used and left alone."""

    launch: Launch
    process: ModelServer
    pid: int = 0


class Templates:
    """The template processes of one host.

    `emit` sends an event to the core, `residences` are the host's servers by model, and `assumed_bytes` is what a runtime
    template is taken for until it was measured.
    """

    def __init__(
        self,
        servers: Servers,
        settings: HostSettings,
        *,
        residences: Mapping[str, Residence],
        emit: Callable[[Event], None],
        meter: Meter,
        log: Log,
        assumed_bytes: int,
    ) -> None:
        self.servers, self.settings, self.residences = servers, settings, residences
        self.emit, self.meter, self.log, self.assumed_bytes = emit, meter, log, assumed_bytes
        self.runtime: TemplateProcess | None = None
        self._forkable: list[Launch] = []
        self._engines: dict[str, TemplateProcess] = {}
        self._given_up, self._draining, self._tried = False, False, 0
        self._tasks = Tasks(log)
        self._again: asyncio.TimerHandle | None = None

    # The runtime template.

    def configure(self, launches: Collection[Launch], settings: HostSettings) -> None:
        """Have a runtime template where the settings want one and its memory fits; give it up where not."""
        self.settings = settings
        self._forkable = [one for one in launches if one.mode in FORKED]
        if self.runtime is None:
            self._begin_runtime()
        elif not settings.runtime_template:
            self.give_up()

    def _begin_runtime(self) -> None:
        if not self._forkable or not self.settings.runtime_template or self._draining:
            return
        self._given_up = False
        self.emit(events.TemplateHeld(self.assumed_bytes))
        if self._given_up:
            self.emit(events.TemplateHeld(0))
            return
        # The next time by the arguments of the next model, should these be at fault.
        launch, self._tried = self._forkable[self._tried % len(self._forkable)], self._tried + 1
        self.runtime = self._begin(launch, RUNTIME)
        self._tasks.spawn(self._live(self.runtime))

    async def _live(self, template: TemplateProcess | None) -> None:
        """The runtime template until nothing of it is left."""
        if template is not None:
            if await self._ready(template, RUNTIME):
                await self._measure(template)
            await template.process.ended
            self.runtime = None
        self.emit(events.TemplateHeld(0))
        if not self._given_up and not self._draining:
            self.log.say("template gone", level=RUNTIME, again_s=AGAIN_S)
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._retry_runtime)

    def _retry_runtime(self) -> None:
        if self.runtime is None:
            self._begin_runtime()

    async def _measure(self, template: TemplateProcess) -> None:
        if not template.pid:
            self.emit(events.TemplateHeld(0))
        wait = MEASURE_FIRST_S
        while not template.process.ended.done():
            await asyncio.wait([template.process.ended], timeout=wait)
            beside = self._forked()
            wait = LOOK_S if beside else MEASURE_FIRST_S
            if beside and template.pid and not template.process.ended.done():
                memory = await asyncio.to_thread(self.meter.alone, template.pid)
                if beside == self._forked():
                    self.emit(events.TemplateHeld(memory or 0))

    def _forked(self) -> list[Residence]:
        """Servers that share the runtime template's pages.

        Only beside them is it measured: what they share is their part as well, and was booked with them. By itself it
        holds all of that, and with a server's part on top no model might fit beside it.
        """
        found = self.residences.values()
        return [one for one in found if one.serves and _is_forked(one.ready)]

    def give_up(self) -> None:
        """Nothing is forked from the runtime template any more; it goes once what was has gone, and that is asked to."""
        self._given_up = True
        if self.runtime is None:
            return
        self.log.say("template given up", level=RUNTIME)
        self.runtime.process.retire()
        loop = asyncio.get_running_loop()
        for residence in self.residences.values():
            if self.ends(residence.ready):
                loop.call_soon(self.emit, events.Outdated(residence.name))

    def ends(self, server: Ready) -> bool:
        """Return whether the server was forked from a template that is given up."""
        owned = self.runtime is not None and self.runtime.pid != 0
        return self._given_up and owned and _is_forked(server)

    # Before a start, and after.

    async def before(self, launch: Launch) -> None:
        """What a start of that model is to be forked from, where that is worth waiting for. Raises nothing."""
        if launch.engine_template:
            if not self.holds(launch.name):
                await self._build(launch)
        elif self.runtime is not None and launch.mode in FORKED:
            # What is still to be imported, a start from nothing would have to import as well.
            with suppress(StartFailedError, TimeoutError):
                limit = self.settings.start_deadline_s
                await asyncio.wait_for(asyncio.shield(self.runtime.process.ready), limit)

    async def _build(self, launch: Launch) -> None:
        template = self._begin(launch, ENGINE)
        if template is None:
            return
        self._engines[launch.name] = template
        if not await self._ready(template, ENGINE):
            await self.drop(launch.name)
            return
        self._tasks.spawn(self._watch(template))
        memory = await asyncio.to_thread(self.meter.alone, template.pid) if template.pid else None
        if memory:
            self.emit(events.Measured(launch.name, memory, TEMPLATE))

    async def _watch(self, template: TemplateProcess) -> None:
        await template.process.ended
        name = template.launch.name
        if self._engines.get(name) is template:
            del self._engines[name]
            self.log.say("template gone", model=name, level=ENGINE)
            if name not in self.residences:
                self.emit(events.Outdated(name))

    def holds(self, model: str) -> bool:
        """Whether the model has a template, or it is being built."""
        return model in self._engines

    def engines(self) -> Iterator[tuple[str, TemplateProcess]]:
        """Engine templates by model."""
        yield from self._engines.items()

    def memory_beside(self, model: str) -> int:
        """Return the bytes of the model's engine template; 0 where there is none, or none can be measured. Blocks."""
        engine = self._engines.get(model)
        return (self.meter.alone(engine.pid) if engine is not None and engine.pid else None) or 0

    async def drop(self, model: str) -> None:
        """End the model's template, if it has one; nothing of it is left then."""
        template = self._engines.pop(model, None)
        if template is None:
            return
        template.process.stop()
        await asyncio.wait([template.process.ended], timeout=PATIENCE_S)
        template.process.stop()
        await template.process.ended

    # Ends.

    def abort(self, model: str) -> None:
        """End the model's template if it is still being built."""
        template = self._engines.get(model)
        if template is not None and not template.process.ready.done():
            template.process.stop()

    def drain(self) -> None:
        """Build nothing more."""
        self._draining = True
        if self._again is not None:
            self._again.cancel()
        for template in [self.runtime, *self._engines.values()]:
            if template is not None and not template.process.ready.done():
                template.process.stop()

    async def close(self) -> None:
        """End all; servers that were forked from them have ended, or end with them."""
        self.drain()
        for name in list(self._engines):
            await self.drop(name)
        if self.runtime is not None:
            self.runtime.process.stop()
        await self._tasks.settled()

    def _begin(self, launch: Launch, level: str) -> TemplateProcess | None:
        self.log.say("template", model=launch.name, level=level)
        try:
            process = self.servers.begin_template(launch, level, self.settings.start_deadline_s)
        except OSError as error:
            self.log.say("template failed", model=launch.name, level=level, reason=str(error))
            return None
        return TemplateProcess(launch, process)

    async def _ready(self, template: TemplateProcess, level: str) -> bool:
        name = template.launch.name
        try:
            ready = await template.process.ready
        except StartFailedError as reason:
            self.log.say("template failed", model=name, level=level, reason=str(reason))
            return False
        template.pid = ready.pid
        self.log.say("template ready", model=name, level=level, pid=ready.pid)
        return True


def _is_forked(server: Ready) -> bool:
    """Return whether the server came from a runtime template."""
    return server.mode == f"template-{RUNTIME}"
