"""The warm templates of a host: one with the runtime imported, of which all starts are forked, and engine templates of models.

The runtime template is nobody's tier: it makes every way back from `stopped` shorter, and its memory is booked as the host's
own. It is given up when a model would not fit beside it. An engine template is its model's tier `template`: it is built
before the model's first server, which is forked from it, stays when the server leaves for that tier, and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldstart.gateway.residence import MEASURE_FIRST_S, PATIENCE_S, Residence
from coldstart.gateway.servers import ModelServer, StartFailed
from coldstart.gateway.tasks import Tasks
from coldstart.host import events
from coldstart.host.launches import FORKED, Launch
from coldstart.host.specification import TEMPLATE

if TYPE_CHECKING:
    from coldstart.gateway.driver import Driver

RUNTIME, ENGINE = "runtime", "engine"
# One that died or did not come up is built again after so long.
AGAIN_S = 60.0
# What it shares with each server that is forked from it is no longer its own.
LOOK_S = 10.0


@dataclass(eq=False)
class HeldTemplate:
    """A template process; `pid` is 0 until it is ready, and where it is the user's own, which is used and left alone."""

    launch: Launch
    process: ModelServer
    pid: int = 0


class Templates:
    """Those of one host. `assumed_bytes` is what a runtime template is taken for until it was measured."""

    def __init__(self, driver: Driver, assumed_bytes: int) -> None:
        self.driver, self.assumed_bytes = driver, assumed_bytes
        self.runtime: HeldTemplate | None = None
        self._engines: dict[str, HeldTemplate] = {}
        self._given_up, self._tried = False, 0
        self._tasks = Tasks(driver.log)
        self._again: asyncio.TimerHandle | None = None

    # The runtime template.

    def keep(self) -> None:
        """Have a runtime template where the configuration wants one and its memory fits; give it up where not."""
        driver = self.driver
        launches = [one for one in driver.catalogue.launches.values() if one.mode in FORKED]
        if self.runtime is not None:
            if not driver.core.settings.runtime_template:
                self.give_up()
            return
        if not launches or not driver.core.settings.runtime_template or driver.facts.stopping:
            return
        self._given_up = False
        driver.tell(events.TemplateHeld(self.assumed_bytes))
        if self._given_up:
            driver.tell(events.TemplateHeld(0))
        else:
            # The next time by the words of the next model, should these be at fault.
            launch, self._tried = launches[self._tried % len(launches)], self._tried + 1
            self.runtime = self._begun(launch, RUNTIME)
            self._tasks.spawn(self._live(self.runtime))

    async def _live(self, held: HeldTemplate | None) -> None:
        """The runtime template until nothing of it is left."""
        if held is not None:
            if await self._ready(held, RUNTIME):
                await self._measure(held)
            await held.process.ended
            self.runtime = None
        driver = self.driver
        driver.tell(events.TemplateHeld(0))
        if not self._given_up and not driver.facts.stopping:
            driver.log.say("template gone", level=RUNTIME, again_s=AGAIN_S)
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self.keep)

    async def _measure(self, held: HeldTemplate) -> None:
        if not held.pid:
            self.driver.tell(events.TemplateHeld(0))
        wait = MEASURE_FIRST_S
        while not held.process.ended.done():
            await asyncio.wait([held.process.ended], timeout=wait)
            beside = self._forked()
            wait = LOOK_S if beside else MEASURE_FIRST_S
            if beside and held.pid and not held.process.ended.done():
                memory = await asyncio.to_thread(self.driver.meter.alone, held.pid)
                if beside == self._forked():
                    self.driver.tell(events.TemplateHeld(memory or 0))

    def _forked(self) -> list[Residence]:
        """Servers that share the runtime template's pages.

        Only beside them is it measured: what they share is their part as well, and was booked with them. By itself it
        holds all of that, and with a server's part on top no model might fit beside it.
        """
        found = self.driver.residences.values()
        return [one for one in found if one.serves and _is_forked(one)]

    def give_up(self) -> None:
        """Nothing is forked from the runtime template any more; it goes once what was has gone, and that is asked to."""
        self._given_up = True
        if self.runtime is None:
            return
        self.driver.log.say("template given up", level=RUNTIME)
        self.runtime.process.retire()
        loop = asyncio.get_running_loop()
        for residence in self.driver.residences.values():
            if self.leaves(residence):
                loop.call_soon(self.driver.tell, events.Outdated(residence.name))

    def leaves(self, residence: Residence) -> bool:
        """Whether the server was forked from a template that is to go."""
        owned = self.runtime is not None and self.runtime.pid != 0
        return self._given_up and owned and _is_forked(residence)

    # Before a start, and after.

    async def before(self, launch: Launch) -> None:
        """What a start of that model is to be forked from, where that is worth waiting for. Raises nothing."""
        if launch.engine_template:
            if not self.holds(launch.name):
                await self._build(launch)
        elif self.runtime is not None and launch.mode in FORKED:
            # What is still to be imported, a start from nothing would have to import as well.
            with suppress(StartFailed, TimeoutError):
                limit = self.driver.core.settings.start_deadline_s
                await asyncio.wait_for(asyncio.shield(self.runtime.process.ready), limit)

    async def _build(self, launch: Launch) -> None:
        held = self._begun(launch, ENGINE)
        if held is None:
            return
        self._engines[launch.name] = held
        if not await self._ready(held, ENGINE):
            await self.drop(launch.name)
            return
        self._tasks.spawn(self._watch(held))
        memory = await asyncio.to_thread(self.driver.meter.alone, held.pid) if held.pid else None
        if memory:
            self.driver.measured(launch.name, memory, TEMPLATE)

    async def _watch(self, held: HeldTemplate) -> None:
        await held.process.ended
        name = held.launch.name
        if self._engines.get(name) is held:
            del self._engines[name]
            self.driver.log.say("template gone", model=name, level=ENGINE)
            if name not in self.driver.residences:
                self.driver.tell(events.Outdated(name))

    def holds(self, model: str) -> bool:
        """Whether the model has a template, or it is being built."""
        return model in self._engines

    def engines(self) -> Iterator[tuple[str, HeldTemplate]]:
        """Engine templates by model."""
        yield from self._engines.items()

    def held(self, residence: Residence) -> int | None:
        """Bytes of a server and of its model's template. Blocks."""
        server, engine = self.driver.meter.tree(residence.ready.pid), self._engines.get(residence.name)
        beside = self.driver.meter.alone(engine.pid) if engine is not None and engine.pid else None
        return server if server is None else server + (beside or 0)

    async def drop(self, model: str) -> None:
        """End the model's template, if it has one; nothing of it is left then."""
        held = self._engines.pop(model, None)
        if held is None:
            return
        held.process.stop()
        await asyncio.wait([held.process.ended], timeout=PATIENCE_S)
        held.process.stop()
        await held.process.ended

    # Ends.

    def abort(self, model: str) -> None:
        """End the model's template if it is still being built."""
        held = self._engines.get(model)
        if held is not None and not held.process.ready.done():
            held.process.stop()

    def drain(self) -> None:
        """Build nothing more."""
        if self._again is not None:
            self._again.cancel()
        for held in [self.runtime, *self._engines.values()]:
            if held is not None and not held.process.ready.done():
                held.process.stop()

    async def close(self) -> None:
        """End all; servers that were forked from them have ended, or end with them."""
        self.drain()
        for name in list(self._engines):
            await self.drop(name)
        if self.runtime is not None:
            self.runtime.process.stop()
        await self._tasks.settled()

    def _begun(self, launch: Launch, level: str) -> HeldTemplate | None:
        driver = self.driver
        driver.log.say("template", model=launch.name, level=level)
        try:
            process = driver.servers.begin_template(launch, level, driver.core.settings.start_deadline_s)
        except OSError as error:
            driver.log.say("template failed", model=launch.name, level=level, reason=str(error))
            return None
        return HeldTemplate(launch, process)

    async def _ready(self, held: HeldTemplate, level: str) -> bool:
        name = held.launch.name
        try:
            ready = await held.process.ready
        except StartFailed as reason:
            self.driver.log.say("template failed", model=name, level=level, reason=str(reason))
            return False
        held.pid = ready.pid
        self.driver.log.say("template ready", model=name, level=level, pid=ready.pid)
        return True


def _is_forked(residence: Residence) -> bool:
    """Whether the server came from a runtime template."""
    return residence.ready.mode == f"template-{RUNTIME}"
