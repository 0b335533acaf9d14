"""A server in the background reports its start to the command, and its error if it does not start."""

import os
import signal
import threading
from pathlib import Path

import pytest
from coldstart.artifacts import files
from coldstart.commands._serving import start_detached
from support.engines import FakeEngine
from support.processes import wait_until

from coldstart.errors import CommandFailedError
from coldstart.system.proc import processes
from coldstart.system.start_progress import ignore_progress

WORDS = ("tiny", "--host", "127.0.0.1", "--port", "7")


@pytest.fixture
def lock(home: Path, tmp_path: Path) -> int:
    handle = files.try_lock(tmp_path / "lock")
    assert handle is not None
    return handle


def is_held(tmp_path: Path) -> bool:
    if (handle := files.try_lock(tmp_path / "lock")) is not None:
        os.close(handle)
    return handle is None


def test_the_process_outlives_the_command_in_its_own_session_and_holds_the_lock(
    lock: int, tmp_path: Path, fake_engine: FakeEngine
) -> None:
    fake_engine("serves")
    started: list[int] = []
    log = tmp_path / "log"
    words = (*WORDS, "x" * 100_000)  # more than a pipe holds
    report = start_detached(words, log, lock, started.append, ignore_progress)
    os.close(lock)
    pid = report["pid"]
    try:
        assert started == [pid] and os.getsid(pid) == pid != os.getpid() and is_held(tmp_path)
        assert report["url"] == "http://127.0.0.1:7" and report["words"][-1] == words[-1]
        wait_until(lambda: log.read_text() == "to stdout\nto stderr\n")
        assert log.stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_held(tmp_path))


def test_an_interrupted_command_ends_the_process(lock: int, tmp_path: Path, fake_engine: FakeEngine) -> None:
    fake_engine("never-ready")
    started: list[int] = []
    log = tmp_path / "log"

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def send() -> None:
        wait_until(lambda: log.exists() and "to stderr" in log.read_text())
        # To this thread: the kernel interrupts no wait of the command, as with a signal just before the wait.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    before = signal.signal(signal.SIGUSR1, interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start_detached(WORDS, log, lock, started.append, ignore_progress)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    os.close(lock)
    assert processes.read_identity(started[0]) is None and not is_held(tmp_path)


def test_error_of_process_is_that_of_the_command(lock: int, tmp_path: Path, fake_engine: FakeEngine) -> None:
    fake_engine("dies")
    with pytest.raises(CommandFailedError) as caught:
        start_detached(WORDS, tmp_path / "log", lock, lambda pid: None, ignore_progress)
    os.close(lock)
    assert caught.value.lines[0] == "no memory for the engine" and caught.value.hint == "use less"
