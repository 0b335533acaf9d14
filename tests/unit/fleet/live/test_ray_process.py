"""Ray node as a child process: it starts or reports the reason, may end, and may restart."""

import io
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.errors import CommandFailedError, UsageError
from coldstart.fleet.live import ray_process
from coldstart.fleet.live.ray_process import RayProcess, run_joined_node
from coldstart.fleet.specification import ServerSpec
from coldstart.host.live.log import Log

# What `ray start --block` prints, Ray 2.56.
STARTED = "Local node IP: 192.0.2.7\\n--------\\nRay runtime started.\\n--------"
ENDED = (
    "Traceback (most recent call last):\\n  File x\\n"
    "RuntimeError: Failed to bind to address 127.0.0.1:36971; set GRPC_VERBOSITY\\n\\n"
    "ERR scripts.py:1315 -- Remaining processes will be killed."
)


def node(tmp_path: Path, program: str) -> RayProcess:
    log = tmp_path / "node.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=out, start_new_session=True)
    return RayProcess(process, log)


def test_wait_reports_the_reason_when_the_node_ends_at_once(tmp_path: Path) -> None:
    made = node(tmp_path, f"print('{ENDED}')")
    with pytest.raises(
        CommandFailedError, match=r"did not start on this machine: RuntimeError: Failed to bind"
    ):
        made.wait()


def test_end_kills_a_process_that_ignores_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    made = node(tmp_path, stubborn)
    while "up" not in made.log.read_text():
        pass
    monkeypatch.setattr("coldstart.fleet.live.ray_process.STOP_TIMEOUT_S", 0.2)
    made.end()
    assert made.process.wait() == 128 + signal.SIGKILL


class RecordingLog(Log):
    """Log that records its events."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.events: list[tuple[str, Any]] = []

    def write(self, event: str, **members: Any) -> None:
        self.events.append((event, members))


def join(tmp_path: Path, program: str) -> tuple[RecordingLog, Path, Callable[[], None]]:
    """Return a log, the file of starts, and what runs a node of `program`, where `number` is the number of this start."""
    runs, log = tmp_path / "runs", RecordingLog()
    before = f"runs = {str(runs)!r}; f = open(runs, 'a+'); f.write('x'); f.seek(0); number = len(f.read()); f.close()\n"
    command = [sys.executable, "-c", before + program]
    return log, runs, lambda: run_joined_node(command, {}, log)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the pauses, and restore the signal handlers afterwards."""
    monkeypatch.setattr("coldstart.fleet.live.ray_process.RESTART_DELAY_S", 0.02)
    monkeypatch.setattr("coldstart.fleet.live.ray_process.POLL_S", 0.02)
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("impatient")
def test_joined_node_restarts_until_a_signal(tmp_path: Path) -> None:
    again = f"import os, time; print('{STARTED}', flush=True); time.sleep(0.3)\nif number == 2: os.kill(os.getppid(), 15)\n"
    log, runs, run = join(tmp_path, again + "if number == 2: time.sleep(60)")
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + signal.SIGTERM and runs.read_text() == "xx"
    assert [event for event, _ in log.events] == ["joined", "ray ended", "joined"]
    assert log.events[0][1]["address"] == "192.0.2.7"


@pytest.mark.usefixtures("impatient")
def test_joined_node_that_never_starts_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, runs, run = join(tmp_path, "raise RuntimeError('no such cluster')")
    # A minute passes after each failure, so the time of a process start does not matter.
    late = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + 60 * len(log.events))
    monkeypatch.setattr("coldstart.fleet.live.ray_process.time", late)
    with pytest.raises(CommandFailedError, match="RuntimeError: no such cluster"):
        run()
    assert runs.read_text() == "xxx" and [event for event, _ in log.events] == ["ray ended"] * 2


REPLACED = """
import asyncio
from types import SimpleNamespace

from ray.exceptions import ActorUnschedulableError

from coldstart.fleet.live import membership

membership.POLL_S = 0.02
NO_WORKERS = SimpleNamespace(workers=(), seq=0)
said = []

def calls(act):
    return SimpleNamespace(remote=act)

async def dead(method):
    raise ActorUnschedulableError("the node is not known here yet")

async def alive(method, *args):
    if method == "report":
        return NO_WORKERS
    await asyncio.sleep(60)

control = SimpleNamespace(
    add_server=lambda spec, node: said.append("joined"), mark_unusable=lambda name, reason: said.append(reason)
)

async def wait_until(condition, task):
    while not condition():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)

async def main():
    known = {"a": SimpleNamespace(actor=SimpleNamespace(call=calls(dead)))}
    task = asyncio.create_task(membership.follow_server(control, SimpleNamespace(name="a"), known, None))
    await wait_until(lambda: said, task)
    assert set(said) == {"ActorUnschedulableError"}, said
    known["a"] = SimpleNamespace(actor=SimpleNamespace(call=calls(alive)))
    await wait_until(lambda: said[-1] == "joined", task)
    task.cancel()

asyncio.run(main())
"""


# In a separate process, because ray changes the environment, on which templates depend.
@pytest.mark.skipif(find_spec("ray") is None, reason="no ray")
def test_an_actor_that_could_not_be_placed_is_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", REPLACED], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


SERVER = ServerSpec("server", 24 * 10**9, 6.7e9, 12e9, 4)


def test_a_server_is_known_by_its_labels() -> None:
    given = ray_process.format_labels(SERVER)
    assert all(len(value) <= 63 and value.isdigit() for value in given.values())
    assert ray_process.parse_labels("server", given) == SERVER
    assert ray_process.parse_labels("head", {"ray.io/node-id": "x"}) is None
    with pytest.raises(UsageError, match="invalid server labels"):
        ray_process.parse_labels("x", {**given, "coldstart-load": "fast"})


@pytest.mark.parametrize("deep", ["", "a" * 40])
def test_directory_is_short_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: str) -> None:
    wanted = tmp_path / deep if deep else Path("/tmp")
    wanted.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(wanted))
    made = ray_process.create_private_directory()
    session = made / "r" / "session_2026-11-22_16-13-30_677596_18330" / "sockets"
    try:
        assert made.stat().st_mode & 0o777 == 0o700
        session.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(session / "plasma_store"))  # the kernel checks the length
    finally:
        for path in (session / "plasma_store", session, session.parent, session.parent.parent, made):
            path.unlink() if path.is_socket() else path.rmdir()
