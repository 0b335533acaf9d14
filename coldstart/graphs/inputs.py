"""Workload without a model: stored inputs of the capture, seeded tokens and KV cache, outputs by address.

Static regions get the bytes that they had when their graph was captured, so every index in them is valid.
Token regions then get seeded ids. Two windows of each KV region (its start and its middle: keys and values)
get bytes that are finite numbers of moderate size in every float format. The outputs are overwritten, so a graph
that does not write them is noticed. The outputs and the same windows are observed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from coldstart.graphs.errors import AlteredTableError, GraphRefusedError
from coldstart.graphs.tables import SymbolRegion, read_by_digest, read_manifest, sha256

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver
    from coldstart.graphs.restore import Restorer

FOLDER, ENTRY = "inputs", "workload"
WINDOW = 1 << 20
SHIFT = 1016  # distance between the data of two windows: the first 256 windows of a model all differ
# Any combination of these bytes has absolute values of 1 to 2 as fp16, below 1 as bf16 and fp32, 1 to 1.9 as fp8.
FINITE = np.array([0x3C, 0x3D, 0x3E, 0x3F, 0xBC, 0xBD, 0xBE, 0xBF], np.uint8)
STALE = 0xFF  # NaN in every float format: no graph writes such outputs
Place = tuple[str, int, int]
Where = Callable[[str], SymbolRegion]
Span = tuple[int, int]


@dataclass
class Inputs:
    """Inputs and outputs of a bundle's graphs.

    `static` maps a graph key to symbol to digest. `tokens` maps a symbol to (bytes per id, upper bound of
    ids). `outputs` maps a graph key to places.
    """

    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    kv: list[str] = field(default_factory=list)
    static: dict[str, dict[str, str]] = field(default_factory=dict)
    outputs: dict[str, list[Place]] = field(default_factory=dict)

    def restricted(self, keys: Collection[str]) -> Inputs:
        """Return the inputs and outputs of these graphs."""
        static = {key: symbols for key, symbols in self.static.items() if key in keys}
        return replace(
            self, static=static, outputs={k: rows for k, rows in self.outputs.items() if k in keys}
        )

    @classmethod
    def parse_report(cls, report: Mapping[str, Any]) -> Inputs:
        """Parse the inputs from a bundle's report. Raises AlteredTableError if it has none."""
        try:
            return msgspec.convert(report.get(ENTRY), cls)
        except msgspec.ValidationError as error:
            raise AlteredTableError("the bundle has no inputs for the replay of its graphs") from error


class InputLog:
    """Bytes of static regions, stored by digest: most are the same for every graph."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.static: dict[str, dict[str, str]] = {}
        self.held: dict[str, bytes] = {}

    def remember(self, key: str, regions: Iterable[SymbolRegion]) -> None:
        """Store the current contents of these regions as the input of a graph.

        The engine writes them on its own stream, which the driver's reads do not wait for.
        """
        self._driver.synchronize()
        mine = self.static[key] = {}
        for region in regions:
            data = self._driver.read(region.base, region.size)
            mine[region.symbol] = sha256(data)
            self.held.setdefault(mine[region.symbol], data)

    def save(self, directory: Path, inputs: Inputs) -> None:
        """Write the contents of these inputs into a bundle's directory."""
        (directory / FOLDER).mkdir(exist_ok=True)
        for digest in {digest for mine in inputs.static.values() for digest in mine.values()}:
            (directory / FOLDER / digest).write_bytes(self.held[digest])


@dataclass
class StoredInputs:
    """Workload of stored inputs; `here` finds named memory."""

    driver: CudaDriver
    inputs: Inputs
    read: Callable[[str], bytes]
    here: Where

    def prepare(self, key: str, seed: int) -> None:
        """Write the inputs of a graph and overwrite its outputs.

        Raises:
            AlteredTableError: A stored input is damaged.
            GraphRefusedError: This process has no region for an input or an output.
        """
        values = np.random.default_rng(seed)
        for symbol, digest in self.inputs.static.get(key, {}).items():
            self.driver.write(self.here(symbol).base, self.read(digest))
        for symbol, (width, below) in self.inputs.tokens.items():
            region = self.here(symbol)
            ids = values.integers(0, below, region.size // width).astype(f"<i{width}")
            self.driver.write(region.base, ids.tobytes())
        for number, (address, size) in enumerate(self._windows()):
            at = number * SHIFT % (len(_noise(seed)) - 2 * WINDOW)
            self.driver.write(address, _noise(seed)[at : at + size])
        # A captured and a restored graph share their outputs: one that writes none must not pass.
        for address, size in self._outputs(key):
            self.driver.fill(address, size, STALE)
        self.driver.synchronize()  # the graph runs on another stream, which does not wait for these copies

    def _windows(self) -> list[Span]:
        return [span for symbol in self.inputs.kv for span in windows(self.here(symbol))]

    def _outputs(self, key: str) -> list[Span]:
        return [
            (self.here(symbol).base + at, size)
            for symbol, at, size in self.inputs.outputs.get(key, [])
            if size
        ]

    def observe(self, key: str) -> bytes:
        """Return the outputs and the KV windows. Raises GraphRefusedError."""
        spans = [*self._outputs(key), *self._windows()]
        return b"".join(self.driver.read(address, size) for address, size in spans)

    @contextmanager
    def preserve(self, key: str) -> Iterator[None]:
        """Context manager: on exit, restore all memory that `prepare` writes for this graph, except the outputs."""
        symbols = {*self.inputs.static.get(key, {}), *self.inputs.tokens}
        spans = [*((r.base, r.size) for r in map(self.here, symbols)), *self._windows()]
        before = [(address, self.driver.read(address, size)) for address, size in spans]
        try:
            yield
        finally:
            for address, data in before:
                self.driver.write(address, data)


@functools.lru_cache(maxsize=4)
def _noise(seed: int) -> bytes:
    """Return finite numbers for any window.

    The bytes are drawn once for each seed: a model has hundreds of windows and is prepared thousands of
    times.
    """
    values = np.random.default_rng((seed, len(FINITE)))
    return bytes(FINITE[values.integers(0, len(FINITE), 2 * WINDOW + (1 << 18), np.uint8)])


def windows(region: SymbolRegion) -> list[tuple[int, int]]:
    """Return (address, bytes) of the windows at the start and the middle, or of the full region if it is small."""
    if region.size <= 2 * WINDOW:
        return [(region.base, region.size)]
    return [(region.base, WINDOW), (region.base + region.size // 2, WINDOW)]


def finder(source: Callable[[], Iterable[SymbolRegion]]) -> Where:
    """Return a function that finds a region by symbol, and raises GraphRefusedError for an unknown one."""
    known: dict[str, SymbolRegion] = {}

    def find(symbol: str) -> SymbolRegion:
        if symbol not in known:
            known.update({region.symbol: region for region in source()})
        if symbol not in known:
            raise GraphRefusedError(f"{symbol} does not exist in this process")
        return known[symbol]

    return find


def open_inputs(restorer: Restorer) -> StoredInputs:
    """Return the stored inputs of a bundle in this process's memory. Raises AlteredTableError."""
    inputs = Inputs.parse_report(read_manifest(restorer.directory).report)
    read = functools.partial(read_by_digest, restorer.directory / FOLDER)
    return StoredInputs(restorer.driver, inputs, read, finder(restorer.framework.regions))
