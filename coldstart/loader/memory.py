"""Advice to the kernel about memory that is about to be touched: the page faults cost more than the copy.

Every function is a hint: where the kernel does not know it, nothing happens and the pages come one by one, as always.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from threading import Event, Lock, Thread

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
# Pages faulted in at once: few enough that whoever writes them is not kept waiting for the address space.
PIECE = 8 << 20
# One faults while the other copies or faults, too.
WRITERS = 2
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address(view: memoryview) -> int:
    """Where a writable buffer lies in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def present(address: int, size: int) -> None:
    """Map all pages of a mapped range at once, reading those that are not in memory. Releases the GIL (ctypes does)."""
    start = address // _PAGE * _PAGE
    _libc.madvise(start, address + size - start, MADV_POPULATE_READ)


class Prefault:
    """Threads that fault in memory ahead of whoever writes it; its contents stay as they are.

    Pages of the ordinary size: a huge page that the machine has given back to its hypervisor costs more than the
    small ones it stands for.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._pieces, self._lock, self._ended = _pieces(ranges), Lock(), Event()
        self._threads = [Thread(target=self._fault, name="prefault", daemon=True) for _ in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop, and wait until no thread is left (a process that will be forked must have none)."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _fault(self) -> None:
        while (piece := self._following()) is not None and not self._ended.is_set():
            _libc.madvise(*piece, MADV_POPULATE_WRITE)

    def _following(self) -> tuple[int, int] | None:
        with self._lock:
            return next(self._pieces, None)


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for address, size in ranges:
        start, end = -(-address // _PAGE) * _PAGE, (address + size) // _PAGE * _PAGE
        for piece in range(start, end, PIECE):
            yield piece, min(PIECE, end - piece)
