"""One server of the host, from the start order until its process has ended; in between it may sleep and wake up.

The tiers `asleep-N` are vLLM's sleep levels (`/sleep?level=N`, `/wake_up`), which vLLM offers with
`--enable-sleep-mode` on platforms that support it. In the tier `template` no server runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from coldstart.host import events
from coldstart.host.launches import Launch
from coldstart.host.live import headers
from coldstart.host.live.hang import HangDetector
from coldstart.host.live.log import Log
from coldstart.host.live.servers import ModelServer, Ready, StartFailedError
from coldstart.host.live.upstream import Replica, Upstream
from coldstart.host.specification import STOPPED, TEMPLATE
from coldstart.system.devices import nvml
from coldstart.system.proc import processes


class Meter:
    """Memory of processes, in bytes; None if it cannot be measured."""

    def tree(self, pid: int) -> int | None:
        """Return the memory of a process and its descendants."""
        return None

    def alone(self, pid: int) -> int | None:
        """Return the memory of one process."""
        return None

    def gpu_memory(self, pid: int) -> int | None:
        """Return the GPU memory of a process and its descendants."""
        return None


class GpuMemory(Meter):
    """GPU memory that the driver reports. Reservations remain as estimated."""

    def gpu_memory(self, pid: int) -> int | None:
        """Return the GPU memory of a process and its descendants. Raises ProcessLookupError if the process has ended."""
        known = nvml.process_memory()
        if not known:
            return None
        sizes = [known[one] for one in processes.tree(pid) if one in known]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)


class ProcessorMemory(Meter):
    """Memory on the CPU backend: proportional set sizes, so that shared pages are counted once."""

    def tree(self, pid: int) -> int | None:
        """Return the memory of a process and its descendants. Raises ProcessLookupError if the process has ended."""
        return processes.memory_bytes(pid)

    def alone(self, pid: int) -> int | None:
        """Return the memory of one process."""
        return processes.pss_bytes([pid])


class ServerObserver(Protocol):
    """Observer of the servers of a host."""

    def report_ready(self, launch: Launch, ready: Ready, mode: str, seconds: float) -> None:
        """Report that the server is ready, or awake again, `seconds` after the order."""

    def report_failed_start(self, model: str, reason: str, seconds: float) -> None:
        """Report that the start, or the wake-up, failed after `seconds`."""

    def report_asleep(self, launch: Launch) -> None:
        """Report that the server sleeps."""

    def report_memory(self, model: str, memory: int) -> None:
        """Report that the server and its template hold `memory` bytes."""

    async def measure(self, model: str, pid: int) -> int | None:
        """Return the bytes that the server's process and the model's template hold, or None. Record its GPU memory.

        Raises:
            ProcessLookupError: The process has ended.
        """


# Time in seconds that a server has to end before it is ended by force.
PATIENCE_S = 20.0
# Time in seconds in which its supervisor ends it by force, before all its processes are killed.
FORCE_S = 5.0
MEASURE_FIRST_S, MEASURE_EVERY_S = 1.0, 30.0
# Time in seconds above which the wait for a template is a phase of the start; a ready template takes less.
WAIT_S = 0.001
_SLEEP = "asleep-"


class Residence(Replica):
    """A server of this host.

    `began` is the time on `clock` at which its start was ordered; before the server began, the start waited
    `waited_s` for its template.
    """

    def __init__(
        self,
        launch: Launch,
        server: ModelServer,
        began: float,
        waited_s: float = 0.0,
        *,
        observer: ServerObserver,
        log: Log,
        clock: Callable[[], float],
        hang_timeout_s: Callable[[], float],
    ) -> None:
        super().__init__(launch.name, Upstream(server.socket), headers.find_server_key(launch.args))
        self.hang_timeout_s = hang_timeout_s
        self.launch, self.server, self.began = launch, server, began
        self.waited_s = waited_s
        self.observer, self.log, self.clock = observer, log, clock
        self.ready = Ready("", 0, {})
        self._ending = False
        self._reason = ""

    @property
    def serves(self) -> bool:
        """Return whether the server is ready and not ending."""
        return bool(self.start_s) and not self._ending

    async def live(self) -> None:
        """Run until the server has ended; report when it is ready. `end_event` then returns how it ended."""
        watch = asyncio.create_task(self._end_if_hung())
        try:
            if await self._came_up():
                await self._serve()
        finally:
            watch.cancel()
            self.upstream.close()
            self._reason = self._reason or await self.server.ended

    async def _end_if_hung(self) -> None:
        """Kill the server if it hangs; its end is then a failure."""
        found = await HangDetector(self.server, self.server.socket, self.upstream).find(self.hang_timeout_s)
        self.fault, self._reason = "hung and was killed", f"the server hung and was killed: {found}"
        self.log.write("server hung", model=self.name, reason=found)
        self.server.kill()

    async def _came_up(self) -> bool:
        try:
            self.ready = await self.server.ready
        except StartFailedError as reason:
            await self.server.ended
            self._reason = self._reason or str(reason)
            self.observer.report_failed_start(self.name, self._reason, self.clock() - self.began)
            return False
        if self.waited_s > WAIT_S:
            self.ready = self.ready.add_wait(self.waited_s)
        self.start_s, self.mode = self.clock() - self.began, self.ready.mode
        self.observer.report_ready(self.launch, self.ready, self.mode, self.start_s)
        return True

    async def _serve(self) -> None:
        """Measure the server's memory periodically until it ends."""
        wait = MEASURE_FIRST_S
        while not self.server.ended.done():
            await asyncio.wait([self.server.ended], timeout=wait)
            wait = MEASURE_EVERY_S
            if self.server.ended.done() or self._ending:
                continue
            with suppress(OSError):
                memory = await self.observer.measure(self.name, self.ready.pid)
                if memory is not None and not self.server.ended.done():
                    self.observer.report_memory(self.name, memory)

    def end_event(self) -> events.Left | events.Failed:
        """Return the event of the server's end: ordered, or a failure."""
        if self._ending and self.start_s:
            return events.Left(self.name)
        if self.start_s:
            self.log.write("server died", model=self.name, reason=self._reason)
        return events.Failed(self.name, self._reason, external=self.server.was_killed or bool(self.fault))

    async def leave(self, tier: str, reason: str) -> None:
        """Put the server to sleep for a sleeping tier; end it for another tier, or if it cannot sleep."""
        sleeps = tier not in (STOPPED, TEMPLATE)
        if not sleeps or not await self._post(f"/sleep?level={tier.removeprefix(_SLEEP)}"):
            self.log.write("stop", model=self.name, tier=tier, reason=reason)
            await self.end()
            return
        self.log.write("sleep", model=self.name, tier=tier, reason=reason)
        self.observer.report_asleep(self.launch)

    async def wake(self, tier: str) -> None:
        """Wake the server up; end it if that fails."""
        began = self.clock()
        if await self._post("/wake_up"):
            self.start_s = self.clock() - began
            # The stages and fallbacks in the ready file are those of the start, not of this waking.
            awake = replace(self.ready, document={})
            self.observer.report_ready(self.launch, awake, tier, self.start_s)
            return
        reason = "the server did not wake up"
        self.start_s = 0.0
        self._reason = reason
        self.observer.report_failed_start(self.name, reason, self.clock() - began)
        await self.end()

    async def _post(self, path: str) -> bool:
        try:
            async with await self.upstream.request("POST", path) as answer:
                await answer.read()
                return answer.status == 200
        except OSError:  # includes TimeoutError
            return False

    async def end(self, reason: str = "") -> None:
        """Ask the server to end, and force it after PATIENCE_S; `reason` is reported to waiting requests."""
        self._ending = True
        self._reason = self._reason or reason
        await end_by_force(self.server)

    def kill(self) -> None:
        """End the server at once."""
        self._ending = True
        self.server.stop()
        self.server.stop()


async def end_by_force(server: ModelServer) -> None:
    """Ask a server to end, then have its supervisor end it, then kill all its processes; return when it has ended."""
    for ask, wait_s in ((server.stop, PATIENCE_S), (server.stop, FORCE_S), (server.kill, None)):
        ask()
        if (await asyncio.wait([server.ended], timeout=wait_s))[0]:
            return
