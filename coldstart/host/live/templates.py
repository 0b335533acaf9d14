"""Template processes of a host: one runtime template, from which starts are forked, and engine templates of models.

The runtime template is not a tier of a model: it shortens every start from `stopped`, and its memory is reserved by
the host itself as long as the configuration requires one. An engine template is its model's tier `template`: it is built
before the model's first server, which is forked from it. It is retained when the server leaves for that tier, and ends
with the tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sized
from contextlib import suppress
from dataclasses import dataclass

from coldstart.host import events
from coldstart.host.events import Event
from coldstart.host.launches import FORKED, Launch
from coldstart.host.live.log import Log, Tasks
from coldstart.host.live.profiles import Meter
from coldstart.host.live.servers import ModelServer, StartFailedError, end_by_force
from coldstart.host.live.starter_client import Starter
from coldstart.host.specification import TEMPLATE, HostSettings
from coldstart.host.status import HostFacts
from coldstart.system.proc.processes import is_stopped

RUNTIME, ENGINE = "runtime", "engine"
# Time in seconds until a template that failed to start is built again; one that was ready for STABLE_S is so at once.
AGAIN_S, STABLE_S = 60.0, 5.0
# Interval in seconds at which a start looks whether the template that failed is replaced.
SETTLE_S = 0.05
# Interval in seconds between checks; a template that is stopped at two checks in a row is ended.
CHECK_S = 2.0


@dataclass(eq=False)
class TemplateProcess:
    """A template process; `pid` is None until it is ready, and for the user's own template, which is used but never ended."""

    launch: Launch
    process: ModelServer
    pid: int | None = None
    is_retired: bool = False

    def __post_init__(self) -> None:
        # Resolved when nothing more can be forked from it.
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process.ended.add_done_callback(lambda _: self._lose())

    def _lose(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def came_up(self) -> bool:
        """Wait until the template is ready or has failed; return whether it is ready."""
        try:
            await asyncio.shield(self.process.ready)
        except StartFailedError:
            return False
        return True

    def retire(self) -> None:
        """Fork nothing more from it; it ends after its last forked server."""
        self.is_retired = True
        self.process.retire()

    async def end_if_stopped(self, servers: Sized, log: Log) -> None:
        """Wait for its end. If a signal has stopped it, kill it; with `servers` retire it instead."""
        was_stopped = False
        while not self.process.ended.done():
            await asyncio.wait([self.process.ended], timeout=CHECK_S)
            stopped = await asyncio.to_thread(self._is_stopped)
            if stopped and was_stopped:
                if not self.gone.done():
                    log.write("template stopped", model=self.launch.name, pid=self.pid)
                if not servers or not self.process.ready.done():
                    self.process.kill()
                elif not self.gone.done():
                    self.retire()
                    self._lose()
            was_stopped = stopped

    def _is_stopped(self) -> bool:
        # The tree of a ready template contains its servers.
        return self.process.is_stopped() if self.pid is None else is_stopped(self.pid)


class Templates:
    """Template processes of one host.

    `emit` sends an event to the core, and `residences` are the models that have servers. A runtime template counts with
    `assumed_bytes`.
    """

    def __init__(
        self,
        servers: Starter,
        settings: HostSettings,
        *,
        residences: Collection[str],
        emit: Callable[[Event], None],
        meter: Meter,
        log: Log,
        facts: HostFacts,
        assumed_bytes: int,
    ) -> None:
        self.servers, self.settings, self.residences = servers, settings, residences
        self.emit, self.meter, self.log, self.facts = emit, meter, log, facts
        self.assumed_bytes = assumed_bytes
        self.runtime: TemplateProcess | None = None
        self._launches: Collection[Launch] = ()
        # With those that are stopped and retired, whose servers still run.
        self._runtimes: set[TemplateProcess] = set()
        self._engines: dict[str, TemplateProcess] = {}
        self._draining, self._tried = False, 0
        self._tasks = Tasks(log)
        self._again: asyncio.TimerHandle | None = None

    def configure(self, launches: Collection[Launch], settings: HostSettings) -> None:
        """Start a runtime template if a model uses one; retire it if none does."""
        self.settings, self._launches = settings, tuple(launches)
        if self.runtime is None:
            self._begin_runtime()
        elif not self._list_forkable() and not self.runtime.is_retired:
            self.log.write("template retired", level=RUNTIME)
            self.runtime.retire()

    def _list_forkable(self) -> list[Launch]:
        return [launch for launch in self._launches if self._is_forkable(launch)]

    def _is_forkable(self, launch: Launch) -> bool:
        """Return whether the model's starts use the runtime template, as far as is known."""
        return self.settings.runtime_template and launch.mode in FORKED and not launch.needs_no_template

    def _begin_runtime(self) -> None:
        forkable = self._list_forkable()
        self.emit(events.TemplateHeld(self.assumed_bytes if forkable else 0))
        if not forkable or self._draining or self.runtime is not None:
            return
        # Use another model's arguments at the next attempt, in case these are the cause of a failure.
        launch, self._tried = forkable[self._tried % len(forkable)], self._tried + 1
        self.runtime = self._begin(launch, RUNTIME)
        if self.runtime is not None:
            self._runtimes.add(begun := self.runtime)
            begun.process.ended.add_done_callback(lambda _: self._runtimes.discard(begun))
        self._tasks.spawn(self._live(self.runtime))

    async def _live(self, template: TemplateProcess | None) -> None:
        """Supervise the runtime template until nothing more can be forked from it, and then begin the next one."""
        again_s, loop = AGAIN_S, asyncio.get_running_loop()
        if template is not None:
            is_ready, since = await self._ready(template, RUNTIME), loop.time()
            if is_ready and template.pid is None:  # its memory is that of another process
                self.emit(events.TemplateHeld(0))
            await template.gone
            was_stable = is_ready and loop.time() - since > STABLE_S
            if was_stable or template.is_retired or template.process.was_killed:
                again_s = 0.0
            self.runtime = None
        if self._draining or not again_s:
            self._begin_runtime()
        else:
            self.log.write("template gone", level=RUNTIME, again_s=again_s)
            self._again = loop.call_later(again_s, self._begin_runtime)

    def measure_lent(self, sharers: int) -> int:
        """Return the template's bytes that are part of the proportional set size of each of `sharers` servers. Blocks.

        The template always counts with `assumed_bytes`. What its measured size lacks is part of its servers' sizes, so the
        sum of all is what the processes hold.
        """
        pid = self.runtime.pid if self.runtime else None
        memory = self.meter.alone(pid) if sharers and pid is not None else None
        return max(0, self.assumed_bytes - memory) // sharers if memory else 0

    async def prepare(self, launch: Launch) -> None:
        """Prepare the template for a start of this model, if the start should wait for it. Does not raise."""
        if launch.engine_template:
            if not self.holds(launch.name):
                await self._build(launch)
        elif self.runtime is not None and self._is_forkable(launch):
            # A start without a template would have to import the same modules.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._await_runtime(), self.settings.ready_timeout_s)

    async def _await_runtime(self) -> None:
        """Wait for the runtime template, and for the next one if it was killed and is built again at once."""
        while (template := self.runtime) is not None and not await template.came_up():
            while self.runtime is template:
                await asyncio.sleep(SETTLE_S)

    async def _build(self, launch: Launch) -> None:
        template = self._begin(launch, ENGINE)
        if template is None:
            return
        self._engines[launch.name] = template
        if not await self._ready(template, ENGINE):
            await self.drop(launch.name)
            return
        self._tasks.spawn(self._watch(template))
        memory = await asyncio.to_thread(self.memory_beside, launch.name)
        if memory:
            self.emit(events.Measured(launch.name, memory, TEMPLATE))

    async def _watch(self, template: TemplateProcess) -> None:
        await template.process.ended
        name = template.launch.name
        if self._engines.get(name) is template:
            del self._engines[name]
            self.log.write("template gone", model=name, level=ENGINE)
            if name not in self.residences:
                self.emit(events.Outdated(name, "its template has ended"))

    def holds(self, model: str) -> bool:
        """Return whether the model has a template, or one is being built."""
        return model in self._engines

    def list_engine_launches(self) -> dict[str, Launch]:
        """Return the launches of the engine templates by model."""
        return {name: template.launch for name, template in self._engines.items()}

    def memory_beside(self, model: str) -> int:
        """Return the bytes of the model's engine template; 0 if it has none or it cannot be measured. Blocks."""
        engine = self._engines.get(model)
        return (self.meter.alone(engine.pid) if engine and engine.pid is not None else None) or 0

    async def drop(self, model: str) -> None:
        """End the model's template, if it has one, and wait for its end."""
        if (template := self._engines.pop(model, None)) is not None:
            await end_by_force(template.process)

    def abort(self, model: str) -> None:
        """Stop the model's template if it is still being built."""
        template = self._engines.get(model)
        if template is not None and not template.process.ready.done():
            template.process.stop()

    def drain(self) -> None:
        """Build no further template."""
        self._draining = True
        if self._again is not None:
            self._again.cancel()
        for template in [self.runtime, *self._engines.values()]:
            if template is not None and not template.process.ready.done():
                template.process.stop()

    async def close(self) -> None:
        """Stop all templates, and with them the servers that were forked from them and still run."""
        self.drain()
        for name in list(self._engines):
            await self.drop(name)
        for template in list(self._runtimes):
            await end_by_force(template.process)
        await self._tasks.wait()

    def _begin(self, launch: Launch, level: str) -> TemplateProcess | None:
        self.log.write("template", model=launch.name, level=level)
        try:
            process = self.servers.begin(launch, self.settings.ready_timeout_s, template=level)
        except OSError as error:
            self._report_failure(launch, level, str(error))
            return None
        template = TemplateProcess(launch, process)
        self._tasks.spawn(template.end_if_stopped(self.residences, self.log))
        return template

    async def _ready(self, template: TemplateProcess, level: str) -> bool:
        try:
            ready = await template.process.ready
        except StartFailedError as reason:
            if not template.is_retired:
                self._report_failure(template.launch, level, str(reason))
            return False
        template.pid = ready.pid
        if level == RUNTIME:
            self.facts.template_error = ""
        self.log.write("template ready", model=template.launch.name, level=level, pid=ready.pid)
        return True

    def _report_failure(self, launch: Launch, level: str, reason: str) -> None:
        self.log.write("template failed", model=launch.name, level=level, reason=reason)
        if level == RUNTIME:
            self.facts.template_error = reason
