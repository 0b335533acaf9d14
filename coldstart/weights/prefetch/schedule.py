"""Who wants what, and which unit is fetched next. Pure: knows neither sockets nor threads nor time.

Order: leases as they came, each lease's units in the order of its wants; background wants only while no foreground want of
any lease is unfinished. Invariant of a Board: a planned byte belongs to a unit that is wanted, under way, or ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from coldstart.weights.prefetch.byte_ranges import Ranges
from coldstart.weights.prefetch.region_layout import RegionLayout
from coldstart.weights.prefetch.units import Unit, split


class UnitState(Enum):
    """The life of a unit. FAILED goes back to IDLE when somebody wants it anew."""

    IDLE = "idle"
    BUSY = "busy"
    READY = "ready"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class UnitEntry:
    """A unit, how it stands, how many leases want it, how often its bytes were wrong."""

    unit: Unit
    state: UnitState = UnitState.IDLE
    holders: int = 0
    wrong: int = 0
    reason: str = ""

    @property
    def open(self) -> bool:
        """Whether somebody may still wait for it."""
        return self.state in (UnitState.IDLE, UnitState.BUSY)


class Board:
    """The units of one model: what is planned, what is ready."""

    def __init__(self, layout: RegionLayout) -> None:
        self.layout = layout
        self.entries: list[list[UnitEntry]] = [[] for _ in layout.files]
        self.planned = [Ranges() for _ in layout.files]
        self.ready = [Ranges() for _ in layout.files]

    @property
    def planned_bytes(self) -> int:
        """Bytes that are or will be in memory."""
        return sum(ranges.total for ranges in self.planned)

    @property
    def ready_bytes(self) -> int:
        """Bytes that are verified and published."""
        return sum(ranges.total for ranges in self.ready)

    def new_units(self, wanted: Sequence[Ranges]) -> list[Unit]:
        """What would have to be fetched in addition for `wanted`, one Ranges per file."""
        units: list[Unit] = []
        for number, ranges in enumerate(wanted):
            gaps = Ranges(gap for start, end in ranges for gap in self.planned[number].missing(start, end))
            units += split(self.layout, number, gaps)
        return units

    def want(self, wanted: Sequence[Ranges], units: Iterable[Unit]) -> list[UnitEntry]:
        """Plan the new `units`; the entries that hold the `wanted` bytes, in order. Failed ones are tried anew."""
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
        """The entries with `wanted` bytes, and those that the checks of these need."""
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
        """One lease less on each of them; what nobody wants and nobody fetched is planned no longer."""
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

    def runnable(self, entry: UnitEntry) -> bool:
        """Whether it waits to be fetched and what its checks need is there."""
        ready = self.ready[entry.unit.file]
        return entry.state is UnitState.IDLE and all(ready.covers(*need) for need in entry.unit.needs)

    def publish(self, entry: UnitEntry) -> None:
        """Its bytes are there and verified."""
        entry.state = UnitState.READY
        for start, end in entry.unit.pieces:
            self.ready[entry.unit.file].add(start, end)

    def fail(self, entry: UnitEntry, reason: str) -> list[UnitEntry]:
        """Give up on it and on what cannot be checked without it; all that was given up."""
        entry.state, entry.reason = UnitState.FAILED, reason
        failed = [entry]
        for other in self.entries[entry.unit.file]:
            if other.state is UnitState.IDLE and _needs(other.unit, entry.unit):
                failed += self.fail(other, reason)
        return failed

    def fail_rest(self, file: int | None, reason: str) -> list[UnitEntry]:
        """Give up on all that nobody works on, of one file or of all."""
        chosen = self.entries if file is None else [self.entries[file]]
        rest = [entry for entries in chosen for entry in entries if entry.state is UnitState.IDLE]
        for entry in rest:
            entry.state, entry.reason = UnitState.FAILED, reason
        return rest

    def back(self, entry: UnitEntry) -> None:
        """To be fetched (again), if still wanted."""
        entry.state = UnitState.IDLE
        if not entry.holders:
            self.release_orphan(entry)

    def release_orphan(self, entry: UnitEntry) -> None:
        """Forget an entry that no lease wants any longer."""
        self._forget(entry.unit)
        self.entries[entry.unit.file].remove(entry)


def _needs(unit: Unit, other: Unit) -> bool:
    return any(start < b and a < end for start, end in unit.needs for a, b in other.pieces)


def _concerns(unit: Unit, wanted: Sequence[Ranges]) -> bool:
    return any(wanted[unit.file].overlaps(start, end) for start, end in unit.pieces)


@dataclass(eq=False)
class Lease:
    """What one client wants of one board."""

    board: Board
    foreground: deque[UnitEntry] = field(default_factory=deque)
    background: deque[UnitEntry] = field(default_factory=deque)
    entries: set[UnitEntry] = field(default_factory=set)

    def add(self, entries: Sequence[UnitEntry], *, background: bool) -> None:
        """Queue entries just wanted from the board."""
        (self.background if background else self.foreground).extend(entries)
        again = [entry for entry in entries if entry in self.entries]
        self.entries.update(entries)
        for entry in again:
            entry.holders -= 1  # a lease holds an entry once, however often it asks

    def release(self) -> None:
        """Want nothing any more."""
        self.board.release(self.entries)
        self.entries = set()
        self.foreground.clear()
        self.background.clear()

    def unfinished(self, *, background: bool = False) -> bool:
        """Whether anything of that priority is neither ready nor given up."""
        queue = self.background if background else self.foreground
        while queue and not queue[0].open:
            queue.popleft()
        return bool(queue)


def _each(_: Lease) -> bool:
    return True


def pick(
    leases: Iterable[Lease],
    available: Callable[[Lease], bool],
    counts: Callable[[Lease], bool] = _each,
) -> tuple[Lease, UnitEntry] | None:
    """The next unit to fetch, None when there is nothing to do now.

    `available` leaves out who must wait, `counts` whose foreground keeps nobody's background waiting.
    """
    leases = list(leases)
    queues = [(lease, lease.foreground) for lease in leases]
    if not any(lease.unfinished() for lease in leases if counts(lease)):
        queues += [(lease, lease.background) for lease in leases if lease.unfinished(background=True)]
    for lease, queue in queues:
        if not available(lease):
            continue
        for entry in queue:
            if lease.board.runnable(entry):
                return lease, entry
    return None
