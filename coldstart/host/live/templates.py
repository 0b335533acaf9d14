"""Runtime template of a host: a process that has imported vLLM, and from which the servers of all models are forked.

The template shortens every start of a stopped model. The host reserves memory for it as long as the configuration requires a
template.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from contextlib import suppress

from coldstart.host.launches import FORKED, Launch
from coldstart.host.live.log import BackgroundTasks, Log
from coldstart.host.live.servers import ModelServer, ServerStarter, StartFailedError, stop_by_force
from coldstart.host.live.starter import StartOrder
from coldstart.host.specification import HostSettings
from coldstart.host.status import HostFacts
from coldstart.system.proc import processes

RUNTIME = "runtime"
# Seconds after which a template is restarted if its start failed or if ENDS others have ended within ENDS_S. Another lost
# template is restarted at once. A start waits at most REPORT_S for the report that the template has exited.
AGAIN_S, ENDS, ENDS_S, REPORT_S = 60.0, 3, 300.0, 5.0


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
        self._ends_s = deque([-ENDS_S] * ENDS, ENDS)

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
            order = StartOrder(launch, self._ready_timeout_s, template=RUNTIME)
            self._process = process = self.servers.order_start(order)
        except OSError as error:
            self._begin_again(launch, str(error), AGAIN_S)
            return
        self._all.add(process)
        process.ended.add_done_callback(lambda _: self._all.discard(process))
        self._tasks.spawn(self._live(launch, process))

    async def _live(self, launch: Launch, process: ModelServer) -> None:
        with suppress(StartFailedError):
            ready = await process.ready
            self.facts.template_error = ""
            self.log.write("template ready", model=launch.name, level=RUNTIME, pid=ready.pid)
        reason = await process.ended
        if self._process is not process:
            return
        self._process, failure, now = None, process.ready.exception(), asyncio.get_running_loop().time()
        is_lost = failure is None or process.was_killed
        again_s = 0.0 if is_lost and now >= self._ends_s[0] + ENDS_S else AGAIN_S
        self._ends_s.append(now)
        self._begin_again(launch, str(failure or reason), again_s)

    def _begin_again(self, launch: Launch, reason: str, again_s: float) -> None:
        self.log.write("template gone", model=launch.name, level=RUNTIME, reason=reason, again_s=again_s)
        if again_s:
            self.facts.template_error = reason
            self._again = asyncio.get_running_loop().call_later(again_s, self._begin)
        else:
            self._begin()

    async def wait_until_ready(self, launch: Launch) -> bool:
        """Wait until the template is ready or has failed, if this launch uses it. Return False on a timeout.

        Without the template, each start would import the same modules. That is faster for a single start, but a lost
        template ends the servers of all models, which then start at the same time.
        """
        while launch.mode in FORKED and (process := self._process) is not None:
            if not (await asyncio.wait([process.ready], timeout=self._ready_timeout_s))[0]:
                return False
            # The servers of a lost template exit with it, and may be reported before it.
            if not process.ready.exception() and not processes.read_identity(process.ready.result().pid or 0):
                await asyncio.wait([process.ended], timeout=REPORT_S)
            if self._process is process:
                break
        return True

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
