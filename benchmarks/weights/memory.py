"""Provide free memory that the host backs, so that a comparison of loaders does not measure the hypervisor.

A virtual machine with free page reporting returns free memory to its host two seconds after it was freed, huge
pages first. The next access then costs page faults on the host as well: 0.5 GB/s instead of 10 GB/s for huge pages.
4 KiB pages may come from fragments that were never returned. A physical machine has no such effect.
`TouchedMemory` keeps memory touched until it is needed: memory freed at that time is backed.
"""

from __future__ import annotations

import mmap

import numpy as np


class TouchedMemory:
    """`size` bytes of touched anonymous memory, in huge pages, not inherited by forks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory: mmap.mmap | None = None

    def take(self) -> None:
        """Touch the memory; does nothing while it is held."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
                self._memory.madvise(advice)
            np.frombuffer(self._memory, np.uint8)[:: mmap.PAGESIZE].fill(1)

    def release(self) -> None:
        """Free the memory; the host backs it for two seconds."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
