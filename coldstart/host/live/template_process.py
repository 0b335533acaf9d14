"""One template process of a host, and its end when a signal has stopped it."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from dataclasses import dataclass

from coldstart.host.launches import Launch
from coldstart.host.live.log import Log
from coldstart.host.live.servers import ModelServer, StartFailedError
from coldstart.system.proc.processes import is_stopped

# Interval in seconds between checks; a template that is stopped at two checks in a row is ended.
CHECK_S = 2.0


@dataclass(eq=False)
class TemplateProcess:
    """A template process; `pid` is 0 until it is ready, and for the user's own template, which is used but never ended."""

    launch: Launch
    process: ModelServer
    pid: int = 0

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

    async def end_if_stopped(self, servers: Sized, log: Log) -> None:
        """Wait for its end. If it is stopped, kill it; with `servers` hide it, and end it after its last forked server."""
        was_stopped = False
        while not self.process.ended.done():
            await asyncio.wait([self.process.ended], timeout=CHECK_S)
            stopped = await asyncio.to_thread(self._is_stopped)
            if stopped and was_stopped:
                if not self.gone.done():
                    log.say("template stopped", model=self.launch.name, pid=self.pid or None)
                if not servers or not self.process.ready.done():
                    self.process.kill()
                elif not self.gone.done():
                    self.process.retire()
                    self._lose()
            was_stopped = stopped

    def _is_stopped(self) -> bool:
        # The tree of a ready template contains its servers.
        return is_stopped(self.pid) if self.pid else self.process.is_stopped()
