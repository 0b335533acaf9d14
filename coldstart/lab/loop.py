"""Discrete-event loop that drives the live decision cores on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from math import inf

Call = Callable[[], object]


class Timer:
    """Scheduled call, which can be canceled. Without a call, nothing is scheduled."""

    __slots__ = ("call",)

    def __init__(self, call: Call | None = None) -> None:
        self.call = call

    def cancel(self) -> None:
        self.call = None


class EventLoop:
    """Event loop in virtual seconds. Calls scheduled for the same time run in the order in which they were scheduled.

    `deadline` returns the time of the next timer of a decision core, or infinity if it has none, and `tick` runs this timer.
    """

    def __init__(self, deadline: Callable[[], float] = lambda: inf, tick: Call = lambda: None) -> None:
        self.now = 0.0
        self._deadline, self._tick = deadline, tick
        self._queue: list[tuple[float, int, Timer]] = []
        self._sequence = count()

    def call_at(self, time: float, call: Call) -> Timer:
        """Schedule `call` at `time` in seconds, after calls already scheduled for that time."""
        timer = Timer(call)
        heappush(self._queue, (time, next(self._sequence), timer))
        return timer

    def run(self, arrivals: Iterable[tuple[float, Call]], is_open: Callable[[], bool] = lambda: True) -> None:
        """Run arrivals, which are in order of time, and scheduled calls. If their times are equal, the arrival runs first.

        After the last arrival, the loop runs as long as `is_open()` is true and a call is scheduled.
        """
        upcoming = iter(arrivals)
        arrival = next(upcoming, None)
        while arrival is not None or is_open():
            arrival_s = inf if arrival is None else arrival[0]
            call_s = self._queue[0][0] if self._queue else inf
            tick = self._deadline()
            if (soonest := min(arrival_s, call_s, tick)) == inf:
                return
            self.now = max(self.now, soonest)
            if arrival is not None and arrival_s <= soonest:
                arrival[1]()
                arrival = next(upcoming, None)
            elif call_s <= tick:
                call = heappop(self._queue)[2].call
                if call is not None:
                    call()
            else:
                self._tick()
