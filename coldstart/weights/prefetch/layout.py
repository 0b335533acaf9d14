"""Shared region of a checkpoint: its memory, the offset of each file in it, and all checks.

A check is a byte range of one file and its digest. Checks are numbered file by file, in the order of their offsets, and the
client and the prefetcher refer to byte ranges by these numbers. Invariant: every byte belongs to exactly one check, and each
tensor consists of whole checks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from coldstart.models.checkpoint_files import MAX_BYTES, Tensor
from coldstart.weights import checkpoint
from coldstart.weights.prefetch import PrefetchRefusedError

# Alignment of files in the region, in bytes, so that a huge page contains bytes of only one file.
ALIGN = 2 << 20
_STEP = 32 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class RegionFile:
    """One file of `size` bytes: its `region_offset`, the numbers of its digested ranges, and the names of its tensors."""

    name: str
    size: int
    region_offset: int
    range_numbers: range
    tensors: frozenset[str]


@dataclass(frozen=True, slots=True)
class DigestedRange:
    """Bytes [start, end) of a file with their SHA-256 digest. `tensor` is the tensor that contains them, if any."""

    file: RegionFile
    start: int
    end: int
    digest: str
    tensor: Tensor | None


@dataclass(frozen=True)
class RegionLayout:
    """Layout of a valid plan. `total_bytes` is the size of the region, and `tensors` has each tensor's check numbers."""

    chunk: int
    files: Mapping[str, RegionFile]
    checks: tuple[DigestedRange, ...]
    tensors: Mapping[str, range]
    total_bytes: int

    def select_checks(self, names: Collection[str] | None) -> list[int]:
        """Return the numbers of the checks of the tensors `names` (None: of all files), in order.

        A file whose tensors are all requested is included with its header. Raises PrefetchRefusedError if the plan lacks
        a tensor.
        """
        if names is None:
            return list(range(len(self.checks)))
        if unknown := sorted(map(str, set(names) - self.tensors.keys())):
            raise PrefetchRefusedError(f"the weights plan has no tensor {unknown[0]!r}")
        chosen = {number for name in names for number in self.tensors[name]}
        for file in self.files.values():
            if file.tensors and file.tensors <= set(names):
                chosen.update(file.range_numbers)
        return sorted(chosen)

    def find_covering_checks(self, file: str, offset: int, size: int) -> range:
        """Return the numbers of the checks that contain any of the bytes [offset, offset + size) of a file."""
        numbers, end = self.files[file].range_numbers, offset + size
        if size == 0:
            return range(0)
        first = bisect_right(self.checks, offset, numbers.start, numbers.stop, key=_start) - 1
        return range(first, bisect_left(self.checks, end, numbers.start, numbers.stop, key=_start))

    def count_bytes(self, numbers: Iterable[int]) -> int:
        """Return the total size of the checks `numbers` in bytes."""
        return sum(self.checks[number].end - self.checks[number].start for number in numbers)


def _start(check: DigestedRange) -> int:
    return check.start


def build_layout(document: Mapping[str, Any]) -> RegionLayout:
    """Return the layout of a plan that `coldstart.weights.weights_plan.build_plan` built.

    Raises:
        PrefetchRefusedError: The plan is malformed, empty or without digests.
    """
    try:
        plan = checkpoint.parse(document)
    except checkpoint.InvalidWeightsPlanError as error:
        raise PrefetchRefusedError(f"invalid weights plan: {error}") from error
    total, checks, files, tensors = 0, list[DigestedRange](), dict[str, RegionFile](), dict[str, range]()
    for file in plan.files:
        if file.chunks is None:
            raise PrefetchRefusedError(f"the weights plan has no digests for {file.name}")
        numbers = range(len(checks), len(checks) + len(file.chunks))
        names = frozenset(tensor.name for tensor in file.tensors)
        files[file.name] = placed = RegionFile(file.name, file.size, total, numbers, names)
        tensors |= dict.fromkeys(names, range(0))
        for (start, end, tensor), digest in zip(file.spans(plan.chunk), file.chunks, strict=True):
            if tensor is not None:
                before = tensors[tensor.name] or range(len(checks), 0)
                tensors[tensor.name] = range(before.start, len(checks) + 1)
            checks.append(DigestedRange(placed, start, end, digest, tensor))
        total += -(-file.size // ALIGN) * ALIGN
    if not 0 < total <= MAX_BYTES:
        raise PrefetchRefusedError(
            f"the weights plan describes {total} bytes, expected between 1 and {MAX_BYTES} bytes"
        )
    return RegionLayout(plan.chunk, files, tuple(checks), tensors, total)


class SharedRegion:
    """Shared memory of `total` bytes: a memfd, which the kernel frees when no process has it open anymore.

    Writers use pwrite and do not map the region, so a page is allocated without a fault and contains only verified bytes.
    A thread allocates pages before they are written (the benchmarks' RESULTS has the cost of the first touch). Raises
    OSError if the kernel cannot create a memfd.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._mapped: mmap.mmap | None = None  # only to free pages
        self._descriptor = os.memfd_create("coldstart-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, total)
        # Seal the size: truncation would crash the processes that map the region.
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def allocated_bytes(self) -> int:
        """Return the number of allocated bytes."""
        return os.fstat(self._descriptor).st_blocks * 512

    def open_reader(self) -> int:
        """Return a read-only descriptor of the region. The caller closes it."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview) -> None:
        """Write verified bytes at `offset`. Raises OSError if there is not enough memory."""
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def free(self, start: int, end: int) -> None:
        """Return the memory of the pages between two offsets to the system. They read as zeros afterwards."""
        with suppress(OSError):  # the memory stays allocated until no process has the region open
            if end > start:
                self._mapped = self._mapped or mmap.mmap(self._descriptor, self._total)
                self._mapped.madvise(mmap.MADV_REMOVE, start, end - start)

    def start_allocation(self, checks: Iterable[DigestedRange]) -> None:
        """Start to allocate the pages of the byte ranges that `checks` cover, in a background thread."""
        spans = [(check.file.region_offset + check.start, check.end - check.start) for check in checks]
        threading.Thread(target=self._allocate, args=(spans,), name="allocator", daemon=True).start()

    def _allocate(self, spans: Iterable[tuple[int, int]]) -> None:
        with suppress(OSError):  # writing these bytes fails too, and reports which bytes they are
            for start, size in spans:
                for step in range(start, start + size, _STEP):
                    os.posix_fallocate(self._descriptor, step, min(_STEP, start + size - step))
