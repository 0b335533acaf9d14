"""Ray node as a child process: it starts or reports the reason, may end, and may restart."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldstart.errors import CommandFailedError
from coldstart.fleet.live.ray_process import RayProcess, run_joined_node
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
        process = subprocess.Popen([sys.executable, "-c", program], stdout=out)
    return RayProcess(process, log)


def test_wait_reports_the_reason_when_the_node_ends_at_once(tmp_path: Path) -> None:
    made = node(tmp_path, f"print('{ENDED}')")
    with pytest.raises(
        CommandFailedError, match=r"did not start on this machine: RuntimeError: Failed to bind"
    ):
        made.wait()


def test_end_kills_a_process_that_ignores_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "node.log"
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=out, start_new_session=True)
    made = RayProcess(process, log)
    while "up" not in log.read_text():
        pass
    monkeypatch.setattr("coldstart.fleet.live.ray_process.STOP_TIMEOUT_S", 0.2)
    made.end()
    assert process.returncode == -9


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
def test_joined_node_fails_with_the_reason_when_it_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, runs, run = join(
        tmp_path, "import time\nif number > 1: time.sleep(0.5)\nraise RuntimeError('no such cluster')"
    )
    monkeypatch.setattr("coldstart.fleet.live.ray_process.JOIN_TIMEOUT_S", 0.4)
    with pytest.raises(CommandFailedError, match="RuntimeError: no such cluster"):
        run()
    assert len(runs.read_text()) > 1 and {event for event, _ in log.events} == {"ray ended"}
