"""Template processes of a host: one runtime template, from which starts are forked, and engine templates of models.

The runtime template is not a tier of a model: it shortens every start from `stopped`, and its memory is reserved by
the host itself. It is dropped if a model does not fit beside it. An engine template is its model's tier `template`:
it is built before the model's first server, which is forked from it. It is retained when the server leaves for that
tier, and ends with the tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

from coldstart.host import events
from coldstart.host.events import Event
from coldstart.host.launches import EARLIER, FORKED, Launch
from coldstart.host.limits import MIB
from coldstart.host.live.log import Log
from coldstart.host.live.meter import Meter
from coldstart.host.live.residence import Residence, end_by_force
from coldstart.host.live.servers import Ready, Servers, StartFailedError
from coldstart.host.live.tasks import Tasks
from coldstart.host.live.template_process import TemplateProcess
from coldstart.host.specification import TEMPLATE, HostSettings
from coldstart.host.status import HostFacts
from coldstart.units import format_memory

RUNTIME, ENGINE = "runtime", "engine"
TEMPLATE_DROPPED = "its template is dropped"
# Time in seconds until a template that failed to start is built again; one that was ready for STABLE_S is so at once.
AGAIN_S, STABLE_S = 60.0, 5.0
# Interval in seconds at which a start looks whether the template that failed is replaced.
SETTLE_S = 0.05
NO_TEMPLATE = events.TemplateHeld(0, forks=False)


class Templates:
    """Template processes of one host.

    `emit` sends an event to the core, and `residences` are the host's servers by model. A runtime template counts with
    `assumed_bytes`; `find_free` returns the free bytes of all devices.
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
        facts: HostFacts,
        assumed_bytes: int,
        find_free: Callable[[], int],
    ) -> None:
        self.servers, self.settings, self.residences = servers, settings, residences
        self.emit, self.meter, self.log, self.facts = emit, meter, log, facts
        self.assumed_bytes, self.find_free = assumed_bytes, find_free
        self.runtime: TemplateProcess | None = None
        self._launches: Collection[Launch] = ()
        # By model: whether its last start used a mode that is tried before a runtime template.
        self._passed_by: dict[str, bool] = {}
        # With those that are stopped and retired, whose servers still run.
        self._runtimes: set[TemplateProcess] = set()
        self._engines: dict[str, TemplateProcess] = {}
        self._given_up, self._draining, self._tried = False, False, 0
        self._tasks = Tasks(log)
        self._again: asyncio.TimerHandle | None = None

    def configure(self, launches: Collection[Launch], settings: HostSettings) -> None:
        """Start a runtime template if the settings require one and its memory fits; drop it if they do not."""
        self.settings = settings
        known = {one.name: one for one in self._launches}
        self._passed_by = {
            one.name: self._passed_by[one.name]
            for one in launches
            if one.name in self._passed_by and known.get(one.name) == one
        }
        self._launches = tuple(launches)
        if self.runtime is None or not settings.runtime_template:
            self.facts.template_error = ""
        if self.runtime is None:
            self._begin_runtime()
        elif not settings.runtime_template:
            self.give_up()

    def learn(self, launch: Launch, mode: str) -> None:
        """Learn from a start in this mode if the model's starts need the runtime template; begin one if it is needed now."""
        was_needed = bool(self._list_forkable())
        self._passed_by[launch.name] = mode in EARLIER
        if not was_needed and self.runtime is None:
            self._begin_runtime()

    def _list_forkable(self) -> list[Launch]:
        return [launch for launch in self._launches if self._is_forkable(launch)]

    def _is_forkable(self, launch: Launch) -> bool:
        """Return whether the model's starts use the runtime template, as far as is known."""
        return launch.mode in FORKED and not self._passed_by.get(launch.name, launch.needs_no_template)

    def _begin_runtime(self) -> None:
        forkable = self._list_forkable()
        if not forkable or not self.settings.runtime_template or self._draining:
            return
        self._given_up, self.facts.template_error = False, ""
        if self.residences and (free := self.find_free()) < self.assumed_bytes:
            self._postpone(free)
            return
        self.emit(events.TemplateHeld(self.assumed_bytes))
        if self._given_up:
            self.log.say("no runtime template", reason=self.facts.template_error)
            self.emit(NO_TEMPLATE)
            return
        # Use another model's arguments at the next attempt, in case these are the cause of a failure.
        launch, self._tried = forkable[self._tried % len(forkable)], self._tried + 1
        self.runtime = self._begin(launch, RUNTIME)
        if self.runtime is not None:
            self._runtimes.add(begun := self.runtime)
            begun.process.ended.add_done_callback(lambda _: self._runtimes.discard(begun))
        self._tasks.spawn(self._live(self.runtime))

    async def _live(self, template: TemplateProcess | None) -> None:
        """Supervise the runtime template until it has ended."""
        again_s, loop = AGAIN_S, asyncio.get_running_loop()
        if template is not None:
            is_ready, since = await self._ready(template, RUNTIME), loop.time()
            if is_ready and not template.pid:  # of another process, which has its own memory
                self.emit(events.TemplateHeld(0))
            await template.gone
            was_stable = is_ready and loop.time() - since > STABLE_S
            if was_stable or template.process.was_killed or not template.process.ended.done():
                again_s = 0.0
            self.runtime = None
        self.emit(NO_TEMPLATE)
        if not self._given_up and not self._draining:
            self.log.say("template gone", level=RUNTIME, again_s=again_s)
            if again_s:
                self._retry_in(again_s)
            else:
                self._begin_runtime()

    def _postpone(self, free: int) -> None:
        """Begin the template later: it stops no running server."""
        needed = format_memory(self.assumed_bytes)
        self.facts.template_error = (
            f"the running models leave {format_memory(free)}, and the template needs {needed}"
        )
        self.log.say("no runtime template yet", reason=self.facts.template_error, again_s=AGAIN_S)
        self._retry_in(AGAIN_S)

    def _retry_in(self, seconds: float) -> None:
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(seconds, self._retry_runtime)

    def _retry_runtime(self) -> None:
        if self.runtime is None:
            self._begin_runtime()

    def list_sharers(self, model: str) -> list[Residence]:
        """Return the servers that share the runtime template's pages, if the model's server is one of them."""
        found = [one for one in self.residences.values() if one.serves and _is_forked(one.ready)]
        return found if any(one.name == model for one in found) else []

    def measure_lent(self, sharers: Collection[Residence]) -> int:
        """Return the template's bytes that are part of a sharer's proportional set size. Blocks.

        The template always counts with `assumed_bytes`. What its measured size lacks is part of its servers' sizes, so the
        sum of all is what the processes hold.
        """
        template = self.runtime
        if not sharers or template is None or not template.pid:
            return 0
        memory = self.meter.alone(template.pid)
        return max(0, self.assumed_bytes - memory) // len(sharers) if memory else 0

    def crowd_out(self, memory: int, needed: int) -> None:
        """Drop the runtime template, which takes `memory` bytes: a model fits only without it, as the status then says.

        `needed` is the memory limit in bytes with which every model fits beside it.
        """
        limit, own = format_memory(self.settings.memory), format_memory(memory)
        self.facts.template_error = (
            f"a model fits in {limit} only without the template's {own} "
            f"(hint: raise memory to {-(-needed // MIB)}MiB, or run coldstart template freeze)"
        )
        self.give_up()

    def give_up(self) -> None:
        """Retire the runtime template: nothing more is forked from it, and the servers forked from it are asked to stop."""
        self._given_up = True
        if self.runtime is None:
            return
        self.log.say("template given up", level=RUNTIME, reason=self.facts.template_error or None)
        self.runtime.process.retire()
        loop = asyncio.get_running_loop()
        for residence in self.residences.values():
            if self.ends(residence.ready):
                loop.call_soon(self.emit, events.Outdated(residence.name, TEMPLATE_DROPPED))

    def ends(self, server: Ready) -> bool:
        """Return whether the server was forked from a template that is being dropped."""
        owned = self.runtime is not None and self.runtime.pid != 0
        return self._given_up and owned and _is_forked(server)

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
                self.emit(events.Outdated(name, "its template has ended"))

    def holds(self, model: str) -> bool:
        """Return whether the model has a template, or one is being built."""
        return model in self._engines

    def engines(self) -> Iterator[tuple[str, TemplateProcess]]:
        """Yield the engine templates by model."""
        yield from self._engines.items()

    def memory_beside(self, model: str) -> int:
        """Return the bytes of the model's engine template; 0 if it has none or it cannot be measured. Blocks."""
        engine = self._engines.get(model)
        return (self.meter.alone(engine.pid) if engine is not None and engine.pid else None) or 0

    async def drop(self, model: str) -> None:
        """End the model's template, if it has one, and wait for its end."""
        template = self._engines.pop(model, None)
        if template is None:
            return
        await end_by_force(template.process)

    def abort(self, model: str) -> None:
        """End the model's template if it is still being built."""
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
        """End all templates; servers forked from them have ended, or end with them."""
        self.drain()
        for name in list(self._engines):
            await self.drop(name)
        for template in list(self._runtimes):
            await end_by_force(template.process)
        await self._tasks.wait()

    def _begin(self, launch: Launch, level: str) -> TemplateProcess | None:
        self.log.say("template", model=launch.name, level=level)
        try:
            process = self.servers.begin_template(launch, level, self.settings.ready_timeout_s)
        except OSError as error:
            self.log.say("template failed", model=launch.name, level=level, reason=str(error))
            return None
        template = TemplateProcess(launch, process)
        self._tasks.spawn(template.end_if_stopped(self.residences, self.log))
        return template

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
    """Return whether the server was forked from a runtime template."""
    return server.mode == f"template-{RUNTIME}"
