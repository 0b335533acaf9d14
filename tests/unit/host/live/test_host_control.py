"""Control of a running host over HTTP and by its commands: load, unload, logs, reload and stop."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from support.client_key_files import write_clients
from support.fake_upstream import TWO, staged, wait_until
from support.hosted import Served
from tools.forked import coldstart

from coldstart.host import configuration
from coldstart.host.endpoint import ClientKeys

UNCHANGED = "nothing changed since the host last read its files\n"


async def test_load_returns_once_the_model_is_ready(tmp_path: Path) -> None:
    async with staged(tmp_path, hold=True) as stage:
        loading = asyncio.create_task(stage.send("/load/alpha"))
        await stage.servers.begins(1)
        assert not loading.done()
        stage.servers.begun[0].gate.set()
        status, said = await loading
        assert (status, said["model"], said["state"], said["mode"]) == (200, "a", "ready", "fake")
        assert stage.servers.begun[0].asked == [] and stage.idle()
        assert (await stage.send("/load/a"))[0] == 200
        assert len(stage.servers.begun) == 1
        model, requests = stage.model("a"), stage.driver.status()["requests"]
        assert (model["starts"], model["requests"], model["hits"]) == (1, 0, 0)
        assert (requests["total"], requests["hits"]) == (0, 0)


async def test_load_reports_why_a_model_does_not_start(tmp_path: Path) -> None:
    models = {**TWO, "big": {"memory": 100, "start_s": 1.0}}
    async with staged(tmp_path, models) as stage:
        stage.servers.failing["b"] = "no weights"
        status, said = await stage.send("/load/nobody")
        assert status == 404 and "nobody" in said["error"]["message"]
        status, said = await stage.send("/load/big")
        assert status == 507 and re.fullmatch("model big needs .* for it", said["error"]["message"])
        status, said = await stage.send("/load/b")
        assert status == 503 and "no weights" in said["error"]["message"]
        status, said = await stage.send("/load/a?wait=maybe")
        assert status == 400 and "maybe" in said["error"]["message"]
        assert stage.idle()


async def test_load_is_withdrawn_when_its_client_disconnects(tmp_path: Path) -> None:
    async with staged(tmp_path, hold=True) as stage:
        starting = asyncio.create_task(stage.send("/load/a"))
        await stage.servers.begins(1)
        waiting = asyncio.create_task(stage.send("/load/b"))
        await wait_until(lambda: stage.model("b")["held"] == 1)
        waiting.cancel()
        await wait_until(lambda: stage.model("b")["held"] == 0)
        stage.servers.begun[0].gate.set()
        assert (await starting)[0] == 200


@pytest.fixture
def served(tmp_path: Path, runtime_home: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(tmp_path, monkeypatch)


async def _command(served: Served, *words: str, code: int = 0) -> str:
    """Run `coldstart host WORDS` against the host with the operator's key, if it has one; return its output."""
    key = served.host.endpoint.api_key
    file = served.file.with_name("operator.key")
    if key is not None:
        file.touch(0o600)
        file.write_text(key)
    arguments = ["host", *words, "--url", served.urls[0], *(["--api-key-file", str(file)] if key else [])]
    done = await asyncio.to_thread(coldstart, arguments, Path.cwd())
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_commands_control_a_running_host(served: Served) -> None:
    frozen = gc.get_freeze_count()

    async def work(served: Served) -> None:
        assert "a is ready after" in await _command(served, "load", "a")
        assert gc.get_freeze_count() > frozen, "a full collection stops all streams, so it visits little"
        assert "a was already ready\n" in await _command(served, "load", "a")
        assert "a said so" in await _command(served, "logs", "a")
        assert "no server of model b" in await _command(served, "logs", "b", code=1)
        assert "`nobody` does not exist" in await _command(served, "load", "nobody", code=1)
        assert " s; evicted a\n" in await _command(served, "load", "b")
        assert " s; evicted b\n" in await _command(served, "load", "a")
        assert "unloading a" in await _command(served, "unload")
        await wait_until(lambda: served.host.driver.core.models["a"].state == "stopped")
        assert await _command(served, "unload", "a") == "a is not running\n"
        assert await _command(served, "unload") == "no model to unload\n"
        assert "b is starting" in await _command(served, "load", "b", "--no-wait")
        follow = f"-m coldstart.commands.cli host logs b -f --url {served.urls[0]}".split()
        following = await asyncio.create_subprocess_exec(sys.executable, *follow, stdout=subprocess.PIPE)
        assert following.stdout is not None
        assert await following.stdout.readline() == b"b said so\n"
        assert "the host has stopped\n" in await _command(served, "stop")
        assert await following.wait() == 0

    assert served.run(work) == 143


def test_reload_returns_the_changes_and_keeps_the_configuration_on_an_error(served: Served) -> None:
    async def work(served: Served) -> None:
        assert await _command(served, "reload") == UNCHANGED
        # The watcher may apply the file first: change it and read it without a pause between.
        async with aiohttp.ClientSession() as client:
            served.file.unlink()
            async with client.post(served.urls[0] + "/reload", json={}) as answer:
                assert answer.status == 400 and "cannot read the host file" in await answer.text()
            served.write(memory=20, max_held=3)
            async with client.post(served.urls[0] + "/reload", json={}) as answer:
                said = await answer.json()
        assert served.host.driver.core.settings.max_held == 3
        assert said["models"] == ["a", "b"] and said["added"] == []
        served.write(memory="much")
        assert "invalid size 'much'" in await _command(served, "reload", code=1)
        assert served.host.driver.core.settings.max_held == 3
        os.kill(os.getpid(), signal.SIGTERM)

    assert served.run(work) == 143


def test_reload_revokes_the_keys_of_clients_and_reports_a_file_that_cannot_be_used(
    tmp_path: Path, runtime_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ClientKeys(write_clients(tmp_path, {"laptop": "", "ci": ""}))
    served = Served(tmp_path, monkeypatch, api_key="operators-key", client_keys=keys)
    refused = "client keys not applied, the previous keys remain valid: "

    async def work(served: Served) -> None:
        write_clients(tmp_path, {"laptop": ""})
        assert await _command(served, "reload") == UNCHANGED
        keys.file.unlink()
        assert "cannot read the client key file" in await _command(served, "reload", code=1)
        assert f"{refused}cannot read the client key file" in await _command(served, "status")
        write_clients(tmp_path, {"laptop": ""})
        (tmp_path / "laptop.key").unlink()
        assert f"cannot read {tmp_path / 'laptop.key'}" in await _command(served, "reload", code=1)
        document = json.loads(await _command(served, "status", "--format", "json"))
        assert "laptop.key" in document["host"]["client_keys_error"] and keys.find(b"key-of-laptop")
        write_clients(tmp_path, {"laptop": ""})
        assert await _command(served, "reload") == UNCHANGED
        assert refused not in await _command(served, "status")
        keys.file.write_text("# nobody\n")
        assert await _command(served, "reload") == UNCHANGED
        headers = {"Authorization": "Bearer key-of-laptop"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.get(served.urls[0] + "/v1/models") as answer,
        ):
            assert answer.status == 401
        os.kill(os.getpid(), signal.SIGTERM)

    assert served.run(work) == 143


@asynccontextmanager
async def _streaming(served: Served, pause_s: float = 0.01) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield a stream of the host that has begun."""
    body = {"model": "a", "prompt": "x", "stream": True, "pieces": 40, "pause_s": pause_s}
    async with (
        aiohttp.ClientSession() as client,
        client.post(served.urls[0] + "/v1/completions", json=body) as answer,
    ):
        await answer.content.readline()
        yield answer


def test_stop_lets_a_stream_end_and_rejects_other_requests_until_then(served: Served) -> None:
    async def work(served: Served) -> None:
        url, body = served.urls[0], {"model": "a", "prompt": "x"}
        async with _streaming(served, pause_s=0.03) as answer, aiohttp.ClientSession() as other:
            for path, status in (("/stop", 202), ("/stop", 202), ("/v1/completions", 503)):
                async with other.post(url + path, json=body) as said:
                    assert said.status == status and (
                        status != 202 or (await said.json())["stopping"] is True
                    )
            await asyncio.sleep(0.3)  # longer than uvicorn needs to close its sockets
            async with aiohttp.ClientSession() as later, later.get(url + "/health") as health:
                assert health.status == 503
            assert b"[DONE]" in await answer.content.read()

    assert served.run(work) == 143
    assert [event for event in served.events() if event == "stopping"] == ["stopping"]


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


@pytest.mark.parametrize(("signals", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_first_signal_waits_for_streams_and_second_does_not(
    served: Served, signals: int, number: signal.Signals
) -> None:
    async def work(served: Served) -> None:
        async with _streaming(served) as answer:
            for _ in range(signals):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0)
            rest = await answer.content.read()
            assert (b"[DONE]" in rest) == (signals == 1)

    assert served.run(work) == 128 + number
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
