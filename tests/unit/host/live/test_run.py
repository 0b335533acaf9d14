"""The host's process without its servers: listening, directory, reload of the file, and exit."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.fake_upstream import TWO, staged, wait_until
from support.hosted import Served

from coldstart.host import configuration

pytestmark = pytest.mark.usefixtures("runtime_home")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(tmp_path, monkeypatch)


def test_changed_file_is_loaded_and_an_invalid_one_is_not(served: Served) -> None:
    async def work(served: Served) -> None:
        driver = served.host.driver
        served.write(memory=20, max_held=3)
        await wait_until(lambda: driver.core.settings.max_held == 3)
        served.write(memory=20, max_held="many")
        await wait_until(lambda: driver.facts.config_error)
        assert "max_held" in driver.facts.config_error and driver.core.settings.max_held == 3
        served.write(memory=30)
        await wait_until(lambda: driver.core.settings.memory == 30)
        assert driver.facts.config_error == ""
        os.kill(os.getpid(), signal.SIGTERM)

    assert served.run(work) == 143
    assert served.events() == [
        "listening", "configuration read", "configuration refused", "configuration read", "stopping", "ended"
    ]  # fmt: skip


def test_sighup_reads_the_file_that_has_not_changed(served: Served) -> None:
    async def work(served: Served) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await wait_until(lambda: "configuration read" in served.events())
        os.kill(os.getpid(), signal.SIGINT)

    assert served.run(work) == 130


@pytest.mark.parametrize("signals", [1, 2])
def test_first_signal_waits_for_streams_and_second_does_not(served: Served, signals: int) -> None:
    async def work(served: Served) -> None:
        import aiohttp

        body = {"model": "a", "prompt": "x", "stream": True, "pieces": 40, "pause_s": 0.01}
        async with (
            aiohttp.ClientSession() as client,
            client.post(served.urls[0] + "/v1/completions", json=body) as answer,
        ):
            await answer.content.readline()
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0)
            rest = await answer.content.read()
            assert (b"[DONE]" in rest) == (signals == 1)

    assert served.run(work) == 143
    assert served.events()[-1] == "ended"
    assert not served.servers.begun[0].socket.exists()


async def test_a_reload_disturbs_no_stream(tmp_path: Path) -> None:
    async with staged(tmp_path, memory=20) as stage:
        streams = [
            asyncio.create_task(stage.events(model=name, prompt=i, pieces=20, pause_s=0.005))
            for i in range(20)
            for name in "ab"
        ]
        for limit in range(10):
            await asyncio.sleep(0.005)
            table = {"memory": 20 + limit, "policy": "iam", "models": TWO}
            stage.driver.configure(configuration.parse(table))
        assert {len(lines) for lines in await asyncio.gather(*streams)} == {21}
        assert len(stage.servers.begun) == 2
