"""Each rule of scheduling_rules catches a scheduler that breaks it."""

from collections.abc import Callable, Iterator

import pytest
from vllm.v1.request import Request

from coldstart.vllm.scheduling.loads import Loads
from coldstart.vllm.scheduling.room import Room
from tests.support.scheduling.scheduling_rules import RUNNING, Enst
from tests.support.scheduling.workloads import Checked, random_load


def problems(seeds: range) -> str:
    """Return the first error of the workloads."""
    for seed in seeds:
        try:
            Checked(random_load(seed), seed).run()
        except Exception as problem:  # noqa: BLE001 - any error is a failure
            return str(problem)
    return ""


def never_evicts(self: Room, request: Request, later: list[Request], victims: list[Request]) -> bool:
    enough: bool = self.needs(request) <= self.free
    return enough and (request.status == RUNNING or self.view.free_slots() > self._joining)


def anybody(self: Room) -> Iterator[Request]:
    return iter(self.view.list_evictable())


def soonest_first(self: Room, spared: list[Request], enst: Enst) -> list[Request]:
    kept = set(spared)
    return sorted((r for r in self.evictable() if r not in kept), key=enst, reverse=True)


def whoever_is_there(self: Loads, request: Request, need: int, kept: list[Request], enst: Enst) -> None:
    room = self.room
    for victim in room.choose_victims(room.list_victims(kept, enst)[::-1], need - room.free, 0):
        room.evict(victim)


def never_for_a_load(self: Loads, request: Request, need: int, kept: list[Request], enst: Enst) -> None:
    return None


MUTATIONS: list[tuple[type, str, Callable[..., object], str]] = [
    (Room, "_fits", never_evicts, "idles while lower ranks run"),
    (Room, "evictable", anybody, "without a token in between"),
    (Room, "list_victims", soonest_first, "victims out of the order of ENST"),
    (Loads, "_make_way", whoever_is_there, "evicted to load a request of larger ENST"),
    (Loads, "_make_way", never_for_a_load, "waits on the host"),
]


@pytest.mark.parametrize(("owner", "name", "mutant", "words"), MUTATIONS)
def test_a_broken_rule_is_caught(
    owner: type,
    name: str,
    mutant: Callable[..., object],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    assert words in problems(range(120))
