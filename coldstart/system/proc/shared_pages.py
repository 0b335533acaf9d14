"""Memory of this process that other processes share: regions with equal contents are backed by one sealed memory file.

The process that publishes copies its regions into the file and maps the file over them. Another process maps the file
over each of its own regions with the same bytes. All mappings are private, so a write changes only the copy of the
writer, and the seals prevent all other changes to the file. Callers pass only regions that no thread writes to meanwhile.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.system.ipc.json_lines import SEALS
from coldstart.system.proc.mappings import LIBC, PAGE, READ_WRITE, Region, map_memory

SEPARATE = 1 << 16
# Flag of a chunk, in glibc's malloc.c.
_IS_MAPPED = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _USUAL = -1, -3, 32 << 20
LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


Places = dict[str, Region]
"""Offset and size in the file, by fingerprint."""


def fingerprint(region: Region) -> str:
    """Return a digest of the size of a region and of three of its complete pages. Equal regions have equal digests."""
    digest = hashlib.blake2b(str(region.size).encode(), digest_size=16)
    for page in (0, region.size // PAGE // 2, region.size // PAGE - 1):
        digest.update(ctypes.string_at(region.address + page * PAGE, PAGE))
    return digest.hexdigest()


@contextmanager
def allocate_on_own_pages() -> Iterator[None]:
    """Make glibc place each allocation of at least SEPARATE bytes on its own pages, unless it fits into a hole of the heap.

    At the end of the block, glibc's thresholds are set to those that it reaches by itself when large allocations are freed.
    """
    change = getattr(LIBC, "mallopt", lambda *_: 0)
    change(_M_MMAP_THRESHOLD, SEPARATE)
    try:
        yield
    finally:
        change(_M_MMAP_THRESHOLD, _USUAL)
        change(_M_TRIM_THRESHOLD, 2 * _USUAL)


def list_anonymous() -> list[Region]:
    """Return the private, writable memory of this process that no file backs, in order of addresses."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and not name:
            start, end = (int(part, 16) for part in place.split("-"))
            found.append(Region(start, end - start))
    return found


def subtract_regions(regions: Iterable[Region], others: Iterable[Region]) -> list[Region]:
    """Return the parts of `regions` that are outside `others`. Both are in order of addresses."""
    left, rest = list[Region](), list(others)
    for region in regions:
        start, end = region.address, region.address + region.size
        for other in rest:
            if other.address + other.size <= start or other.address >= end:
                continue
            if other.address > start:
                left.append(Region(start, other.address - start))
            start = other.address + other.size
        if start < end:
            left.append(Region(start, end - start))
    return left


def find_allocation(regions: Iterable[Region], size: int) -> Region | None:
    """Return the pages of an allocation of `size` bytes that glibc mapped separately in one of the regions, or None.

    The kernel merges an allocation with neighboring mappings, such as Python's arenas, so it may be only a part of a region.
    """
    for region in regions:
        end = region.address + region.size
        for start in range(region.address, end - size, PAGE):
            chunk = _read_mapped_chunk(start)
            if size < chunk <= min(end - start, size + 2 * PAGE):
                return Region(start, chunk)
    return None


def _read_mapped_chunk(address: int) -> int:
    """Return the size in bytes of the chunk that glibc mapped at a page, or 0 if there is none.

    In front of the allocation, glibc writes the number of bytes that it skipped for the alignment, and the remaining size
    with a flag. glibc 2.43 subtracts 16 bytes, but a mapping has whole pages.
    """
    words = memoryview(ctypes.string_at(address, PAGE)).cast("L")
    for number in range(0, len(words), 2):
        skipped, rest = words[number : number + 2]
        if skipped == number * words.itemsize and rest & 7 == _IS_MAPPED:
            return -(-(skipped + (rest & ~7)) // PAGE) * PAGE
    return 0


def move_to_memory_file(regions: Iterable[Region]) -> tuple[int, Places]:
    """Move regions into a new sealed file. Return its descriptor and each region's range in the file. Raises OSError."""
    descriptor = os.memfd_create("coldstart-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    places, end = Places(), 0
    try:
        for region in regions:  # one after the other, so that only one is there twice
            data = (ctypes.c_char * region.size).from_address(region.address)
            written = 0
            while written < region.size:
                written += os.pwrite(descriptor, memoryview(data)[written:], end + written)
            places[fingerprint(region)] = Region(end, region.size)
            map_memory(region.size, descriptor, region.address, offset=end, is_shared=False)
            end += region.size
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, places


def map_if_equal(region: Region, descriptor: int, places: Places) -> bool:
    """Map `region` onto the memory file `descriptor` if that contains the same bytes. Return whether it was mapped.

    Raises:
        OSError, ValueError: The file cannot be mapped.
    """
    place = places.get(fingerprint(region))
    if place is None or place.size != region.size:
        return False
    with mmap.mmap(descriptor, place.size, mmap.MAP_PRIVATE, READ_WRITE, offset=place.address) as other:
        view = ctypes.c_char.from_buffer(other)
        is_equal = not LIBC.memcmp(region.address, ctypes.addressof(view), region.size)
        del view
    if is_equal:
        map_memory(region.size, descriptor, region.address, offset=place.address, is_shared=False)
    return is_equal
