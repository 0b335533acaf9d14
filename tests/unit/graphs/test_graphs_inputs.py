"""Inputs of a replay: the engine's own, with seeded values that differ in every window."""

from __future__ import annotations

from typing import Any

from coldstart.graphs.inputs import FINITE, WINDOW, Workload

LAYERS = 33
KV = [((n + 1) << 32, 64 << 20) for n in range(LAYERS)]
IDS, OUT = (1 << 20, 64), (1 << 21, 256)


class Writes:
    """Driver that records written bytes."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}

    def write(self, address: int, data: bytes) -> None:
        self.held[address] = data

    def fill(self, address: int, size: int, value: int) -> None:
        self.held[address] = bytes([value]) * size

    def read(self, address: int, size: int) -> bytes:
        return self.held.get(address, b"")[:size]

    def synchronize(self) -> None:
        self.synchronized = dict(self.held)


def _workload(driver: Any, **changed: Any) -> Workload:
    members: dict[str, Any] = {"outputs": {"k": OUT}, "kv": KV, "tokens": [(IDS, 4)], "vocabulary": 50}
    return Workload(driver, lambda key: driver.write(IDS[0], b"of the engine"), **members | changed)


def _prepared(seed: int) -> dict[int, bytes]:
    driver = Writes()
    _workload(driver).prepare("k", seed)
    return driver.held


def test_windows_differ_from_each_other_and_by_the_seed() -> None:
    one, other = _prepared(1), _prepared(2)
    windows = [data for data in one.values() if len(data) == WINDOW]
    assert len(windows) == 2 * LAYERS == len(set(windows))
    assert one == _prepared(1) and not set(windows) & set(other.values())
    assert set(windows[0]) <= set(FINITE.tolist())


def test_tokens_replace_those_of_the_engine() -> None:
    ids = [int.from_bytes(_prepared(1)[IDS[0]][at : at + 4], "little") for at in range(0, IDS[1], 4)]
    assert len(set(ids)) > 1 and set(ids) <= set(range(50))


def test_all_copies_have_ended_before_a_graph_runs_on_another_stream() -> None:
    driver = Writes()
    _workload(driver).prepare("k", 1)
    assert driver.held and driver.synchronized == driver.held


def test_prepare_overwrites_the_outputs_of_an_earlier_replay() -> None:
    """The captured and the restored graph share their outputs: one that writes nothing must not pass."""
    driver = Writes()
    work = _workload(driver, kv=[])
    driver.write(OUT[0], earlier := bytes(OUT[1]))
    work.prepare("k", 1)
    assert len(work.observe("k")) == OUT[1] and work.observe("k") != earlier
