"""Work that goes on beside its owner: held until it is done, and what goes wrong in it is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from coldstart.host.live.log import Log


class Tasks:
    """Those of one owner; the event loop itself holds a task only weakly."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.say("internal error", reason=f"{type(error).__name__}: {error}")

    async def settled(self) -> None:
        """Wait until nothing is left, what was begun meanwhile included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """End all of it."""
        for task in self._tasks:
            task.cancel()
