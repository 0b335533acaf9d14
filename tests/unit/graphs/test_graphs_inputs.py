"""Inputs of a replay: the engine's own, with seeded values that differ in every window."""

from __future__ import annotations

from typing import Any

from coldstart.graphs.inputs import FINITE, WINDOW, Workload

LAYERS = 33
KV = [((n + 1) << 32, 64 << 20) for n in range(LAYERS)]
IDS, OUT = (1 << 20, 64), (1 << 21, 256)


class Writes:
    """Driver that records written bytes; `synchronized` are those at the last wait for the device."""

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


def _prepare(seed: int) -> tuple[Workload, dict[int, bytes]]:
    driver: Any = Writes()
    work = Workload(driver, lambda key: driver.write(IDS[0], b"own"), {"k": OUT}, KV, [(IDS, 4)], 50)
    driver.write(OUT[0], bytes(OUT[1]))
    work.prepare("k", seed)
    # Copies have ended before a graph runs on another stream.
    assert driver.synchronized == driver.held
    return work, driver.held


def test_windows_and_tokens_differ_from_each_other_and_by_the_seed() -> None:
    one, other = _prepare(1)[1], _prepare(2)[1]
    windows = [data for data in one.values() if len(data) == WINDOW]
    assert len(windows) == 2 * LAYERS == len(set(windows))
    assert one == _prepare(1)[1] and not set(windows) & set(other.values())
    assert set(windows[0]) <= set(FINITE.tolist())
    ids = [int.from_bytes(one[IDS[0]][at : at + 4], "little") for at in range(0, IDS[1], 4)]
    assert len(set(ids)) > 1 and set(ids) <= set(range(50))


def test_prepare_overwrites_the_outputs_of_an_earlier_replay() -> None:
    """The captured and the restored graph share their outputs: one that writes nothing must not pass."""
    work, _ = _prepare(1)
    assert work.observe("k")[: OUT[1]] != bytes(OUT[1])
