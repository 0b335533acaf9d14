"""Processes of this machine as /proc reports them: trees, new processes, and how to end them by process id.

`adopting_orphans` makes this process a child subreaper, so that daemons of a start remain in its tree.

A process's own CPU time comes from its CPU clock (nanoseconds; psutil has only the kernel's ticks of 10 ms), the time of
reaped children from /proc/PID/stat (clock ticks). Kernel threads and children of a process that ignores SIGCHLD are not
counted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coldstart.system.proc.processes import stat_fields

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STRAYS_S = 5.0
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one moment; `started` distinguishes two processes of one pid, `ended` marks a zombie.

    `own_s` is its CPU time, `reaped_s` that of the children it has waited for, both in seconds.
    """

    pid: int
    parent: int
    started: int
    own_s: float
    reaped_s: float
    ended: bool = False


Snapshot = dict[int, ProcessSample]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of orphaned descendants within the block. Raises OSError where the kernel refuses."""
    was = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.addressof(was))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, was.value)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not let this process adopt orphans")


def snapshot() -> Snapshot:
    """Read every process that /proc shows now."""
    samples = (_read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208
    return {process.pid: process for process in samples if process is not None}


def tree(processes: Snapshot, roots: Iterable[int]) -> set[int]:
    """Return the pids of `roots` and of all their descendants."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    members: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in members:
            members.add(pid)
            waiting.extend(children.get(pid, ()))
    return members


def new_processes(before: Snapshot, after: Snapshot, roots: Iterable[int]) -> list[ProcessSample]:
    """Return the roots and their descendants in `after` that did not exist in `before`."""
    return [after[pid] for pid in sorted(tree(after, roots)) if find_earlier(before, after[pid]) is None]


def find_earlier(before: Snapshot, now: ProcessSample) -> ProcessSample | None:
    """Return the sample of the same process in `before`, or None if it did not exist."""
    then = before.get(now.pid)
    return then if then is not None and then.started == now.started else None


def end_strays(before: Snapshot) -> None:
    """Kill every descendant of this process that is not in `before`, and wait until it has ended."""
    for process in new_processes(before, snapshot(), [os.getpid()]):
        send_signal(process.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + STRAYS_S
    while new_processes(before, snapshot(), [os.getpid()]) and time.monotonic() < deadline_s:
        reap_orphans(before)
        time.sleep(0.02)


def reap_orphans(before: Snapshot, *, keep: int | None = None) -> None:
    """Wait for ended children that this process adopted since `before` (all but `keep`)."""
    for process in snapshot().values():
        if process.parent == os.getpid() and process.pid not in before and process.pid != keep:
            _reap(process.pid)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to one process by its id; do nothing when it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # another wait() was first


def _read(pid: int) -> ProcessSample | None:
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    own_s = _own_s(pid, int(fields[11]) + int(fields[12]))
    reaped_s = (int(fields[13]) + int(fields[14])) / TICKS_PER_S
    return ProcessSample(pid, int(fields[1]), int(fields[19]), own_s, reaped_s, ended=fields[0] == "Z")


def _own_s(pid: int, ticks: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of that process
    except OSError:
        return ticks / TICKS_PER_S
