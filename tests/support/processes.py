"""Processes of a test: wait for what they do, search their memory, exhaust their descriptors, find what remains."""

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from coldstart.system.proc import processes


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return as soon as `condition()` is true.

    The default timeout is so long that a busy machine does not reach it.

    Raises:
        AssertionError: the condition is still false after `timeout_s` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"condition is still false after {timeout_s:g} s"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not collected it: a container may have no init process."""
    return processes.read_identity(pid) is None


def find_family(*pids: int) -> list[psutil.Process]:
    """Return the processes with these PIDs and all their descendants."""
    first = [psutil.Process(pid) for pid in pids]
    return list(dict.fromkeys(one for each in first for one in (each, *each.children(recursive=True))))


def remaining(family: Iterable[psutil.Process], patience_s: float = 20.0) -> list[psutil.Process]:
    """Return the processes of `family` that still run after `patience_s` seconds."""
    deadline_s = time.monotonic() + patience_s
    while (left := [one for one in family if not has_ended(one.pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


_STEP = 1 << 24


def find_in_memory(pid: int, word: bytes) -> list[str]:
    """Return the readable private mappings of a process that contain the word, as lines of /proc/PID/maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    private = [line for line in lines if line.split()[1][::3] == "rp" and "[v" not in line]
    return [line for line in private if any(word in part for part in _read(pid, line.split()[0], len(word)))]


def _read(pid: int, place: str, overlap: int) -> Iterator[bytes]:
    """Yield the memory of a mapping in parts that overlap, so that none cuts a word."""
    first, last = (int(part, 16) for part in place.split("-"))
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start in range(first, last, _STEP):
            memory.seek(start)
            yield memory.read(min(last - start, _STEP + overlap))


@contextmanager
def exhaust_descriptors(pid: int) -> Iterator[None]:
    """Make every new descriptor of process `pid` fail with EMFILE in this block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {
        number for number in _settled(pid) if Path(f"/proc/{pid}/fd/{number}").is_symlink()
    }  # not that of the listing
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _settled(pid: int) -> set[int]:
    """Return its open descriptors after it has closed those of its former clients."""
    used: set[int] = set()
    while used != (used := {int(name) for name in os.listdir(f"/proc/{pid}/fd")}):  # noqa: PTH208
        time.sleep(0.2)
    return used


def busy_s(pid: int, for_s: float) -> float:
    """Return the CPU seconds that a process uses in the next `for_s` seconds."""
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])  # without its children
    time.sleep(for_s)
    return float(sum(process.cpu_times()[:2]) - before)
