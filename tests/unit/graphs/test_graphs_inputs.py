"""Inputs of a replay: seeded, different in every window, and drawn only once."""

from __future__ import annotations

from typing import Any

from coldstart.graphs.inputs import FINITE, WINDOW, InputLog, Inputs, StoredInputs, finder
from coldstart.graphs.tables import SymbolRegion

LAYERS = 33
REGIONS = [SymbolRegion(f"kv:{n}", 64 << 20, (n + 1) << 32) for n in range(LAYERS)] + [
    SymbolRegion("static:ids", 64, 1 << 20)
]


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


def _prepared(seed: int) -> dict[int, bytes]:
    driver: Any = Writes()
    inputs = Inputs({"static:ids": (4, 50)}, [r.symbol for r in REGIONS[:-1]], {"k": {}}, {})
    work = StoredInputs(driver, inputs, lambda digest: b"", finder(lambda: REGIONS))
    work.prepare("k", seed)
    held: dict[int, bytes] = driver.held
    return held


def test_windows_differ_from_each_other_and_by_the_seed() -> None:
    one, other = _prepared(1), _prepared(2)
    windows = [data for data in one.values() if len(data) == WINDOW]
    assert len(windows) == 2 * LAYERS == len(set(windows))
    assert one == _prepared(1) and not set(windows) & set(other.values())
    assert set(windows[0]) <= set(FINITE.tolist())


def test_all_copies_have_ended_before_a_graph_runs_on_another_stream() -> None:
    driver: Any = Writes()
    inputs = Inputs(static={"k": {}}, kv=[REGIONS[0].symbol])
    StoredInputs(driver, inputs, lambda digest: b"", finder(lambda: REGIONS)).prepare("k", 1)
    assert driver.held and driver.synchronized == driver.held


def test_inputs_are_read_after_the_engine_has_written_them() -> None:
    driver: Any = Writes()
    driver.synchronize = lambda: driver.write(1 << 20, b"new")
    driver.write(1 << 20, b"old")
    log = InputLog(driver)
    log.remember("k", [SymbolRegion("static:ids", 3, 1 << 20)])
    assert list(log.held.values()) == [b"new"]


def test_prepare_overwrites_the_outputs_of_an_earlier_replay() -> None:
    """The captured and the restored graph may share an output: one that writes nothing must not pass."""
    driver: Any = Writes()
    out = SymbolRegion("static:out", 256, 1 << 21)
    inputs = Inputs(static={"k": {}}, outputs={"k": [("static:out", 0, 64), ("static:out", 64, 0)]})
    work = StoredInputs(driver, inputs, lambda digest: b"", finder(lambda: [out]))
    driver.write(out.base, earlier := bytes(64))
    work.prepare("k", 1)
    assert len(work.observe("k")) == 64 and work.observe("k") != earlier
