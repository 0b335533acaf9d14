"""Timers in a heap; an entry is not removed when it becomes irrelevant, so its receiver checks it when it is due."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf


class Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, str]] = []
        self._number = 0

    def add(self, time: float, kind: str, name: str) -> None:
        self._number += 1
        heappush(self._heap, (time, self._number, kind, name))

    def next(self) -> float:
        return self._heap[0][0] if self._heap else inf

    def due(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the timers that are due, in order; timers added meanwhile are left for the next call."""
        last = self._number
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] <= last:
            _, _, kind, name = heappop(self._heap)
            yield kind, name
