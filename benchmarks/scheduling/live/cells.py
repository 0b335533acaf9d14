"""Cells of the campaign: regimes, schedulers, loads, workloads, repetitions.

batch-bound: few slots, KV for all requests. kv-bound: a pool of a few dozen blocks, which a few requests
fill. neither: as many slots as are efficient on this machine, KV for all requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.scheduling.live.names import BASELINE, BOUNDS, CONTROL, HONEST, MLFQ
from benchmarks.scheduling.live.servers import Bundle

BLOCK_BYTES = 163840
"""One KV block of 32 tokens of the benchmark's model: 2 x 10 layers x 2 heads x 64 x 2 bytes per token."""

COMMON = ("--max-model-len", "640", "--block-size", "32", "--max-num-seqs", "256")
AMPLE = ("--kv-cache-memory-bytes", str(1638 * BLOCK_BYTES))
SMALL = ("--kv-cache-memory-bytes", str(32 * BLOCK_BYTES))

OURS = ("--scheduler", "skip-join-mlfq", "--alpha", "3")
MOST_PAYING = 64
"""Requests per iteration beyond which this machine produces no more tokens a second."""


@dataclass(frozen=True, slots=True)
class Regime:
    """One KV pool, the batch cap B, and each scheduler's options to `coldstart serve`.

    fcfs has the batch cap, fcfs-max as many requests as the memory takes; where both are the same server (`neither`),
    fcfs-max is left out. fcfs-again is a second server like fcfs; it shows the noise of the machine.
    `share` shortens the runs of a regime with many requests a second.
    """

    name: str
    pool: tuple[str, ...]
    batch: int
    schedulers: Mapping[str, tuple[str, ...]]
    share: float = 1.0

    def bundle(self, model: str) -> Bundle:
        return Bundle(model, (*COMMON, *self.pool))


def _regime(name: str, pool: tuple[str, ...], batch: int, kv: Sequence[str], share: float = 1.0) -> Regime:
    cap = ("--batch", str(batch))
    made: dict[str, tuple[str, ...]] = dict.fromkeys((BASELINE, CONTROL), ("--scheduler", "fcfs", *cap))
    if batch < MOST_PAYING:
        made[HONEST] = ("--scheduler", "fcfs")
    made[MLFQ] = (*OURS, *cap, *kv)
    made |= {bounded: (*made[MLFQ], "--oldest-share", given) for bounded, given in BOUNDS.items()}
    return Regime(name, pool, batch, made, share)


RECOMPUTE = ("--kv-strategy", "recompute")
PROACTIVE = ("--kv-strategy", "proactive", "--kv-host-memory", str(1 << 28))

REGIMES = {
    regime.name: regime
    for regime in (
        _regime("batch-bound", AMPLE, 4, RECOMPUTE),
        _regime("kv-bound", SMALL, 16, PROACTIVE),
        _regime("neither", AMPLE, MOST_PAYING, RECOMPUTE, share=0.5),
    )
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    regime: str
    workload: str
    load: str
    repetition: int
    scheduler: str

    @property
    def seed(self) -> int:
        """The same for all schedulers of a repetition, so that they serve the same requests."""
        return zlib.crc32(f"{self.regime} {self.workload} {self.load} {self.repetition}".encode()) % 100_000

    def document(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def cells(
    regimes: Sequence[Regime], workloads: Sequence[str], loads: Sequence[str], repetitions: int
) -> Iterator[Cell]:
    """Repetition by repetition; within one the schedulers follow each other, in an order that rotates."""
    for repetition in range(repetitions):
        for workload in workloads:
            for regime in regimes:
                for load in loads:
                    names = list(regime.schedulers)
                    turn = repetition % len(names)
                    for name in names[turn:] + names[:turn]:
                        yield Cell(regime.name, workload, load, repetition, name)
