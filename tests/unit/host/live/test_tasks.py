"""Background tasks: awaited at the end, and errors are logged."""

from __future__ import annotations

import asyncio
import io
import json

from coldstart.host.live.log import Log
from coldstart.host.live.tasks import Tasks


def test_errors_are_logged_and_later_tasks_are_awaited() -> None:
    sink = io.StringIO()
    done: list[str] = []

    async def work() -> None:
        tasks = Tasks(Log(sink))

        async def inner() -> None:
            await asyncio.sleep(0)
            done.append("inner")
            raise ValueError("no")

        async def outer() -> None:
            tasks.spawn(inner())

        tasks.spawn(outer())
        await tasks.wait()
        tasks.spawn(asyncio.sleep(60))
        tasks.cancel()
        await tasks.wait()

    asyncio.run(work())
    said = json.loads(sink.getvalue())
    assert done == ["inner"] and (said["event"], said["reason"]) == ("internal error", "ValueError: no")
