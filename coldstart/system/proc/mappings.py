"""Memory mappings of this process at chosen addresses, with the system calls that Python's `mmap` does not offer."""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

PAGE = mmap.PAGESIZE
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
NO_ACCESS = 0
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_FIXED, _NO_RESERVE, _REMOVE = 0x10, 0x4000, 9


class Region(NamedTuple):
    """Range of addresses in this process: the first address, and the size in bytes."""

    address: int
    size: int


def find_complete_pages(address: int, size: int) -> Region:
    """Return the complete pages within the `size` bytes at `address`. The region is empty if there are none."""
    start = -(-address // PAGE) * PAGE
    return Region(start, max(0, (address + size) // PAGE * PAGE - start))


def map_memory(
    size: int,
    descriptor: int = -1,
    at: int = 0,
    access: int = READ_WRITE,
    *,
    offset: int = 0,
    is_shared: bool = True,
) -> int:
    """Map `size` bytes of a file, or private memory if no file is given, and return the address.

    If `at` is set, memory is mapped at this address and replaces the mapping there. Writes to a file that is mapped with
    `is_shared` false change only the pages of this process.

    Raises:
        OSError: The kernel refuses the mapping.
    """
    flags = _FIXED if at else 0
    if descriptor < 0:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    else:
        flags |= mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
    address = LIBC.mmap(at or None, size, access, flags, descriptor, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes")
    return int(address or 0)


def unmap_memory(address: int, size: int) -> None:
    """Remove the mapping of `size` bytes at `address`."""
    LIBC.munmap(address, size)


def free_pages(address: int, size: int) -> None:
    """Free the pages of the `size` bytes at `address`, whether the memory is shared or private."""
    if LIBC.madvise(address, size, _REMOVE):
        LIBC.madvise(address, size, mmap.MADV_DONTNEED)
