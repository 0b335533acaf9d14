"""A server that makes no progress is killed and replaced; a busy server is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.fake_upstream import FakeServer, Stage, run, staged, wait_until

HANG_S = 1.0


async def _hung(stage: Stage, server: FakeServer) -> str:
    """Wait until the host has killed the server, and return the reason in the model's status."""
    await server.ended
    await wait_until(lambda: stage.model("a")["state"] == "failed")
    return str(stage.model("a")["error"])


def test_server_is_killed_when_its_api_does_not_answer(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
            await stage.ask(model="a", prompt=1)
            server = stage.servers.last("a")
            lines = asyncio.create_task(stage.events(model="a", prompt=2, pause_s=60))
            await wait_until(lambda: len(server.asked) == 2)
            server.hangs = True
            assert "the API server did not answer for 1 s" in await _hung(stage, server)
            assert b"the server of a hung and was killed" in (await lines)[-1]
            # The cause was not the model: it starts again at once.
            assert stage.model("a")["failures"] == 0
            assert (await stage.ask(model="a", prompt=3))[0] == 200

    run(work())


def test_server_is_killed_when_its_engine_makes_no_step(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
            stage.servers.metrics = "vllm:num_requests_running 1\n"
            status, _, document = await stage.ask(model="a", prompt=1, pieces=1, pause_s=60)
            assert status == 502 and "hung and was killed" in document["error"]["message"]
            assert "the engine made no step for 1 s" in stage.model("a")["error"]

    run(work())


def test_server_is_not_killed_when_it_makes_progress(tmp_path: Path) -> None:
    async def serves(progress: str) -> None:
        directory = tmp_path / progress
        directory.mkdir()
        async with staged(directory, hang_timeout_s=HANG_S) as stage:
            stage.servers.metrics = "" if progress == "no counters" else "vllm:steps 1\n"
            stage.servers.computes_s = 1.0 if progress == "processor" else 0.0
            body: dict[str, Any] = {"pieces": 1, "pause_s": 3.0}
            asked = asyncio.create_task(_answer(stage, body if progress != "no request" else {}))
            for number in range(60):
                if progress == "counters":
                    stage.servers.metrics = f"vllm:steps {number}\n"
                await asyncio.sleep(0.05)
            assert await asked == 200, progress
            assert not stage.servers.last("a").was_killed and len(stage.servers.begun) == 1, progress

    async def work() -> None:
        kinds = ("counters", "processor", "no counters", "no request")
        await asyncio.gather(*map(serves, kinds))

    run(work())


async def _answer(stage: Stage, body: dict[str, Any]) -> int:
    async with stage.post(model="a", prompt=1, **body) as answer:
        await answer.read()
        return int(answer.status)


def test_server_is_not_killed_when_its_client_does_not_read(tmp_path: Path) -> None:
    async def work() -> None:
        async with staged(tmp_path, hang_timeout_s=HANG_S) as stage:
            stage.servers.metrics = "vllm:steps 1\n"
            async with stage.post(model="a", prompt="x" * 100_000, stream=True, pieces=400) as answer:
                await asyncio.sleep(2.5 * HANG_S)
                assert not stage.servers.last("a").was_killed
                assert len([line async for line in answer.content if line.startswith(b"data: {")]) == 400

    run(work())
