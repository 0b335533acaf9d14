"""A server in the background reports its start to the command, and its error if it does not start."""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands._detach import Announce, start_detached
from support.waiting import wait_until

from coldstart.system.proc import processes


def test_the_process_outlives_the_command_in_its_own_session(tmp_path: Path) -> None:
    def run(announce: Announce) -> int:
        announce({"pid": os.getpid(), "session": os.getsid(0), "long": "x" * 100_000})
        os.write(1, b"to stdout\n")
        os.write(2, b"to stderr\n")
        signal.pause()
        return 0

    log = tmp_path / "log"
    report = start_detached(log, run)
    pid = report["pid"]
    try:
        assert pid != os.getpid() and report["session"] == pid and len(report["long"]) == 100_000
        wait_until(lambda: log.read_text() == "to stdout\nto stderr\n")
        assert log.stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_an_interrupted_command_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids, waits, wait = tmp_path / "pid", threading.Event(), select.select

    def note(*given: Any) -> Any:
        waits.set()
        return wait(*given)

    def run(announce: Announce) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pids.write_text(f"{os.getpid()}\n")
        signal.pause()
        return 0

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def send() -> None:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        # Python drops an exception that a handler raises in a hook of os.fork.
        waits.wait()
        # To this thread: the kernel interrupts no read of the command, as with a signal just before the read.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    before = signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(select, "select", note)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start_detached(tmp_path / "log", run)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert processes.birth(int(pids.read_text())) is None
