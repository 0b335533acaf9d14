"""The end of a process: its exit code in words, and whether the kernel killed it because of missing memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# A shell's exit code of a process that signal n ended is 128 + n.
_SIGNALLED = 128


def is_kill(code: int | None) -> bool:
    """Return whether SIGKILL ended the process with this exit code (128 + n after signal n)."""
    return code == _SIGNALLED + signal.SIGKILL


def describe(code: int) -> str:
    """Return how a process with this exit code (128 + n after signal n) ended, as the end of a sentence."""
    with suppress(ValueError):
        number = signal.Signals(code - _SIGNALLED)
        return f"was killed by signal {number.value} ({number.name})"
    return f"ended with exit code {code}"


def count_memory_kills() -> int:
    """Return how many processes the kernel has killed because of missing memory, here or in a parent control group.

    Without a control group that counts them, return the machine's number.
    """
    groups = [count for file in _counters() if (count := _count(file)) is not None]
    return max(groups) if groups else _count(Path("/proc/vmstat")) or 0


def _counters() -> Iterator[Path]:
    """Yield the files that count the kills of this process's control group, of version 2 and 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # a kernel without control groups
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory") / group.lstrip("/") / "memory.oom_control"


def _count(file: Path) -> int | None:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
