"""Inputs of a replay: seeded, different in every window, and drawn only once."""

from __future__ import annotations

from typing import Any

from coldstart.graphs.inputs import InputLog, Inputs, StoredInputs, finder
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


def test_all_copies_have_ended_before_a_graph_runs_on_another_stream() -> None:
    driver: Any = Writes()
    inputs = Inputs(static={"k": {}}, kv=[REGIONS[0].symbol])
    StoredInputs(driver, inputs, lambda digest: b"", finder(lambda: REGIONS), None, None).prepare("k", 1)
    assert driver.held and driver.synchronized == driver.held


def test_inputs_are_read_after_the_engine_has_written_them() -> None:
    driver: Any = Writes()
    driver.synchronize = lambda: driver.write(1 << 20, b"new")
    driver.write(1 << 20, b"old")
    log = InputLog(driver)
    log.remember("k", [SymbolRegion("static:ids", 3, 1 << 20)])
    assert list(log.held.values()) == [b"new"]
