"""One server of the host, from the order to start it until nothing of it is left; meanwhile it may sleep and wake.

vLLM's sleep levels are asked for over its own endpoints (`/sleep?level=N`, `/wake_up`), which it has with
`--enable-sleep-mode` on platforms that can; a tier is called `asleep-N`. In the tier `template` no server runs.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from coldstart.gateway.servers import ModelServer, Ready, StartFailed
from coldstart.gateway.upstream import Replica, Upstream
from coldstart.host import events
from coldstart.host.launches import Launch
from coldstart.host.specification import STOPPED, TEMPLATE

if TYPE_CHECKING:
    from coldstart.gateway.driver import Driver

# A server that was asked to end and has not after so long is ended.
PATIENCE_S = 20.0
MEASURE_FIRST_S, MEASURE_EVERY_S = 1.0, 30.0
_SLEEP = "asleep-"


class Residence(Replica):
    """A server of this host."""

    def __init__(self, driver: Driver, launch: Launch, server: ModelServer, began: float) -> None:
        super().__init__(launch.name, Upstream(server.socket))
        self.driver, self.launch, self.server = driver, launch, server
        self.began = began
        self.ready = Ready("", 0, {})
        self._told_to_end = False
        self._reason = ""

    @property
    def serves(self) -> bool:
        """Whether it is up, and to stay."""
        return bool(self.start_s) and not self._told_to_end

    async def live(self) -> None:
        """Until nothing of it is left. Tells when it is ready; `last_word` is to be told afterwards."""
        try:
            if await self._came_up():
                await self._serve()
        finally:
            self.upstream.close()
            self._reason = self._reason or await self.server.ended

    async def _came_up(self) -> bool:
        try:
            self.ready = await self.server.ready
        except StartFailed as reason:
            await self.server.ended
            self._reason = self._reason or str(reason)
            self.driver.start_failed(self.name, self._reason, self.driver.clock() - self.began)
            return False
        self.start_s, self.mode = self.driver.clock() - self.began, self.ready.mode
        self.driver.started(self, self.mode, self.start_s)
        return True

    async def _serve(self) -> None:
        """Measure it from time to time until it ends."""
        wait = MEASURE_FIRST_S
        while not self.server.ended.done():
            await asyncio.wait([self.server.ended], timeout=wait)
            wait = MEASURE_EVERY_S
            if self.server.ended.done() or self._told_to_end:
                continue
            with suppress(OSError):
                memory = await asyncio.to_thread(self.driver.templates.held, self)
                if memory is not None and not self.server.ended.done():
                    self.driver.measured(self.name, memory)

    def last_word(self) -> events.Left | events.Failed:
        """How it ended: by order, or by itself."""
        if self._told_to_end and self.start_s:
            return events.Left(self.name)
        if self.start_s:
            self.driver.log.say("server died", model=self.name, reason=self._reason)
        return events.Failed(self.name, self._reason)

    async def leave(self, tier: str) -> None:
        """Go to that tier."""
        sleeps = tier not in (STOPPED, TEMPLATE)
        if not sleeps or not await self._asked(f"/sleep?level={tier.removeprefix(_SLEEP)}"):
            self.driver.log.say("stop", model=self.name, tier=tier)
            await self.end()
            return
        self.driver.log.say("sleep", model=self.name, tier=tier)
        self.driver.tell(events.Left(self.name))
        if self.driver.outdated(self.launch):
            self.driver.tell(events.Outdated(self.name))

    async def wake(self, tier: str) -> None:
        """Serve again from a sleep."""
        began = self.driver.clock()
        if await self._asked("/wake_up"):
            self.start_s = self.driver.clock() - began
            self.driver.started(self, tier, self.start_s)
            return
        reason = "its server did not wake up"
        self.start_s = 0.0
        self._reason = reason
        self.driver.start_failed(self.name, reason, self.driver.clock() - began)
        await self.end()

    async def _asked(self, path: str) -> bool:
        try:
            async with await self.upstream.request("POST", path) as answer:
                await answer.read()
                return answer.status == 200
        except OSError:  # TimeoutError is one
            return False

    async def end(self, reason: str = "") -> None:
        """Ask it to end, and once more when it takes too long; `reason` is for those who wait for it."""
        self._told_to_end = True
        self._reason = self._reason or reason
        self.server.stop()
        await asyncio.wait([self.server.ended], timeout=PATIENCE_S)
        self.server.stop()

    def kill(self) -> None:
        """End it at once."""
        self._told_to_end = True
        self.server.stop()
        self.server.stop()
