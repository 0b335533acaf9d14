"""Servers behind their leases on the event loop."""

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import wait_until

from coldstart.host.launches import Launch
from coldstart.host.live import servers
from coldstart.host.live.servers import ModelServer, Starter, StartFailedError
from coldstart.host.live.starter import StartOrder
from coldstart.system.ipc import json_lines
from coldstart.system.paths import Cache
from coldstart.system.proc import exits, processes, scratch
from coldstart.system.start_progress import StartProgress


class ForkedServer:
    """A server whose supervisor is this test."""

    def __init__(self, directory: Path) -> None:
        (directory / "s").touch()
        (directory / "log").write_text("INFO fine\nValueError: too little memory\n")
        ours, theirs = socket.socketpair()
        self.server, self.there = (
            ModelServer(directory / "s", directory / "log", ours),
            json_lines.Channel(theirs),
        )
        self.there.send({"process": 0})

    async def end(self, *messages: dict[str, Any]) -> str:
        for message in messages:
            self.there.send(message)
        self.there.close()
        return await self.server.ended


async def test_a_server_that_came_up_and_ended(tmp_path: Path) -> None:
    leased = ForkedServer(tmp_path)
    leased.there.send({"progress": {"phase": "load weights", "done": 1, "total": 2, "unit": "shards"}})
    await wait_until(lambda: leased.server.progress is not None)
    assert leased.server.progress == StartProgress("load weights", 1, 2, "shards")
    leased.there.send({"ready": {"mode": "fresh", "pid": 7}})
    ready = await leased.server.ready
    assert leased.server.progress is None
    assert (ready.mode, ready.pid) == ("fresh", 7)
    leased.server.stop()
    assert leased.there.receive() == [{"signal": 15}]
    assert await leased.end({"exit": 143}) == "the server ended with exit code 143"
    assert list(tmp_path.iterdir()) == []
    leased.server.stop()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"failed": {"message": "no bundle"}}], "no bundle: ValueError: too little memory"),
        (
            [{"failed": {"message": "vLLM rejects its arguments"}, "final": True}],
            "vLLM rejects its arguments",
        ),
        ([{"exit": 1}], "the server ended with exit code 1: ValueError: too little memory"),
        ([], "the server's supervisor was killed: ValueError: too little memory"),
    ],
)
async def test_failed_server_reports_the_reason(tmp_path: Path, messages: list[Any], reason: str) -> None:
    leased = ForkedServer(tmp_path)
    await leased.end(*messages)
    with pytest.raises(StartFailedError) as failed:
        await leased.server.ready
    assert str(failed.value) == reason


async def test_malformed_message_ends_the_server(tmp_path: Path) -> None:
    leased = ForkedServer(tmp_path)
    leased.there.socket.sendall(b"nonsense\n")
    assert "not JSON" in await leased.server.ended


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.slow
async def test_starter_process_that_begins_no_order_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(servers, "RESTART_S", 0.0)
    starter = Starter(tmp_path, Cache(tmp_path / "cache"), offline=True)
    starter.warm()
    first = starter._process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)  # it takes no order, whatever comes first
    with monkeypatch.context() as hasty:
        hasty.setattr(servers, "BEGIN_S", 0.0)
        lost = starter.begin(StartOrder(Launch("a", "/nowhere"), 9.0))
        os.kill(first.pid, number)
        assert await lost.ended == "the server's starter process was killed" and lost.was_killed
    await wait_until(lambda: starter._process is not None and starter._process is not first)
    with pytest.raises(StartFailedError, match="/nowhere"):
        await starter.begin(StartOrder(Launch("a", "/nowhere"), 9.0)).ready
    await starter.close()
    assert first.wait() == -signal.SIGKILL


async def test_close_removes_directories_of_killed_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_choose_base", lambda: tmp_path)
    directory = tmp_path / "server-killed"
    directory.mkdir()
    (directory / "lock").write_text("1")
    await Starter(tmp_path, Cache(tmp_path / "cache"), offline=True).close()
    assert not directory.exists()


async def test_kill_ends_a_stopped_supervisor_and_its_server(tmp_path: Path) -> None:
    leased = ForkedServer(tmp_path)
    tree = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE)
    assert tree.stdout is not None and tree.stdout.readline() == b"\n"
    leased.there.send({"process": tree.pid})
    await wait_until(lambda: len(leased.server._trees) == 2)
    assert not leased.server.is_stopped()
    (child,) = processes.list_children(tree.pid)
    os.kill(child, signal.SIGSTOP)
    await wait_until(leased.server.is_stopped)
    leased.server.kill()
    assert tree.wait() == -signal.SIGKILL
    await wait_until(lambda: processes.read_identity(child) is None)
    await leased.end()


async def test_end_names_the_kernel_when_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased = ForkedServer(tmp_path)
    monkeypatch.setattr(exits, "count_oom_kills", lambda: 10**9)
    assert await leased.end({"code": 137}) == (
        "the server was killed by signal 9 (SIGKILL): the kernel killed a process because memory was exhausted"
    )
    assert not leased.server.was_killed
