"""Sets of bytes as sorted, disjoint, half-open ranges that do not touch each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]


class Ranges:
    """Set of integers, stored as ranges [start, end); `total` is their number."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        for start, end in ranges:
            self.add(start, end)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def add(self, start: int, end: int) -> None:
        """Add [start, end), and merge it with the ranges that it touches."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._replace(first, last, [(start, end)])

    def remove(self, start: int, end: int) -> None:
        """Remove [start, end)."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        cut = list(zip(self._starts[first:last], self._ends[first:last], strict=True))
        kept = [(a, min(b, start)) for a, b in cut if a < start] + [
            (max(a, end), b) for a, b in cut if b > end
        ]
        self._replace(first, last, kept)

    def covers(self, start: int, end: int) -> bool:
        """Return whether the set contains all of [start, end); True for an empty range."""
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and self._ends[at] >= end)

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether the set contains any of [start, end)."""
        at = bisect_right(self._ends, start)
        return start < end and at < len(self._starts) and self._starts[at] < end

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the parts of [start, end) that the set does not contain, in order."""
        gaps: list[Range] = []
        at = bisect_right(self._ends, start)
        while at < len(self._starts) and self._starts[at] < end:
            if start < self._starts[at]:
                gaps.append((start, self._starts[at]))
            start = self._ends[at]
            at += 1
        return [*gaps, (start, end)] if start < end else gaps

    def _replace(self, first: int, last: int, by: list[Range]) -> None:
        self.total += sum(b - a for a, b in by)
        self.total -= sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [a for a, _ in by]
        self._ends[first:last] = [b for _, b in by]
