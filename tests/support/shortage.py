"""Exhaust the descriptors of a running process, and measure its CPU time."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exhaust_descriptors(pid: int) -> Iterator[None]:
    """Make every new descriptor of process `pid` fail with EMFILE in this block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = _settled(pid)
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
    before = time.clock_gettime(_cpu_clock(pid))
    time.sleep(for_s)
    return time.clock_gettime(_cpu_clock(pid)) - before


def _cpu_clock(pid: int) -> int:
    return (~pid << 3) | 2  # CPUCLOCK_SCHED of a process: clock_getcpuclockid(3)
