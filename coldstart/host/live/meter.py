"""How much memory the processes of a host hold."""

from __future__ import annotations

from coldstart.system.proc import processes


class Meter:
    """The bytes that processes hold on the device; None where that cannot be told."""

    def tree(self, pid: int) -> int | None:
        """Of a process and its descendants."""
        return None

    def alone(self, pid: int) -> int | None:
        """Of one process."""
        return None


class ProcessorMemory(Meter):
    """Where the device is the processor: proportional set sizes, so that what is shared is counted once."""

    def tree(self, pid: int) -> int | None:
        """As Meter. Raises ProcessLookupError when it is gone."""
        return processes.memory_bytes(pid)

    def alone(self, pid: int) -> int | None:
        """As Meter."""
        return processes.pss_bytes([pid])
