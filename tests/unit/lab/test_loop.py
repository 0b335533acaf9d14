"""The event loop of the simulators."""

from functools import partial
from math import inf

from coldstart.lab.loop import Loop


def test_loop_runs_arrivals_calls_and_ticks_in_order_of_time() -> None:
    seen: list[tuple[float, str]] = []
    due = [3.0]

    def note(what: str) -> None:
        seen.append((loop.now, what))

    def tick() -> None:
        note("tick")
        due[0] = inf

    loop = Loop(lambda: due[0], tick)
    loop.plan(2.0, partial(note, "second"))
    loop.plan(2.0, partial(note, "third"))
    loop.plan(1.0, partial(note, "cancelled")).cancel()
    loop.plan(2.5, lambda: loop.plan(1.0, partial(note, "late")))
    loop.run([(2.0, partial(note, "first")), (4.0, partial(note, "last"))])
    assert seen == [
        (2.0, "first"), (2.0, "second"), (2.0, "third"), (2.5, "late"), (3.0, "tick"), (4.0, "last")
    ]  # fmt: skip


def test_loop_ends_when_nothing_is_open() -> None:
    loop, seen = Loop(), list[float]()
    for time in (1.0, 2.0):
        loop.plan(time, lambda: seen.append(loop.now))
    loop.run([(0.5, lambda: None)], is_open=lambda: not seen)
    assert seen == [1.0]
