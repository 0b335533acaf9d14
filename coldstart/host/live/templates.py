"""Runtime template of a host: a process that has imported vLLM, and from which the servers of all models are forked.

The template shortens every start of a stopped model. The host reserves memory for it as long as the configuration requires a
template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from coldstart.host.launches import FORKED, Launch
from coldstart.host.live.log import BackgroundTasks, Log
from coldstart.host.live.servers import ModelServer, ServerStarter, StartFailedError, stop_by_force
from coldstart.host.live.starter import StartOrder
from coldstart.host.specification import HostSettings
from coldstart.host.status import HostFacts

RUNTIME = "runtime"
# Seconds after which a template that failed or exited is restarted. A killed template is restarted immediately.
AGAIN_S = 60.0


class RuntimeTemplate:
    """Runtime template of one host. If it fails or exits, it is restarted."""

    def __init__(self, servers: ServerStarter, log: Log, facts: HostFacts) -> None:
        self.servers, self.log, self.facts = servers, log, facts
        self._process: ModelServer | None = None
        # Includes retired templates whose servers are still running.
        self._all: set[ModelServer] = set()
        self._launches: list[Launch] = []
        self._ready_timeout_s, self._is_draining, self._tried = 0.0, False, 0
        self._tasks = BackgroundTasks(log)
        self._again: asyncio.TimerHandle | None = None

    def configure(self, launches: Collection[Launch], settings: HostSettings) -> None:
        """Start a template if any model uses one. Otherwise retire it, so that it exits after its last forked server."""
        self._ready_timeout_s = settings.ready_timeout_s
        self._launches = [one for one in launches if settings.runtime_template and one.mode in FORKED]
        if self._launches and self._process is None:
            self._begin()
        elif not self._launches and self._process is not None:
            self.log.write("template retired", level=RUNTIME)
            self._process.retire()
            self._process = None

    def _begin(self) -> None:
        if self._is_draining or self._process is not None or not self._launches:
            return
        # Each attempt uses another model's arguments, in case some arguments cause the failure.
        launch, self._tried = self._launches[self._tried % len(self._launches)], self._tried + 1
        self.log.write("template", model=launch.name, level=RUNTIME)
        try:
            self._process = process = self.servers.order_start(
                StartOrder(launch, self._ready_timeout_s, template=RUNTIME)
            )
        except OSError as error:
            self._fail(launch, str(error))
            self._begin_later(AGAIN_S)
            return
        self._all.add(process)
        process.ended.add_done_callback(lambda _: self._all.discard(process))
        self._tasks.spawn(self._live(launch, process))

    async def _live(self, launch: Launch, process: ModelServer) -> None:
        try:
            ready = await process.ready
        except StartFailedError as reason:
            if self._process is process:
                self._fail(launch, str(reason))
        else:
            self.facts.template_error = ""
            self.log.write("template ready", model=launch.name, level=RUNTIME, pid=ready.pid)
        await process.ended
        if self._process is process:
            self._process = None
            self._begin_later(0.0 if process.was_killed else AGAIN_S)

    def _begin_later(self, again_s: float) -> None:
        self.log.write("template gone", level=RUNTIME, again_s=again_s)
        self._again = asyncio.get_running_loop().call_later(again_s, self._begin)

    def _fail(self, launch: Launch, reason: str) -> None:
        self.log.write("template failed", model=launch.name, level=RUNTIME, reason=reason)
        self.facts.template_error = reason

    async def wait_until_ready(self, launch: Launch) -> bool:
        """Wait until the template is ready or has failed, if this launch uses it. Return False on a timeout.

        Waiting costs no time, because without the template, the start would have to import the same modules.
        """
        if self._process is None or launch.mode not in FORKED:
            return True
        done, _ = await asyncio.wait([self._process.ready], timeout=self._ready_timeout_s)
        return bool(done)

    def drain(self) -> None:
        """Stop a template that is still starting, and do not start another template."""
        self._is_draining = True
        if self._again is not None:
            self._again.cancel()
        if self._process is not None and not self._process.ready.done():
            self._process.stop()

    async def close(self) -> None:
        """Stop the template and all servers that were forked from it."""
        self.drain()
        for process in list(self._all):
            await stop_by_force(process)
        await self._tasks.wait()
