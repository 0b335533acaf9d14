"""What is fetched at once and verified at once.

A chunk that is wanted whole is checked by its own digest. Of a chunk that is wanted in part only the wanted tensors'
bytes are fetched, and checked by the digests of those tensors; the rest of a tensor that reaches into neighbouring
chunks must be there before. Where a tensor reaches from one such part into another, both are one unit.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from coldstart.weights.checkpoint import Tensor
from coldstart.weights.prefetch.byte_ranges import Range, Ranges
from coldstart.weights.prefetch.region_layout import RegionLayout


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


def split(layout: RegionLayout, file: int, wanted: Ranges) -> list[Unit]:
    """The units that make up `wanted` bytes of a file: whole tensors, or all of the file that is not planned already."""
    units: list[Unit] = []
    rest: list[Range] = []
    for number, pieces in _by_chunk(layout.chunk, wanted).items():
        start = number * layout.chunk
        span = (start, min(start + layout.chunk, layout.files[file].size))
        # Bytes of no tensor (the header) have no digest but their chunk's, of which the other parts are planned then.
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
    """Pieces in groups: those that one tensor reaches into wait for each other, so they are one."""
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
    """The tensors of a file that have bytes in [start, end), in order."""
    tensors = layout.files[file].tensors
    touched = []
    for tensor in tensors[max(0, bisect_right(tensors, start, key=lambda t: t.offset) - 1) :]:
        if tensor.offset >= end:
            break
        if max(tensor.offset, start) < min(tensor.end, end):
            touched.append(tensor)
    return touched
