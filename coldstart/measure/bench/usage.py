"""CPU seconds of process trees, read from /proc.

CPU time is conserved: what a process used moves to its parent's `cutime + cstime` when it is waited for, so
the sum of (own + reaped) over a tree never loses anything while no process leaves the tree. The bench makes
itself a child subreaper meanwhile, so daemons that a start leaves behind stay in its tree. A server forked by a
template or restored from a snapshot is a new process: all it used counts; of the template, what it used
meanwhile.

Own time comes from the process CPU clock (nanoseconds; psutil has only the kernel's ticks of 10 ms), reaped time
from /proc/PID/stat (clock ticks).
What escapes: kernel threads (read-ahead, swapping), and children of a process that ignores SIGCHLD.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one moment; `started` tells apart two of the same pid, `ended` marks a zombie."""

    pid: int
    parent: int
    started: int
    own_s: float
    reaped_s: float
    ended: bool = False


Snapshot = dict[int, ProcessSample]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Within the block, be the parent of orphaned descendants. Raises OSError where the kernel refuses."""
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
    """Every process that /proc shows, now."""
    samples = (_read(int(entry)) for entry in os.listdir(PROC) if entry.isdigit())  # noqa: PTH208
    return {process.pid: process for process in samples if process is not None}


def tree(processes: Snapshot, roots: Iterable[int]) -> set[int]:
    """The pids of `roots` and of all their descendants."""
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
    """Descendants of `roots` (and the roots) in `after` that did not exist in `before`."""
    return [after[pid] for pid in sorted(tree(after, roots)) if _earlier(before, after[pid]) is None]


def cpu_between(before: Snapshot, after: Snapshot, served: int | None = None) -> float:
    """CPU seconds of a start: of this process's descendants, and of the served process and its parent.

    This process's own time (the client's polling) is left out; children that it reaped meanwhile count.
    """
    me = os.getpid()
    pids = tree(after, [me])
    if served in after and served not in pids and _earlier(before, after[served]) is None:
        pids |= tree(after, [served]) | {after[served].parent}
    spent = sum(_spent(before, after[pid]) for pid in pids - {me, 0, 1} if pid in after)
    return spent + after[me].reaped_s - before[me].reaped_s


def _spent(before: Snapshot, now: ProcessSample) -> float:
    then = _earlier(before, now)
    return now.own_s + now.reaped_s - (then.own_s + then.reaped_s if then else 0.0)


def _earlier(before: Snapshot, now: ProcessSample) -> ProcessSample | None:
    then = before.get(now.pid)
    return then if then is not None and then.started == now.started else None


def _read(pid: int) -> ProcessSample | None:
    try:
        # The command name may hold spaces and parentheses: the fields start after the last one.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
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
