"""What is fetched at once and verified at once.

A chunk that is wanted whole is checked by its own digest. Of a chunk that is wanted in part only the wanted tensors'
bytes are fetched, and checked by the digests of those tensors; the rest of a tensor that reaches into neighbouring
chunks must be there before. A contiguous wanted run has at most two such chunks, its first and its last: one unit each,
or one for both when a single tensor reaches from one to the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from coldstart.prefetch.layout import Layout, Tensor
from coldstart.prefetch.ranges import Range, Ranges


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes [start, end) of the unit's file have sha256 `digest`; `tensor` is "" for a whole chunk."""

    start: int
    end: int
    digest: str
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """`pieces` of one file, fetched together; `needs` are verified bytes of others that its checks read, too."""

    file: int
    pieces: tuple[Range, ...]
    checks: tuple[Check, ...]
    needs: tuple[Range, ...] = ()

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(end - start for start, end in self.pieces)


def split(layout: Layout, file: int, wanted: Ranges) -> Iterator[Unit]:
    """The units that make up `wanted` bytes of a file: whole tensors, or all of it. In the order of the file."""
    for start, end in wanted:
        yield from _run(layout, file, start, end)


def _run(layout: Layout, file: int, start: int, end: int) -> Iterator[Unit]:
    size, chunk = layout.files[file].size, layout.chunk
    if _gapped(layout, file, start, end):
        # Bytes of no tensor (the header) have no digest but their chunk's: take whole chunks.
        start, end = start // chunk * chunk, min(-(-end // chunk) * chunk, size)
    # The file's last chunk is whole when the run reaches the file's end.
    first, last = -(-start // chunk), (-(-end // chunk) if end == size else end // chunk)
    if start < first * chunk and end <= first * chunk:  # within one chunk
        yield _partial(layout, file, (start, end))
        return
    left, right = (start, first * chunk), (min(last * chunk, end), end)
    if _bridged(layout, file, left, right):
        yield from _whole(layout, file, first, last)
        yield _partial(layout, file, left, right)
        return
    yield from (_partial(layout, file, left) for _ in range(start < first * chunk))
    yield from _whole(layout, file, first, last)
    yield from (_partial(layout, file, right) for _ in range(last * chunk < end))


def _gapped(layout: Layout, file: int, start: int, end: int) -> bool:
    known = Ranges((tensor.start, tensor.end) for tensor in touching(layout, file, start, end))
    return bool(known.missing(start, end))


def _bridged(layout: Layout, file: int, left: Range, right: Range) -> bool:
    if left[0] >= left[1] or right[0] >= right[1]:
        return False
    return any(tensor.end > right[0] for tensor in touching(layout, file, *left))


def _whole(layout: Layout, file: int, first: int, last: int) -> Iterator[Unit]:
    entry, chunk = layout.files[file], layout.chunk
    for number in range(first, last):
        piece = (number * chunk, min((number + 1) * chunk, entry.size))
        yield Unit(file, (piece,), (Check(*piece, entry.chunks[number]),))


def _partial(layout: Layout, file: int, *pieces: Range) -> Unit:
    tensors = {tensor.start: tensor for piece in pieces for tensor in touching(layout, file, *piece)}
    checks = tuple(Check(t.start, t.end, t.digest, t.name) for t in tensors.values())
    own = Ranges(pieces)
    needs = tuple(gap for check in checks for gap in own.missing(check.start, check.end))
    return Unit(file, pieces, checks, needs)


def touching(layout: Layout, file: int, start: int, end: int) -> list[Tensor]:
    """The tensors of a file that have bytes in [start, end), in order."""
    tensors = layout.files[file].tensors
    found = []
    for tensor in tensors[max(0, bisect_right(tensors, start, key=lambda t: t.start) - 1) :]:
        if tensor.start >= end:
            break
        if max(tensor.start, start) < min(tensor.end, end):
            found.append(tensor)
    return found
