"""The memory of one model: a memfd that disappears with its last holder, however that one ends.

Writers use pwrite and never map it: a page is allocated without a fault and holds verified bytes from its first moment.
A thread allocates pages ahead of them (see RESULTS of the benchmarks for what first touch costs).
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
    """`total` bytes, none of them allocated at first. Raises OSError when the kernel has no memfd to give."""

    def __init__(self, total: int) -> None:
        self.descriptor = os.memfd_create("coldstart-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, total)
        # Nobody can cut it short under those who map it.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def allocated(self) -> int:
        """Bytes of memory it takes now."""
        return os.fstat(self.descriptor).st_blocks * 512

    def reader(self) -> int:
        """A descriptor of it that cannot be written to; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview) -> None:
        """Put verified bytes. Raises OSError when memory is short."""
        while data:
            written = os.pwrite(self.descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def read(self, offset: int, buffer: memoryview) -> int:
        """Copy bytes out; how many."""
        return os.preadv(self.descriptor, [buffer], offset)

    def close(self) -> None:
        """Give the memory back, as far as no client holds it."""
        os.close(self.descriptor)


class Allocator:
    """The thread that allocates pages before anybody writes to them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, list[Range]]] = SimpleQueue()
        self._started = False

    def ahead(self, region: SharedRegion, ranges: Iterable[Range]) -> None:
        """Allocate these ranges of the region, some time soon."""
        # A descriptor of its own: the region may be closed meanwhile and its number be another's.
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
                pass  # whoever writes there will meet the same, and can say whose bytes they are
            finally:
                os.close(descriptor)
