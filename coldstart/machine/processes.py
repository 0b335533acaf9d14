"""What /proc says of processes and memory: who descends from whom, what they share, what is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coldstart.serve import handoff


def children(pid: int) -> tuple[int, ...]:
    """The pids of the processes that any thread of `pid` has started. Raises OSError when it is gone."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return tuple(int(child) for task in tasks for child in (task / "children").read_text().split())


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants: shared pages are counted by their share."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return own + sum(memory_bytes(child) for child in children(pid))


def outer_pid(guardian: int, inner: int) -> int:
    """The pid that we see of the process that is `inner` in the guardian's pid namespace.

    Raises handoff.HandoffError when there is none.
    """
    pending = [guardian]
    while pending:
        pid = pending.pop()
        status = Path(f"/proc/{pid}/status").read_text()
        names = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
        if len(names) > 1 and int(names[-1]) == inner:
            return pid
        pending += children(pid)
    raise handoff.HandoffError(f"the template forked process {inner}, which is gone already")


def available_memory() -> int:
    """Bytes that a new process can have: MemAvailable, or less where a control group allows less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_control_groups()])


def _control_groups() -> Iterator[int]:
    """What the limits of this process's control group (version 2) and of those above it leave."""
    own = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
    group = Path("/sys/fs/cgroup") / own.lstrip("/")
    for directory in (group, *group.parents):
        try:
            limit, used = (directory / "memory.max").read_text(), (directory / "memory.current").read_text()
        except OSError:
            continue  # no limit is kept here
        if limit.strip() != "max":
            yield max(0, int(limit) - int(used))
