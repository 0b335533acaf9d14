"""Fetch schedule: the state of each check, the checks that each lease requests, and the run of checks to fetch next.

Leases are served in order of arrival, and the checks of a lease in order. Background leases are served only while no
other lease is unfinished. This module is pure: it uses no sockets, threads or clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

from coldstart.weights.prefetch.layout import RegionLayout


class CheckState(IntEnum):
    """State of a check. FAILED and FREED return to IDLE when a lease requests the check again."""

    UNWANTED, IDLE, BUSY, READY, FAILED, FREED = range(6)


class Lease:
    """Numbers of the checks that one client requested, in order. See `LimitedFetch` for `background` and `most_held_bytes`."""

    def __init__(
        self, wanted: Sequence[int], *, background: bool = False, most_held_bytes: int | None = None
    ) -> None:
        self.wanted, self.background, self.most_held_bytes = wanted, background, most_held_bytes
        self.done = 0
        """Number of checks at the beginning of `wanted` that are ready, failed or freed."""


class FetchSchedule:
    """States of the checks of one model, and the bytes that all leases have requested so far.

    `settled` lists each check that became ready or failed, in this order, and `reasons` has the reason for each failure.
    """

    def __init__(self, layout: RegionLayout) -> None:
        self.layout = layout
        self.states = bytearray(len(layout.checks))
        self.settled, self.reasons = list[int](), dict[int, str]()
        self._bytes = [0] * len(CheckState)
        self._bytes[CheckState.UNWANTED] = layout.count_bytes(range(len(layout.checks)))

    @property
    def ready_bytes(self) -> int:
        """Return the number of bytes that are ready."""
        return self._bytes[CheckState.READY]

    @property
    def wanted_bytes(self) -> int:
        """Return the number of bytes that were requested and not freed since."""
        return sum(self._bytes) - self._bytes[CheckState.UNWANTED] - self._bytes[CheckState.FREED]

    def request_checks(self, numbers: Iterable[int]) -> None:
        """Schedule those of the checks `numbers` that were never requested, that failed, or that were freed."""
        missing = (CheckState.UNWANTED, CheckState.FAILED, CheckState.FREED)
        self.set_state([one for one in numbers if self.states[one] in missing], CheckState.IDLE)

    def set_state(self, numbers: Iterable[int], state: CheckState, reason: str = "") -> None:
        """Set the state of the checks `numbers`. `reason` is stored if `state` is FAILED."""
        for number in numbers:
            size = self.layout.count_bytes([number])
            self._bytes[self.states[number]] -= size
            self._bytes[state] += size
            self.states[number] = state
            self.settled += [number] if state in (CheckState.READY, CheckState.FAILED) else []
            self.reasons.pop(number, None)
            if state == CheckState.FAILED:
                self.reasons[number] = reason

    def may_fetch(self, lease: Lease) -> bool:
        """Return whether fewer bytes are held than the lease allows."""
        held = self._bytes[CheckState.READY] + self._bytes[CheckState.BUSY]
        return lease.most_held_bytes is None or held < lease.most_held_bytes

    def list_checks(self, state: CheckState, numbers: Iterable[int] | None = None) -> list[int]:
        """Return those of the check numbers `numbers` (None: of all checks) that are in `state`."""
        chosen = range(len(self.states)) if numbers is None else numbers
        return [number for number in chosen if self.states[number] == state]

    def is_unfinished(self, lease: Lease) -> bool:
        """Return whether a check of the lease is neither ready nor failed."""
        while lease.done < len(lease.wanted) and self.states[lease.wanted[lease.done]] >= CheckState.READY:
            lease.done += 1
        return lease.done < len(lease.wanted)

    def pick_run(self, leases: Iterable[Lease], available: Callable[[Lease], bool]) -> range | None:
        """Return the numbers of the next digested ranges to fetch, consecutive in one file, or None if none waits.

        Args:
            leases: All leases, in order of arrival.
            available: Returns whether a lease may use a stream now.
        """
        unfinished = [lease for lease in leases if self.is_unfinished(lease)]
        for lease in [lease for lease in unfinished if not lease.background] or unfinished:
            if available(lease) and (run := self._find_run(lease)):
                return run
        return None

    def _find_run(self, lease: Lease) -> range:
        """Return the numbers of the first consecutive idle checks of a lease, up to one chunk, or an empty range."""
        checks, run = self.layout.checks, range(0)
        for at in range(lease.done, len(lease.wanted)):
            number = lease.wanted[at]
            idle = self.states[number] == CheckState.IDLE
            if not run:
                run = range(number, number + 1) if idle else run
            elif (
                not idle
                or number != run.stop
                or checks[number].file is not checks[run.start].file
                or checks[number].end - checks[run.start].start > self.layout.chunk
            ):
                break
            else:
                run = range(run.start, number + 1)
        return run


def join(numbers: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers as pairs [first, end) of consecutive numbers."""
    pairs: list[list[int]] = []
    for number in numbers:
        if pairs and pairs[-1][1] == number:
            pairs[-1][1] = number + 1
        else:
            pairs.append([number, number + 1])
    return pairs
