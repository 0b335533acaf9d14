"""Shared memory of one model: a memfd, which the kernel frees when its last holder closes it or dies.

Writers use pwrite and do not map the region: a page is allocated without a fault and holds only verified
bytes. A thread allocates pages before they are written (the benchmarks' RESULTS has the cost of the first
touch).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable
from queue import SimpleQueue

from coldstart.weights.prefetch.byte_ranges import Range

_STEP = 32 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedRegion:
    """Region of `total` bytes, none of them allocated at first. Raises OSError if the kernel cannot create a memfd."""

    def __init__(self, total: int) -> None:
        self.descriptor = os.memfd_create("coldstart-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, total)
        # Seal the size: truncation would crash the processes that map the region.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def allocated(self) -> int:
        """Return the number of allocated bytes."""
        return os.fstat(self.descriptor).st_blocks * 512

    def reader(self) -> int:
        """Return a read-only descriptor of the region; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview) -> None:
        """Write verified bytes. Raises OSError if memory is short."""
        while data:
            written = os.pwrite(self.descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def close(self) -> None:
        """Close the descriptor; the kernel frees the memory when no client holds it."""
        os.close(self.descriptor)


class Allocator:
    """Thread that allocates pages before streams write to them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, list[Range]]] = SimpleQueue()
        self._started = False

    def allocate(self, region: SharedRegion, ranges: Iterable[Range]) -> None:
        """Allocate these ranges of the region in the background."""
        # Duplicate the descriptor: the region may be closed in the meantime and its number reused.
        self._queue.put((os.dup(region.descriptor), list(ranges)))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="allocator", daemon=True).start()

    def _run(self) -> None:
        while True:
            descriptor, ranges = self._queue.get()
            try:
                for start, end in ranges:
                    for step in range(start, end, _STEP):
                        os.posix_fallocate(descriptor, step, min(_STEP, end - step))
            except OSError:
                pass  # the write to this range fails too, and reports which bytes it was for
            finally:
                os.close(descriptor)
