"""A server that makes no progress is killed and replaced; a busy server is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.fake_upstream import FakeServer, Stage, staged, wait_until

HANG_S = 1.0


async def _hung(stage: Stage, server: FakeServer) -> str:
    """Wait until the host has killed the server, and return the reason in the model's status."""
    await server.ended
    await wait_until(lambda: stage.model("a")["state"] == "failed")
    return str(stage.model("a")["error"])


async def test_server_is_killed_when_its_api_does_not_answer(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
        await stage.ask(model="a", prompt=1)
        server = stage.servers.last("a")
        lines = asyncio.create_task(stage.events(model="a", prompt=2, pause_s=60))
        await wait_until(lambda: len(server.asked) == 2)
        server.hangs = True
        assert "the API server did not respond for 1 s" in await _hung(stage, server)
        assert b"the server of a hung and was killed" in (await lines)[-1]
        # The cause was not the model: it starts again at once.
        assert stage.model("a")["failures"] == 0
        assert (await stage.ask(model="a", prompt=3))[0] == 200


async def test_server_is_killed_when_a_process_of_it_is_stopped(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
        asked = asyncio.create_task(stage.ask(model="a", prompt=1, pieces=1, pause_s=60))
        await stage.servers.begins(1)
        stage.servers.last("a").stopped = True
        status, _, document = await asked
        assert status == 502 and "hung and was killed" in document["error"]["message"]
        assert "one of its processes was suspended by a signal for 1 s" in stage.model("a")["error"]


async def test_server_is_not_killed_when_a_request_waits_for_it(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
        assert (await stage.ask(model="a", prompt=1, pieces=1, pause_s=2.5 * HANG_S))[0] == 200
        assert not stage.servers.last("a").was_killed and len(stage.servers.begun) == 1
