"""A server's directory for temporary files: removed with the server, or by the next server after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from coldstart.system import paths
from coldstart.system.proc.scratch import PREFIX, SOCKETS_VARIABLE, scratch, sweep
from tests.support.engines import home

__all__ = ["home"]

SERVER = """
import os, sys, time
from coldstart.system.proc.scratch import scratch
with scratch() as own:
    (own / "socket").touch()
    if len(sys.argv) > 1 and os.fork() == 0:
        sys.stdin.read()  # an engine, which ends after its server
        os._exit(0)
    print(own, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def parent(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the parent of the directories."""
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return paths.temporary_dir()


def server(*arguments: str) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-P", "-c", SERVER, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_scratch_is_removed_and_the_former_directory_restored(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKETS_VARIABLE, raising=False)
    before = os.environ["TMPDIR"]
    with scratch() as own:
        assert own.parent == parent and own.stat().st_mode & 0o777 == 0o700
        assert Path(tempfile.mkdtemp()).parent == own == Path(os.environ[SOCKETS_VARIABLE])
    assert not own.exists() and os.environ["TMPDIR"] == before and SOCKETS_VARIABLE not in os.environ


def test_sweep_removes_only_directories_of_killed_servers(parent: Path) -> None:
    living, its = server()
    killed, left = server()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_dir()
        sweep()
        assert not left.exists() and its.is_dir()
    finally:
        living.kill()
        living.wait()
    with scratch():  # the next server removes it as well
        assert not its.exists()
    assert not list(parent.glob(f"{PREFIX}*"))


def test_directory_stays_while_a_forked_child_runs(parent: Path) -> None:
    killed, left = server("with an engine")
    assert killed.stdin is not None
    killed.kill()
    killed.wait()
    sweep()
    assert left.is_dir()  # a process holds its lock
    engine_ends = threading.Timer(0.5, killed.stdin.close)
    engine_ends.start()
    sweep(killed.pid)
    assert not left.exists()
    engine_ends.join()
