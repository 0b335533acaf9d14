"""Inputs and outputs of a graph during verification.

The engine writes the inputs of a graph as it does before a capture, so all indices in them are valid. Then the token
buffers receive seeded token IDs. Two windows of each KV cache region, at its start and its middle (keys and values),
receive bytes that are finite, moderate numbers in every float format. The outputs are overwritten before a replay, so
that a graph that does not write them is detected. The outputs and the same windows are compared afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver

WINDOW = 1 << 20
SHIFT = 1016  # offset between the data of two windows, so that the first 256 windows of a model differ
# All combinations of these bytes have absolute values of 1 to 2 as fp16, below 1 as bf16 and fp32, 1 to 1.9 as fp8.
FINITE = np.array([0x3C, 0x3D, 0x3E, 0x3F, 0xBC, 0xBD, 0xBE, 0xBF], np.uint8)
STALE = 0xFF  # NaN in every float format; no graph outputs NaN
Span = tuple[int, int]
"""Address and size in bytes."""


@dataclass
class Workload:
    """Inputs and outputs of all graphs in one process. `write` makes the engine write the inputs of a graph, given its key.

    `outputs` are indexed by graph key. `tokens` are pairs (span, bytes per token ID); IDs are below `vocabulary`.
    """

    driver: CudaDriver
    write: Callable[[str], object]
    outputs: Mapping[str, Span]
    kv: list[Span]
    tokens: list[tuple[Span, int]]
    vocabulary: int

    def prepare(self, key: str, seed: int) -> None:
        """Write the inputs of a graph, seeded with `seed`, and overwrite its outputs."""
        values = np.random.default_rng(seed)
        self.write(key)
        self.driver.synchronize()  # the engine writes on its own stream, which the driver's copies do not wait for
        for (address, size), width in self.tokens:
            ids = values.integers(0, self.vocabulary, size // width).astype(f"<i{width}")
            self.driver.write(address, ids.tobytes())
        for number, (address, size) in enumerate(self._windows()):
            at = number * SHIFT % (len(_noise(seed)) - 2 * WINDOW)
            self.driver.write(address, _noise(seed)[at : at + size])
        # A captured and a restored graph share their output buffer, so a graph that writes nothing must be detected.
        self.driver.fill(*self.outputs[key], STALE)
        self.driver.synchronize()  # the graph's stream does not wait for these copies

    def observe(self, key: str) -> bytes:
        """Return the bytes of the graph's outputs, followed by the bytes of the KV windows."""
        return b"".join(self.driver.read(*span) for span in [self.outputs[key], *self._windows()])

    def _windows(self) -> list[Span]:
        return [window for region in self.kv for window in windows(*region)]


@functools.lru_cache(maxsize=4)
def _noise(seed: int) -> bytes:
    """Return seeded bytes that are finite numbers in every float format, cached because they are needed thousands of times."""
    values = np.random.default_rng((seed, len(FINITE)))
    return bytes(FINITE[values.integers(0, len(FINITE), 2 * WINDOW + (1 << 18), np.uint8)])


def windows(address: int, size: int) -> list[Span]:
    """Return the windows at the start and in the middle of a region, or the entire region if it is small."""
    if size <= 2 * WINDOW:
        return [(address, size)]
    return [(address, WINDOW), (address + size // 2, WINDOW)]
