"""Advice to the kernel about memory that is about to be touched: the page faults cost more than the copy.

Every function is a hint: where the kernel does not know it, nothing happens and the pages come one by one, as always.
"""

from __future__ import annotations

import ctypes

MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address(view: memoryview) -> int:
    """Where a writable buffer lies in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def huge(address: int, size: int) -> None:
    """Let the not yet touched memory at `address` come in huge pages, where it holds any."""
    start, end = -(-address // _PAGE) * _PAGE, (address + size) // _PAGE * _PAGE
    if end > start:
        _libc.madvise(start, end - start, MADV_HUGEPAGE)


def present(address: int, size: int) -> None:
    """Map all pages of a mapped range at once, reading those that are not in memory. Releases the GIL (ctypes does)."""
    start = address // _PAGE * _PAGE
    _libc.madvise(start, address + size - start, MADV_POPULATE_READ)
