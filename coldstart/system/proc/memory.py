"""Advice to the kernel about memory that is about to be touched: the page faults cost more than the copy.

Every function is a hint: where the kernel does not know it, nothing happens and the pages come one by one, as always.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
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


def fresh(address: int, size: int) -> None:
    """Map the whole pages of a range that is about to be written. Releases the GIL.

    Pages of the ordinary size: a huge page that the machine has given back to its hypervisor costs more than the
    small ones it stands for.
    """
    start, end = -(-address // _PAGE) * _PAGE, (address + size) // _PAGE * _PAGE
    if start < end:
        _libc.madvise(start, end - start, MADV_POPULATE_WRITE)


def give_back() -> None:
    """Return what was freed to the kernel, where the C library can (glibc): less to copy, to freeze and to thaw."""
    with suppress(AttributeError):
        _libc.malloc_trim(0)
