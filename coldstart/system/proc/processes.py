"""What /proc says of processes and memory: who descends from whom, what they share, what is left.

psutil is imported only by what no start waits for: its import takes 18 ms. It knows neither pid namespaces nor the limits of
control groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> tuple[int, ...]:
    """The pids of the processes that any thread of `pid` has started. Raises OSError when it is gone."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return tuple(int(child) for task in tasks for child in (task / "children").read_text().split())


def birth(pid: int) -> str | None:
    """What tells this process from any other that had or will have its pid: the boot, and its start in clock ticks.

    None when there is none, or only what its parent has not reaped.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants: shared pages are counted by their share.

    Raises ProcessLookupError when it is gone.
    """
    import psutil

    try:
        tree = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    return pss_bytes(tree)


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size in bytes, summed; a process that is gone or not ours to read counts nothing."""
    import psutil

    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total


def rss_bytes(pid: int) -> int:
    """Resident bytes of one process; 0 when it is gone."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def outer_pid(guardian: int, inner: int) -> int:
    """The pid that we see of the process that is `inner` in the guardian's pid namespace.

    Raises ProcessLookupError when there is none.
    """
    pending = [guardian]
    while pending:
        pid = pending.pop()
        status = Path(f"/proc/{pid}/status").read_text()
        names = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
        if len(names) > 1 and int(names[-1]) == inner:
            return pid
        pending += children(pid)
    raise ProcessLookupError(f"process {inner} of that namespace is gone already")


def available_memory() -> int:
    """Bytes that a new process can have: MemAvailable, or less where a control group allows less."""
    return min([meminfo("MemAvailable") * 1024, *_control_groups()])


def meminfo(name: str) -> int:
    """A number of /proc/meminfo, in its unit (mostly KiB); 0 where the kernel does not give it."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next((int(words[1]) for words in lines if words[0] == f"{name}:"), 0)


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
