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

from coldstart.errors import CommandFailedError
from coldstart.system.proc import processes
from coldstart.system.start_progress import StartProgress
from coldstart.vllm.engine.rejection import Rejection


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


@pytest.mark.parametrize("error", [None, BrokenPipeError()])
def test_progress_arrives_before_the_report(error: Exception | None, tmp_path: Path) -> None:
    def run(announce: Announce) -> int:
        for done in (1, 2):
            announce.show(StartProgress("load weights", done, 2, "shards"))
        announce({"pid": os.getpid()})
        return 0

    seen: list[StartProgress] = []

    def see(progress: StartProgress) -> None:
        seen.append(progress)
        if error:
            raise error

    report = start_detached(tmp_path / "log", run, see)
    os.waitpid(report["pid"], 0)
    assert seen == [StartProgress("load weights", done, 2, "shards") for done in (1, 2)]


def fail(error: BaseException) -> Any:
    def run(announce: Announce) -> int:
        os.write(2, b"the engine's last words\n")
        raise error

    return run


def test_an_error_that_each_start_meets_is_raised_without_the_log(tmp_path: Path) -> None:
    error = Rejection("vLLM rejects its arguments: no", "change them", 2).build_error(CommandFailedError)
    with pytest.raises(CommandFailedError) as caught:
        start_detached(tmp_path / "log", fail(error))
    assert caught.value.lines == error.lines and caught.value.hint == "change them"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("odd")])
def test_a_process_that_ends_without_a_report_is_an_error(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(CommandFailedError, match=r"before it was ready|KeyboardInterrupt|ValueError: odd"):
        start_detached(tmp_path / "log", fail(error))


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
