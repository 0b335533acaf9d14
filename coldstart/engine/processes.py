"""What /proc says of a process and its descendants: who they are, and the memory they share."""

from __future__ import annotations

from pathlib import Path

from coldstart.engine import handoff


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
