"""Processes and memory as /proc reports them: children, identity, memory use and available memory.

psutil is imported only in functions that no start waits for, because its import takes 18 ms. It supports neither PID
namespaces nor control group limits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from coldstart.system.ipc.peers import await_readable


def list_children(pid: int) -> tuple[int, ...]:
    """Return the PIDs of the children of process `pid`. Raises OSError if the process does not exist."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return tuple(int(child) for task in tasks for child in (task / "children").read_text().split())


def read_command_line(pid: int) -> bytes:
    """Return the arguments of a process, each followed by a zero byte, or nothing if it has exited."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def read_stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which may contain spaces and parentheses.

    Raises OSError if the process does not exist.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def read_identity(pid: int) -> str | None:
    """Return an identity that no other process with the same PID has: boot ID and start time in clock ticks.

    Return None if the process does not exist or is a zombie.
    """
    try:
        fields = read_stat_fields(pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def is_alive(pid: int, identity: str | None) -> bool:
    """Return whether the process with this PID and `identity` is still running."""
    return identity is not None and identity == read_identity(pid)


def terminate(pid: int, identity: str | None, *patience_s: float) -> None:
    """Send SIGTERM to a process and wait, for each of the times in seconds, then SIGKILL. Do nothing if its PID was reused."""
    with suppress(ProcessLookupError):  # it has exited in the meantime
        descriptor = os.pidfd_open(pid)
        try:
            # As long as the descriptor is open, the PID is not reused.
            if not is_alive(pid, identity):
                return
            for one_s in patience_s:
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                if await_readable(descriptor, timeout_s=one_s):
                    return
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            await_readable(descriptor)
        finally:
            os.close(descriptor)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, which it loses when the terminal is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def list_tree(pid: int) -> list[int]:
    """Return the PIDs of a process and its descendants. Raises ProcessLookupError if the process does not exist."""
    import psutil

    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"process {pid} does not exist") from error


def measure_pss_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the processes' proportional set sizes in bytes, in which each shared page is divided among its users.

    Processes that have exited or cannot be read count as zero.
    """
    import psutil

    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total


def find_outer_pid(guardian: int, inner: int) -> int:
    """Return the PID in this namespace of the process that has PID `inner` in the PID namespace of the process `guardian`.

    Raises:
        ProcessLookupError: The process does not exist.
    """
    pending = [guardian]
    while pending:
        pid = pending.pop()
        names = read_field(f"/proc/{pid}/status", "NSpid").split()
        if len(names) > 1 and int(names[-1]) == inner:
            return pid
        pending += list_children(pid)
    raise ProcessLookupError(f"no process {inner} in the PID namespace of process {guardian}")


def read_available_memory() -> int:
    """Return the memory in bytes that a new process can use: MemAvailable, or less if a control group limits it."""
    return min(
        [read_meminfo("MemAvailable") * 1024, *(max(0, limit - used) for limit, used in _control_groups())]
    )


def read_total_memory() -> int:
    """Return the RAM of the machine in bytes, or the limit of a control group if that is lower."""
    return min([read_meminfo("MemTotal") * 1024, *(limit for limit, _ in _control_groups())])


def read_meminfo(name: str) -> int:
    """Return a value from /proc/meminfo in its unit (usually KiB), or 0 if the kernel does not report it."""
    return int((read_field("/proc/meminfo", name) or "0").split()[0])


def read_field(path: str, name: str) -> str:
    """Return the value of the first line "NAME: VALUE" of a file in /proc, or "" if there is none. Raises OSError."""
    pairs = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and usage in bytes of this process's control group (version 2) and of each parent with a limit.

    The usage excludes cached files that the kernel frees when the group needs memory.
    """
    own = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
    group = Path("/sys/fs/cgroup") / own.lstrip("/")
    for directory in (group, *group.parents):
        try:
            limit, used = (directory / "memory.max").read_text(), (directory / "memory.current").read_text()
            counters = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # this group has no limit
        if limit.strip() != "max":
            yield int(limit), int(used) - int(counters["inactive_file"])
