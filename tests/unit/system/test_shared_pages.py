"""Two processes hold equal memory once, and neither can change what the other reads."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldstart.system.ipc.json_lines import is_sealed
from coldstart.system.proc import shared_pages
from coldstart.system.proc.mappings import PAGE, Region, find_complete_pages, map_memory


class Memory:
    """Anonymous private pages of this process."""

    def __init__(self, content: bytes) -> None:
        self.map = mmap.mmap(-1, len(content), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map[:] = content
        self.region = Region(ctypes.addressof(ctypes.c_char.from_buffer(self.map)), len(content))

    def is_shared(self) -> bool:
        """Return whether the published file is behind the first page."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= self.region.address < end:
                return "coldstart-shared" in line
        raise AssertionError("not mapped")


CONTENT = os.urandom(5 * PAGE)
Published = tuple[Memory, int, shared_pages.Places]


@pytest.fixture
def published() -> Iterator[Published]:
    memory = Memory(CONTENT)
    descriptor, places = shared_pages.move_to_memory_file([memory.region])
    yield memory, descriptor, places
    os.close(descriptor)


def test_equal_memory_is_adopted_and_other_memory_is_not(published: Published) -> None:
    _, descriptor, places = published
    # The fingerprint does not cover the second page.
    almost = CONTENT[: 2 * PAGE - 1] + bytes([CONTENT[2 * PAGE - 1] ^ 1]) + CONTENT[2 * PAGE :]
    tried = [Memory(one) for one in (CONTENT, almost, os.urandom(5 * PAGE), CONTENT + CONTENT[:PAGE])]
    found = [shared_pages.map_if_equal(one.region, descriptor, places) for one in tried]
    assert found == [one.is_shared() for one in tried] == [True, False, False, False]
    assert tried[0].map[:] == CONTENT and tried[1].map[:] == almost


def test_regions_move_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    memories, copied = [Memory(os.urandom(5 * PAGE)) for _ in range(3)], list[int]()

    def map_pages(size: int, descriptor: int, *place: int, **more: Any) -> int:
        copied.append(os.fstat(descriptor).st_blocks * 512)
        return map_memory(size, descriptor, *place, **more)

    monkeypatch.setattr(shared_pages, "map_memory", map_pages)
    os.close(shared_pages.move_to_memory_file([one.region for one in memories])[0])
    assert copied == [5 * PAGE, 10 * PAGE, 15 * PAGE] and all(one.is_shared() for one in memories)


def test_a_write_changes_only_the_copy_of_the_writer(published: Published) -> None:
    first, descriptor, places = published
    second = Memory(CONTENT)
    assert shared_pages.map_if_equal(second.region, descriptor, places)
    second.map[0:1] = bytes([CONTENT[0] ^ 1])
    assert first.map[:] == CONTENT == os.pread(descriptor, len(CONTENT), 0)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, PAGE)


def test_only_a_file_that_cannot_change_is_sealed(published: Published) -> None:
    plain, (reader, writer) = os.memfd_create("plain", os.MFD_ALLOW_SEALING), os.pipe()
    assert [is_sealed(one) for one in (published[1], plain, reader)] == [True, False, False]
    for one in (plain, reader, writer):
        os.close(one)


def test_a_large_allocation_has_pages_of_its_own_beside_others() -> None:
    libc, size = ctypes.CDLL(None), 1 << 27  # no earlier test leaves such a hole in the heap
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    with shared_pages.allocate_on_own_pages():
        before = shared_pages.list_anonymous()
        place = libc.malloc(ctypes.c_size_t(size))
        added = shared_pages.subtract_regions(shared_pages.list_anonymous(), before)
        neighbour = libc.malloc(ctypes.c_size_t(size))  # the kernel merges the two mappings
        merged = shared_pages.subtract_regions(shared_pages.list_anonymous(), before)
        own, other = (Region(address - 16, size + PAGE) for address in (place, neighbour))
        assert shared_pages.find_allocation(added, size) == own
        assert shared_pages.find_allocation(merged, size) in (own, other)
        assert shared_pages.find_allocation(shared_pages.subtract_regions(merged, [other]), size) == own
        assert shared_pages.find_allocation(merged, size // 2) is None
    libc.free(place)
    libc.free(neighbour)


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [
        (PAGE, PAGE, Region(PAGE, PAGE)),
        (PAGE + 64, 3 * PAGE, Region(2 * PAGE, 2 * PAGE)),
        (PAGE + 64, 10, Region(2 * PAGE, 0)),
    ],
)
def test_only_complete_pages_of_a_tensor_are_shared(address: int, size: int, expected: Region) -> None:
    assert find_complete_pages(address, size) == expected
