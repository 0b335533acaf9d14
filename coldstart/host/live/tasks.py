"""Background tasks of one owner: referenced until they are done, with their errors logged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from coldstart.host.live.log import Log


class Tasks:
    """Tasks of one owner; the event loop itself holds only weak references to tasks."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.say("internal error", reason=f"{type(error).__name__}: {error}")

    async def wait(self) -> None:
        """Wait until no task is left, including tasks that were spawned meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
