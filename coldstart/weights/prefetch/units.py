"""Units: bytes that are fetched and verified together.

A chunk that is requested in full is verified by its own digest. Of a chunk that is requested in part, only
the bytes of the requested tensors are fetched, and they are verified by the digests of these tensors. If a
tensor reaches into a neighbouring chunk, its bytes there must be ready first. Two partial chunks that share a
tensor form one unit.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from coldstart.weights.checkpoint import Tensor
from coldstart.weights.prefetch.byte_ranges import Range, Ranges
from coldstart.weights.prefetch.region_layout import RegionLayout


@dataclass(frozen=True, slots=True)
class Check:
    """Digest check: bytes [start, end) of the unit's file have SHA-256 `digest`; `tensor` is "" for a chunk."""

    start: int
    end: int
    digest: str
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces of one file that are fetched together; `needs` are verified bytes of other units that its checks read."""

    file: int
    pieces: tuple[Range, ...]
    checks: tuple[Check, ...]
    needs: tuple[Range, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of bytes to fetch."""
        return sum(end - start for start, end in self.pieces)


def split(layout: RegionLayout, file: int, wanted: Ranges) -> list[Unit]:
    """Return the units for the `wanted` bytes of a file.

    `wanted` consists of complete tensors, or of all bytes of the file that are not planned yet.
    """
    units: list[Unit] = []
    rest: list[Range] = []
    for number, pieces in _by_chunk(layout.chunk, wanted).items():
        start = number * layout.chunk
        span = (start, min(start + layout.chunk, layout.files[file].size))
        # Bytes outside tensors (the header) have only the digest of their chunk, whose other parts are planned then.
        if pieces == [span] or any(_gapped(layout, file, piece) for piece in pieces):
            check = Check(*span, layout.files[file].chunks[number])
            units.append(Unit(file, tuple(pieces), (check,), tuple(Ranges(pieces).missing(*span))))
        else:
            rest += pieces
    return units + [_of_tensors(layout, file, pieces) for pieces in _joined(layout, file, rest)]


def _by_chunk(chunk: int, wanted: Ranges) -> dict[int, list[Range]]:
    pieces: dict[int, list[Range]] = {}
    for start, end in wanted:
        for number in range(start // chunk, -(-end // chunk)):
            piece = (max(start, number * chunk), min(end, (number + 1) * chunk))
            pieces.setdefault(number, []).append(piece)
    return pieces


def _gapped(layout: RegionLayout, file: int, piece: Range) -> bool:
    known = Ranges((tensor.offset, tensor.end) for tensor in touching(layout, file, *piece))
    return bool(known.missing(*piece))


def _joined(layout: RegionLayout, file: int, pieces: list[Range]) -> list[list[Range]]:
    """Group pieces: pieces that share a tensor cannot be verified alone."""
    groups: list[list[Range]] = []
    reach = 0
    for piece in pieces:
        if piece[0] < reach:
            groups[-1].append(piece)
        else:
            groups.append([piece])
        reach = max(reach, *(tensor.end for tensor in touching(layout, file, *piece)))
    return groups


def _of_tensors(layout: RegionLayout, file: int, pieces: list[Range]) -> Unit:
    tensors = {tensor.offset: tensor for piece in pieces for tensor in touching(layout, file, *piece)}
    checks = tuple(Check(t.offset, t.end, t.sha256, t.name) for t in tensors.values())
    own = Ranges(pieces)
    needs = tuple(gap for check in checks for gap in own.missing(check.start, check.end))
    return Unit(file, tuple(pieces), checks, needs)


def touching(layout: RegionLayout, file: int, start: int, end: int) -> list[Tensor]:
    """Return the tensors of a file that have bytes in [start, end), in order."""
    tensors = layout.files[file].tensors
    touched = []
    for tensor in tensors[max(0, bisect_right(tensors, start, key=lambda t: t.offset) - 1) :]:
        if tensor.offset >= end:
            break
        if max(tensor.offset, start) < min(tensor.end, end):
            touched.append(tensor)
    return touched
