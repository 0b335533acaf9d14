"""Servers behind their leases on the event loop."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import run

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.host.launches import Launch
from coldstart.host.live.servers import Starter, StartFailedError, Supervised
from coldstart.system.ipc import json_lines
from coldstart.system.paths import Cache


class Leased:
    """Return a server whose supervisor is this test."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = socket.socketpair()
        self.there = json_lines.Channel(theirs)
        (directory / "s").touch()
        (directory / "log").write_text("INFO fine\nValueError: too little memory\n")
        self.server = Supervised(directory / "s", directory / "log", ours)

    async def end(self, *messages: dict[str, Any]) -> str:
        for message in messages:
            self.there.send(message)
        self.there.close()
        return await self.server.ended


def test_a_server_that_came_up_and_ended(tmp_path: Path) -> None:
    async def work() -> None:
        leased = Leased(tmp_path)
        leased.there.send({"ready": {"mode": "fresh", "pid": 7}})
        ready = await leased.server.ready
        assert (ready.mode, ready.pid) == ("fresh", 7)
        leased.server.stop()
        assert leased.there.receive() == [{"signal": 15}]
        assert await leased.end({"exit": 143}) == "the server ended with exit code 143"
        assert list(tmp_path.iterdir()) == []
        leased.server.stop()

    run(work())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"failed": "no bundle"}], "no bundle: ValueError: too little memory"),
        ([{"exit": 1}], "the server ended with exit code 1: ValueError: too little memory"),
        ([], "the server's supervisor was killed: ValueError: too little memory"),
    ],
)
def test_failed_server_reports_the_reason(tmp_path: Path, messages: list[Any], reason: str) -> None:
    async def work() -> None:
        leased = Leased(tmp_path)
        await leased.end(*messages)
        with pytest.raises(StartFailedError) as failed:
            await leased.server.ready
        assert str(failed.value) == reason

    run(work())


def test_malformed_message_ends_the_server(tmp_path: Path) -> None:
    async def work() -> None:
        leased = Leased(tmp_path)
        leased.there.socket.sendall(b"nonsense\n")
        assert "not JSON" in await leased.server.ended

    run(work())


def test_starter_receives_the_order_and_restarts_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is a fake that stores one order in a file and dies."""
    script = (
        "import sys, socket, json; from coldstart.system.ipc import json_lines;"
        "c = json_lines.Channel(socket.socket(fileno=int(sys.argv[4])));"
        f"m = next(c.replies()); open({str(tmp_path / 'orders')!r}, 'a').write(json.dumps(m) + '\\n')"
    )
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{script}" "$@"\n')
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))

    async def work() -> None:
        starter = Starter(tmp_path, Cache(tmp_path / "cache"), offline=True)
        launch = Launch("a", "tiny-llama", Arguments(("--seed", "1")), mode="fresh", untrusted=True)
        for _ in range(2):
            server = starter.begin(launch, 9.0)
            assert await server.ended == "the server's supervisor was killed"
            assert starter._process is not None
            await asyncio.to_thread(starter._process.wait)
        await starter.close()

    run(work())
    first, second = (tmp_path / "orders").read_text().splitlines()
    assert '"model": "tiny-llama", "args": ["--seed", "1"], "served": ["a"], "mode": "fresh"' in first
    assert '"offline": true' in first and '"ready_timeout": 9.0' in first and "1.sock" in first
    assert "2.sock" in second


def test_a_directory_too_deep_for_sockets_is_refused() -> None:
    with pytest.raises(UsageError, match="too long for a unix socket"):
        Starter(Path("/" + "x" * 110), Cache(Path("/cache")), offline=False)
