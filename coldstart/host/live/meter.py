"""Memory measurements of the host's processes."""

from __future__ import annotations

from coldstart.system.devices import nvml
from coldstart.system.proc import processes


class Meter:
    """Memory of processes, in bytes; None if it cannot be measured."""

    def tree(self, pid: int) -> int | None:
        """Return the memory of a process and its descendants."""
        return None

    def alone(self, pid: int) -> int | None:
        """Return the memory of one process."""
        return None

    def gpu_memory(self, pid: int) -> int | None:
        """Return the GPU memory of a process and its descendants."""
        return None


class GpuMemory(Meter):
    """GPU memory that the driver reports. Reservations remain as estimated."""

    def gpu_memory(self, pid: int) -> int | None:
        """Return the GPU memory of a process and its descendants. Raises ProcessLookupError if the process has ended."""
        known = nvml.process_memory()
        if not known:
            return None
        sizes = [known[one] for one in processes.tree(pid) if one in known]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)


class ProcessorMemory(Meter):
    """Memory on the CPU backend: proportional set sizes, so that shared pages are counted once."""

    def tree(self, pid: int) -> int | None:
        """Return the memory of a process and its descendants. Raises ProcessLookupError if the process has ended."""
        return processes.memory_bytes(pid)

    def alone(self, pid: int) -> int | None:
        """Return the memory of one process."""
        return processes.pss_bytes([pid])
