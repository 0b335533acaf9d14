"""Number of workers that the load requires."""

from __future__ import annotations

import pytest

from coldstart.fleet.window import Window, groups, required


@pytest.mark.parametrize(
    ("waiting", "expected", "room", "workers"),
    [(1, 1, 0, 1), (1, 8, 0, 2), (0, 50, 0, 0), (3, 3, 8, 0), (9, 9, 8, 2), (17, 0, 0, 3)],
)
def test_required(waiting: int, expected: int, room: int, workers: int) -> None:
    assert required(waiting, expected, room, 8) == workers


def test_the_window_forgets() -> None:
    window = Window(10.0)
    for now in (0.0, 1.0, 9.0):
        window.arrived(now)
    assert [window.count(now) for now in (9.5, 10.5, 11.0, 19.0)] == [3, 2, 1, 0]


def test_groups_of_required_workers() -> None:
    assert (groups(30, 4), groups(1, 4)) == (8, 1)
