"""Free memory of known quality, so that loaders are compared and not the hypervisor.

A virtual machine with free page reporting gives free memory back to its host two seconds after it was freed, huge
pages first. Whoever then touches it pays the host's page faults as well: 0.5 GB/s instead of 10 GB/s for huge pages,
while 4 KiB pages may come out of fragments that were never given back. A physical machine knows none of this.
`Held` keeps memory touched until the moment when it is wanted: what is freed then is backed.
"""

from __future__ import annotations

import mmap
import time

import numpy as np

RETURNED_S = 4.0


class Held:
    """`size` bytes of touched anonymous memory, in huge pages, not inherited by forks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory: mmap.mmap | None = None

    def take(self) -> None:
        """Touch the memory; does nothing while it is held."""
        if self._memory is None:
            self._memory = fresh(self.size, mmap.MADV_HUGEPAGE)
            self._memory.madvise(mmap.MADV_DONTFORK)
            _touch(self._memory)

    def release(self) -> None:
        """Free it: the next two seconds belong to whoever allocates."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def fresh(size: int, advice: int) -> mmap.mmap:
    """Anonymous private memory that nobody has touched."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    return memory


def touch_rate(advice: int, size: int) -> float:
    """Bytes per second of first touches, one byte written per page."""
    memory = fresh(size, advice)
    began_s = time.monotonic()
    _touch(memory)
    return size / (time.monotonic() - began_s)


def _touch(memory: mmap.mmap) -> None:
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].fill(1)
