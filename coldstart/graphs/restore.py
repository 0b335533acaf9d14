"""Restore graphs without a forward pass; the caller captures the graphs that cannot be restored.

The tables of a bundle are relocated once, and the graphs are built before the server is ready. The kernels are loaded
from the binaries in the bundle.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.graphs.api import NodeKind
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.link import make_launches, relocate
from coldstart.graphs.tables import (
    KERNELS,
    MEMCPY,
    MEMSET,
    Array,
    Graph,
    Kernel,
    SymbolRegion,
    Tables,
    load,
    read_by_digest,
)
from coldstart.system import start_progress, timeline

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver
    from coldstart.graphs.torch_framework import TorchFramework

UNWRITTEN = 0xFF


@dataclass
class Replayable:
    """Graph executable with the interface of a captured graph in PyTorch: `replay` launches it on the current stream."""

    driver: CudaDriver
    framework: TorchFramework
    executable: int
    keep: list[Any] = field(default_factory=list)

    def replay(self) -> None:
        """Launch the graph once, asynchronously."""
        self.driver.launch(self.executable, self.framework.stream())


class Restorer:
    """Restorer of the graphs of one bundle in one process. `fallbacks` has the reason for each graph not restored."""

    def __init__(self, directory: Path, driver: CudaDriver, framework: TorchFramework) -> None:
        self.directory, self.driver, self.framework = directory, driver, framework
        self.fallbacks: dict[str, str] = {}
        self._tables, self._base = Tables(), np.zeros(0, np.uint64)
        self._functions, self._missing = list[int](), dict[int, str]()

    def restore_all(self) -> dict[str, Replayable]:
        """Restore all graphs, and return those that succeeded by key, in order of size."""
        if not self.link():
            return {}
        held, graphs = self._tables.graphs, dict[str, Replayable]()
        counter = start_progress.ProgressCounter("restore graphs", len(held), "graphs")
        for number, key in enumerate(sorted(held, key=lambda key: held[key].size), 1):
            if (graph := self.restore(key)) is not None:
                graphs[key] = graph
            counter.report_done(number)
        return graphs

    # --- linking -------------------------------------------------------------------------------------
    def link(self) -> bool:
        """Load and relocate the bundle, and return whether this succeeded. If not, set `fallbacks["*"]` to the reason."""
        with timeline.measure("graphs: link", track="graphs"):
            try:
                tables = load(self.directory)
                self._base = self._find_bases(tables.regions)
                self._write_contents(tables)
                self._functions, self._missing = self._find_kernels(tables.kernels)
                self._tables = tables
            except GraphError as error:
                self.fallbacks["*"] = str(error)
                with suppress(GraphError):  # report only the first error
                    self.framework.release()
        return "*" not in self.fallbacks

    def _find_bases(self, regions: Sequence[SymbolRegion]) -> Array:
        """Return the address of each region. Raises GraphRefusedError if this process has no region of that name and size."""
        here = {r.symbol: r for r in self.framework.regions()}
        for region in regions:
            size = here[region.symbol].size if region.symbol in here else "no"
            if not region.is_provided and size != region.size:
                raise GraphRefusedError(
                    f"memory region {region.symbol} has {size} bytes in this process, but {region.size} bytes in the bundle"
                )
        reserved = iter(self.framework.reserve([r.size for r in regions if r.is_provided]))
        bases = [next(reserved) if r.is_provided else here[r.symbol].base for r in regions]
        return np.array(bases, np.uint64)

    def _write_contents(self, tables: Tables) -> None:
        """Write the stored contents into the memory that the bundle provides, and NaN into the rest."""
        data = relocate(tables.contents, tables.content_relocations, self._base, self.driver)
        for base, region in zip(self._base.tolist(), tables.regions, strict=True):
            if region.is_provided and region.size:
                self.driver.fill(base, region.size, UNWRITTEN)
        for region, length, offset, start in tables.blocks.tolist():
            self.driver.write(int(self._base[region]) + offset, data[start : start + length].tobytes())

    def _find_kernels(self, kernels: Sequence[Kernel]) -> tuple[list[int], dict[int, str]]:
        """Return the function of each kernel, and, by kernel index, the reasons for missing kernels."""
        # Many kernels share a binary of up to 22 MB, so read each binary once.
        library = functools.cache(self._load_library)
        functions, missing = [0] * len(kernels), dict[int, str]()
        for number, kernel in enumerate(kernels):
            try:
                functions[number] = self.driver.library_kernel(library(kernel.binary), kernel.name)
                self.driver.set_function_attributes(functions[number], kernel.attributes)
            except GraphError as error:
                missing[number] = f"kernel {kernel.name}: {error}"
        return functions, missing

    def _load_library(self, digest: str | None) -> int:
        if digest is None:
            raise GraphRefusedError("the binary of the kernel is unknown")
        return self.driver.load_library(read_by_digest(self.directory / KERNELS, digest))

    # --- building ------------------------------------------------------------------------------------
    def restore(self, key: str) -> Replayable | None:
        """Restore a graph, and return it. If that fails, add the reason to `fallbacks` and return None."""
        try:
            with timeline.measure(f"graphs: {key}", track="restore"):
                return self._build(key)
        except GraphError as error:
            self.fallbacks[key] = str(error)
            return None

    def _build(self, key: str) -> Replayable:
        """Build a graph in the driver: nodes in captured order, attributes, edges with their data, and the executable."""
        tables, graph = self._tables, self._tables.graphs[key]
        for number in graph.kernels():
            if number in self._missing:
                raise GraphRefusedError(self._missing[number])
        payload = relocate(graph.payload, graph.relocations, self._base, self.driver)
        rows, pointers = make_launches(graph, payload, tables.kernels, self._functions)
        raw = self.driver.new_graph()
        try:
            nodes = _add_nodes(self.driver, raw, graph, rows, payload)
            given = graph.nodes["attributes"]
            for number in np.flatnonzero(given).tolist():
                self.driver.set_attributes(nodes[number], tables.attributes[given[number]])
            self.driver.add_edges(raw, nodes, graph.edges)
            executable = self.driver.instantiate(raw)
        except GraphError:
            with suppress(GraphError):
                self.driver.destroy(raw)
            raise
        return Replayable(self.driver, self.framework, executable, [pointers, payload, raw])


def _add_nodes(driver: CudaDriver, raw: int, graph: Graph, rows: Array, payload: Array) -> list[Any]:
    """Add the nodes of a graph, and return their handles. Consecutive kernel nodes are added in one batch."""
    nodes, handles = graph.nodes, list[Any]()
    for other in [*np.flatnonzero(nodes["kind"] != NodeKind.KERNEL).tolist(), len(nodes)]:
        if other > len(handles):
            handles += driver.add_kernels(raw, rows[len(handles) : other])
        if other < len(nodes):
            data = payload[int(nodes[other]["payload"]) :]
            kind = nodes[other]["kind"]
            if kind == NodeKind.MEMSET:
                handles.append(driver.add_memset(raw, data[: MEMSET.itemsize].view(MEMSET)[0]))
            elif kind == NodeKind.MEMCPY:
                handles.append(driver.add_memcpy(raw, data[: MEMCPY.itemsize].view(MEMCPY)[0]))
            else:
                handles.append(driver.add_empty(raw))
    return handles
