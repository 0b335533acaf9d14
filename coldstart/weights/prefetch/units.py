"""Units: bytes of one file that are fetched and verified together, about a chunk of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coldstart.weights.prefetch.byte_ranges import Range, Ranges
from coldstart.weights.prefetch.region_layout import Check, RegionLayout


@dataclass(frozen=True, slots=True)
class Unit:
    """Checks of one file, and the `pieces`, ranges that do not touch each other, that they cover."""

    file: int
    checks: tuple[Check, ...]
    pieces: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Return the number of bytes to fetch."""
        return sum(end - start for start, end in self.pieces)


def split(layout: RegionLayout, file: int, wanted: Ranges) -> list[Unit]:
    """Return the units for the `wanted` bytes of a file, which consist of complete checks."""
    units: list[Unit] = []
    group: list[Check] = []
    for check in layout.files[file].checks:
        if not wanted.covers(check.start, check.end):
            continue
        if group and check.end - group[0].start > layout.chunk:
            units.append(_unit(file, group))
            group = []
        group.append(check)
    return [*units, _unit(file, group)] if group else units


def _unit(file: int, checks: Sequence[Check]) -> Unit:
    return Unit(file, tuple(checks), tuple(Ranges((check.start, check.end) for check in checks)))
