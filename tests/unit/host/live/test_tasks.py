"""Work beside its owner: waited for to the last, and logged where it goes wrong."""

from __future__ import annotations

import asyncio
import io
import json

from coldstart.host.live.log import Log
from coldstart.host.live.tasks import Tasks


def test_what_goes_wrong_is_logged_and_what_was_begun_meanwhile_is_waited_for() -> None:
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
        await tasks.settled()
        tasks.spawn(asyncio.sleep(60))
        tasks.cancel()
        await tasks.settled()

    asyncio.run(work())
    said = json.loads(sink.getvalue())
    assert done == ["inner"] and (said["event"], said["reason"]) == ("internal error", "ValueError: no")
