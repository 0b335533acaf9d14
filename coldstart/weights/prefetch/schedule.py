"""Fetch schedule: the requested units of each lease, and the unit to fetch next. Pure: no sockets, threads or clock.

Leases are served in order of arrival, and the units of a lease in order. Background leases are served only
while no other lease is unfinished. Invariant of a Board: each planned
byte belongs to a unit that is requested, being fetched or ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from coldstart.weights.prefetch.byte_ranges import Ranges
from coldstart.weights.prefetch.region_layout import RegionLayout
from coldstart.weights.prefetch.units import Unit, split


class UnitState(Enum):
    """State of a unit; FAILED returns to IDLE when a lease requests the unit again."""

    IDLE = "idle"
    BUSY = "busy"
    READY = "ready"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class UnitEntry:
    """Unit with its state, the number of leases that request it, and the number of failed verifications."""

    unit: Unit
    state: UnitState = UnitState.IDLE
    holders: int = 0
    wrong: int = 0
    reason: str = ""

    @property
    def open(self) -> bool:
        """Return whether the unit is neither ready nor failed."""
        return self.state in (UnitState.IDLE, UnitState.BUSY)


class Board:
    """Units of one model: the planned bytes and the ready bytes."""

    def __init__(self, layout: RegionLayout) -> None:
        self.layout = layout
        self.entries: list[list[UnitEntry]] = [[] for _ in layout.files]
        self.planned = [Ranges() for _ in layout.files]
        self.ready = [Ranges() for _ in layout.files]

    @property
    def planned_bytes(self) -> int:
        """Return the number of bytes that are in memory or will be fetched."""
        return sum(ranges.total for ranges in self.planned)

    @property
    def ready_bytes(self) -> int:
        """Return the number of verified bytes that clients can read."""
        return sum(ranges.total for ranges in self.ready)

    def new_units(self, wanted: Sequence[Ranges]) -> list[Unit]:
        """Return the units that must be fetched in addition for `wanted`, which has one Ranges for each file."""
        units: list[Unit] = []
        for number, ranges in enumerate(wanted):
            gaps = Ranges(gap for start, end in ranges for gap in self.planned[number].missing(start, end))
            units += split(self.layout, number, gaps)
        return units

    def want(self, wanted: Sequence[Ranges], units: Iterable[Unit]) -> list[UnitEntry]:
        """Plan the new `units`; return the entries with the `wanted` bytes, in order. Failed entries are retried."""
        for unit in units:
            self.entries[unit.file].append(UnitEntry(unit))
            for start, end in unit.pieces:
                self.planned[unit.file].add(start, end)
        entries = self._holding(wanted)
        for entry in entries:
            entry.holders += 1
            if entry.state is UnitState.FAILED:
                entry.state, entry.wrong = UnitState.IDLE, 0
        return sorted(entries, key=lambda entry: (entry.unit.file, entry.unit.pieces[-1]))

    def _holding(self, wanted: Sequence[Ranges]) -> list[UnitEntry]:
        """Return the entries with `wanted` bytes, and the entries whose bytes their verification needs."""
        needed = [Ranges(ranges) for ranges in wanted]
        before = -1
        while (total := sum(ranges.total for ranges in needed)) > before:
            before = total
            wanted_entries = [
                entry for entries in self.entries for entry in entries if _concerns(entry.unit, needed)
            ]
            for entry in wanted_entries:
                for need in entry.unit.needs:
                    needed[entry.unit.file].add(*need)
        return wanted_entries

    def release(self, entries: Iterable[UnitEntry]) -> None:
        """Drop one lease of each entry; entries without a lease or fetched bytes leave the plan."""
        gone: set[UnitEntry] = set()
        for entry in entries:
            entry.holders -= 1
            if not entry.holders and entry.state in (UnitState.IDLE, UnitState.FAILED):
                gone.add(entry)
        for entry in gone:
            self._forget(entry.unit)
        if gone:
            self.entries = [[e for e in entries if e not in gone] for entries in self.entries]

    def _forget(self, unit: Unit) -> None:
        for start, end in unit.pieces:
            self.planned[unit.file].remove(start, end)

    def is_runnable(self, entry: UnitEntry) -> bool:
        """Return whether the unit can be fetched now: it is idle, and the bytes that its verification needs are ready."""
        ready = self.ready[entry.unit.file]
        return entry.state is UnitState.IDLE and all(ready.covers(*need) for need in entry.unit.needs)

    def publish(self, entry: UnitEntry) -> None:
        """Mark the bytes of the entry as verified and readable."""
        entry.state = UnitState.READY
        for start, end in entry.unit.pieces:
            self.ready[entry.unit.file].add(start, end)

    def fail(self, entry: UnitEntry, reason: str) -> list[UnitEntry]:
        """Mark the entry as failed, and the entries that cannot be verified without it; return all of them."""
        entry.state, entry.reason = UnitState.FAILED, reason
        failed = [entry]
        for other in self.entries[entry.unit.file]:
            if other.state is UnitState.IDLE and _needs(other.unit, entry.unit):
                failed += self.fail(other, reason)
        return failed

    def fail_rest(self, file: int | None, reason: str) -> list[UnitEntry]:
        """Mark the idle entries of one file (None: of all files) as failed; return them."""
        chosen = self.entries if file is None else [self.entries[file]]
        rest = [entry for entries in chosen for entry in entries if entry.state is UnitState.IDLE]
        for entry in rest:
            entry.state, entry.reason = UnitState.FAILED, reason
        return rest

    def requeue(self, entry: UnitEntry) -> None:
        """Return a unit to the schedule, or drop it if no lease requests it."""
        entry.state = UnitState.IDLE
        if not entry.holders:
            self.release_orphan(entry)

    def release_orphan(self, entry: UnitEntry) -> None:
        """Drop an entry that no lease needs."""
        self._forget(entry.unit)
        self.entries[entry.unit.file].remove(entry)


def _needs(unit: Unit, other: Unit) -> bool:
    return any(start < b and a < end for start, end in unit.needs for a, b in other.pieces)


def _concerns(unit: Unit, wanted: Sequence[Ranges]) -> bool:
    return any(wanted[unit.file].overlaps(start, end) for start, end in unit.pieces)


class Lease:
    """Units of one board that one client requested; `entries` are the units that the board has returned for it."""

    def __init__(self, board: Board, entries: Sequence[UnitEntry], *, background: bool = False) -> None:
        self.board, self.entries, self.background = board, entries, background
        self.queue = deque(entries)

    def release(self) -> None:
        """Drop the request."""
        self.board.release(self.entries)
        self.entries = ()
        self.queue.clear()

    def has_unfinished(self) -> bool:
        """Return whether a unit is neither ready nor failed."""
        while self.queue and not self.queue[0].open:
            self.queue.popleft()
        return bool(self.queue)


def pick(leases: Iterable[Lease], available: Callable[[Lease], bool]) -> tuple[Lease, UnitEntry] | None:
    """Return the next unit to fetch with its lease, or None if no unit can be fetched now.

    Args:
        leases: All leases, in order of arrival.
        available: Returns whether a lease may use a stream now.
    """
    unfinished = [lease for lease in leases if lease.has_unfinished()]
    for lease in [lease for lease in unfinished if not lease.background] or unfinished:
        if not available(lease):
            continue
        for entry in lease.queue:
            if lease.board.is_runnable(entry):
                return lease, entry
    return None
