"""Fetch schedule: the requested units of each lease, and the unit to fetch next. Pure: no sockets, threads or clock.

A unit is about a chunk of bytes of one file, which are fetched and verified together. Leases are served in order of
arrival, and the units of a lease in order. Background leases are served only while no other lease is unfinished.
Invariant of a Board: each planned byte belongs to a unit that is requested, being fetched or ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

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
        entries = [one for entries in self.entries for one in entries if _concerns(one.unit, wanted)]
        for entry in entries:
            entry.holders += 1
            if entry.state is UnitState.FAILED:
                entry.state, entry.wrong = UnitState.IDLE, 0
        return sorted(entries, key=lambda entry: (entry.unit.file, entry.unit.pieces[0]))

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

    def publish(self, entry: UnitEntry) -> None:
        """Mark the bytes of the entry as verified and readable."""
        entry.state = UnitState.READY
        for start, end in entry.unit.pieces:
            self.ready[entry.unit.file].add(start, end)

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
            if entry.state is UnitState.IDLE:
                return lease, entry
    return None
