"""Advise the kernel about memory that will be touched soon, because page faults cost more than the copy.

Every function is a hint. A kernel without the feature ignores it and maps pages one by one.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

MADV_POPULATE_READ = 22
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address(view: memoryview) -> int:
    """Return the address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def present(address: int, size: int) -> None:
    """Map all pages of a mapped range at once, and read those that are not in memory. Releases the GIL (through ctypes)."""
    start = address // _PAGE * _PAGE
    _libc.madvise(start, address + size - start, MADV_POPULATE_READ)


def give_back() -> None:
    """Return freed memory to the kernel if the C library can (glibc), so that forks and snapshots copy less."""
    with suppress(AttributeError):
        _libc.malloc_trim(0)
