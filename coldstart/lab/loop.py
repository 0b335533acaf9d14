"""Discrete-event loop that drives the live decision cores on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from math import inf

Call = Callable[[], object]


class Timer:
    """One planned call; a cancelled timer does nothing when its time comes."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Planned calls in order of their time, in seconds; calls of one time run in the order in which they were planned.

    A core with timers of its own gives `deadline`, which returns when its next timer is due (infinity: none), and `tick`.
    """

    def __init__(self, deadline: Callable[[], float] = lambda: inf, tick: Call = lambda: None) -> None:
        self.now = 0.0
        self._deadline, self._tick = deadline, tick
        self._planned: list[tuple[float, int, Timer]] = []
        self._number = count()

    def plan(self, time: float, call: Call) -> Timer:
        """Call `call` at `time`, and not before the calls of the present."""
        timer = Timer(call)
        heappush(self._planned, (time, next(self._number), timer))
        return timer

    def run(self, arrivals: Iterable[tuple[float, Call]], is_open: Callable[[], bool] = lambda: True) -> None:
        """Run the arrivals, which are in order of time, and all calls; an arrival precedes the calls of its time.

        After the last arrival the loop runs while `is_open` is true and a call is planned.
        """
        rest = iter(arrivals)
        arrival = next(rest, None)
        while arrival is not None or is_open():
            arrives = inf if arrival is None else arrival[0]
            happens = self._planned[0][0] if self._planned else inf
            tick = self._deadline()
            if (soonest := min(arrives, happens, tick)) == inf:
                return
            self.now = max(self.now, soonest)
            if arrival is not None and arrives <= soonest:
                arrival[1]()
                arrival = next(rest, None)
            elif happens <= tick:
                call = heappop(self._planned)[2].call
                if call is not None:
                    call()
            else:
                self._tick()
