"""A server that reports readiness, dies before, never reports, or loses its supervisor."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import server_process

FakeEngine = Callable[[str], None]


def acknowledged(behaviour: str, log: Path, timeout: float | None = 20) -> server_process.Running:
    with log.open("wb") as output:
        process, reader = server_process.fresh(LaunchPlan([behaviour, "--port", "9"]), output)
    return server_process.acknowledged(process, reader, time.monotonic(), timeout)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_acknowledged_names_the_cause_that_the_engine_reported(
    fake_engine: FakeEngine, tmp_path: Path
) -> None:
    fake_engine("dies-of")
    with pytest.raises(
        CommandFailedError, match="before it was ready: ValueError: no space for the KV cache"
    ):
        acknowledged("dies-of", tmp_path / "log")


def test_launch_fails_when_the_server_is_never_ready(fake_engine: FakeEngine, tmp_path: Path) -> None:
    fake_engine("never-ready")
    with (tmp_path / "log").open("wb") as output:
        process, reader = server_process.fresh(LaunchPlan(["never-ready"]), output)
    with pytest.raises(CommandFailedError, match=r"not ready within 0\.3 s and was killed") as caught:
        server_process.acknowledged(process, reader, time.monotonic(), 0.3)
    assert caught.value.hint == "allow more time with --ready-timeout SECONDS"
    assert process.wait() == 137


def test_kill_minus_nine_of_the_supervisor_ends_the_server(fake_engine: FakeEngine, tmp_path: Path) -> None:
    fake_engine("serves")
    supervisor = (
        "import sys, time; from coldstart.launch import server_process as launch\n"
        "from coldstart.contract.plan import LaunchPlan\n"
        f"sys.executable = {sys.executable!r}\n"
        "process, reader = launch.fresh(LaunchPlan(['serves']))\n"
        "print(launch.acknowledged(process, reader, 0, None).report['pid'], flush=True); time.sleep(60)"
    )
    real = Path(sys.executable).read_text().split('"')[1]
    running = subprocess.Popen([real, "-c", supervisor], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    server = int(running.stdout.readline())
    assert not has_ended(server)
    running.kill()
    running.wait()
    running.stdout.close()
    deadline_s = time.monotonic() + 30
    while not has_ended(server) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert has_ended(server)
