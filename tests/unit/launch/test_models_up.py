"""Records of servers that are up: one counts while its supervisor holds the lock, and each model has one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from coldstart.launch import up_records
from coldstart.launch.up_records import UpRecord
from coldstart.models.inspection import Lookup
from coldstart.system.proc import processes

STUBBORN = (
    "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\nsignal.pause()"
)


@pytest.fixture
def process(lookup: Lookup) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of the model and ends at SIGTERM."""
    lock = up_records.find_directory(lookup).claim(lambda: None)
    assert isinstance(lock, int)
    code = "import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=(lock,)) as one:
        os.close(lock)
        yield one
        one.kill()


def read_record(lookup: Lookup, pid: int) -> UpRecord:
    return replace(up_records.create_own_record(lookup), pid=pid, birth=processes.read_identity(pid))


def test_record_is_read_while_the_supervisor_runs(lookup: Lookup, process: subprocess.Popen[bytes]) -> None:
    directory = up_records.find_directory(lookup)
    assert directory.read() is None
    record = replace(read_record(lookup, process.pid), url="http://127.0.0.1:1", mode="fresh")
    directory.write(record)
    assert directory.read() == directory.claim(lambda: None) == record
    directory.remove()
    assert directory.read() == record
    up_records.stop(record)
    process.wait()
    assert process.returncode == -signal.SIGTERM and directory.read() is None
    assert directory.read_last() == record
    up_records.stop(record)  # it has ended
    directory.remove()
    assert directory.read_last() is None


def test_a_process_with_a_reused_pid_is_not_ended(lookup: Lookup, process: subprocess.Popen[bytes]) -> None:
    up_records.stop(replace(read_record(lookup, process.pid), birth="the boot before:17"))
    assert process.poll() is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff", b"x" * 10_000])
def test_damaged_record_counts_as_none_and_is_removed(lookup: Lookup, content: bytes) -> None:
    directory = up_records.find_directory(lookup)
    directory.write(up_records.create_own_record(lookup))
    (record,) = directory.path.iterdir()
    record.write_bytes(content)
    assert directory.read_last() is None
    directory.remove()
    assert up_records.list_directories(lookup.cache) == []


def test_stop_kills_a_supervisor_that_ignores_sigterm(lookup: Lookup) -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        up_records.stop(read_record(lookup, process.pid), timeout_s=0.1)
    assert process.returncode == -signal.SIGKILL
