"""Memory measurements of the host's processes."""

from __future__ import annotations

from coldstart.system.proc import processes


class Meter:
    """Device memory of processes, in bytes; None if it cannot be measured."""

    def tree(self, pid: int) -> int | None:
        """Return the memory of a process and its descendants."""
        return None

    def alone(self, pid: int) -> int | None:
        """Return the memory of one process."""
        return None


class ProcessorMemory(Meter):
    """Memory on the CPU backend: proportional set sizes, so that shared pages are counted once."""

    def tree(self, pid: int) -> int | None:
        """Return the memory of a process and its descendants. Raises ProcessLookupError if the process has ended."""
        return processes.memory_bytes(pid)

    def alone(self, pid: int) -> int | None:
        """Return the memory of one process."""
        return processes.pss_bytes([pid])
