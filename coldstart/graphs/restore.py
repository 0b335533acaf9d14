"""Restore graphs without a forward pass; a graph that cannot be restored is captured.

The bundle is linked once. The smallest and the largest batch size are restored before the server is ready,
and the rest in the background. Invariant: replay() of the result of `graph(key)` launches a working graph,
restored or captured. If both fail, `graph` raises GraphRefusedError.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.graphs.api import Captured, DriverApi, FrameworkApi
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.errors import GraphError, GraphRefusedError, MissingRegionError
from coldstart.graphs.kernels import Ladder, ambiguous_names, check_layout
from coldstart.graphs.link import Bases, find_broken_assumptions, launch_rows, relocate
from coldstart.graphs.rebuild import Linked, fill
from coldstart.graphs.table_files import load, load_binary
from coldstart.graphs.tables import Array, SymbolRegion, Tables

Note = Callable[[str, float, float, str], None]
Built = Callable[[str, "Replayable"], None]


@dataclass
class Replayable:
    """Replacement of a captured graph: replay() launches on the framework's current stream."""

    driver: DriverApi
    framework: FrameworkApi
    executable: int
    restored: bool
    keep: list[Any] = field(default_factory=list)

    def replay(self) -> None:
        """Launch the graph once, asynchronously."""
        self.driver.launch(self.executable, self.framework.stream())


class Restorer:
    """Restore of one bundle in one process; thread-safe: any thread may request any graph.

    A word that may be the end of one region or the start of another is read as the start. A graph is refused if the
    two readings differ in this process, unless the proof has `settled` that row of `assumed`. None trusts every row:
    the caller compares the outputs.
    """

    def __init__(
        self,
        directory: Path,
        driver: DriverApi,
        framework: FrameworkApi,
        *,
        note: Note | None = None,
        adopt: bool = False,
        settled: Collection[int] | None = (),
    ) -> None:
        self.directory, self.driver, self.framework = directory, driver, framework
        self._settled, self._broken = settled, dict[int, tuple[int, str]]()
        self.fallbacks: dict[str, str] = {}
        self.adopt = adopt
        self._note = note or (lambda name, start, end, track: None)
        self._graphs: dict[str, Replayable] = {}
        self._lock = threading.RLock()
        self._linked: Linked | None = None
        self._thread: threading.Thread | None = None
        self._bases = Bases(driver, framework, adopt)

    # --- linking -------------------------------------------------------------------------------------
    def link(self) -> bool:
        """Load and link the bundle; return False if it cannot be used, with the reason in `fallbacks['*']`."""
        start = time.monotonic()
        try:
            self._linked = self._link(load(self.directory))
        except GraphError as error:
            self.fallbacks["*"] = str(error)
            self._attempt("release", self._bases.release)
        self._note("graphs: link", start, time.monotonic(), "graphs")
        return self._linked is not None

    def _link(self, tables: Tables) -> Linked:
        base = self._bases.find(tables)
        payload = relocate(tables.payload, tables.relocations, base, self.driver)
        self._write_contents(tables, base)
        functions, missing = self._resolve(tables)
        self._broken, settled = find_broken_assumptions(tables, base), self._settled
        refused = {
            graph: reason
            for row, (graph, reason) in self._broken.items()
            if settled is not None and row not in settled
        }
        return Linked(tables, base, launch_rows(tables, payload, functions), functions, missing, refused)

    def _write_contents(self, tables: Tables, base: Array) -> None:
        if not len(tables.blocks):
            return
        data = relocate(tables.contents, tables.content_relocations, base)
        for region, length, offset, start in tables.blocks.tolist():
            if tables.regions[region].symbol in self._bases.owned:
                self.driver.write(int(base[region]) + offset, data[start : start + length].tobytes())

    def _resolve(self, tables: Tables) -> tuple[list[int], dict[int, str]]:
        # Read each binary once, although many kernels share it: some binaries have 22 MB.
        read = functools.cache(self._binary)
        declared = functools.cache(lambda digest: read_cubin(read(digest)))
        self.ladder = Ladder(self.driver, self.framework, read, ambiguous_names(tables.kernels))
        functions, missing = [0] * len(tables.kernels), {}
        for number, kernel in enumerate(tables.kernels):
            try:
                if kernel.binary and (self.directory / "kernels" / kernel.binary).exists():
                    check_layout(kernel, declared(kernel.binary))
                functions[number] = self.ladder.resolve(kernel)
            except GraphError as error:
                missing[number] = str(error)
        read.cache_clear()
        return functions, missing

    def _binary(self, digest: str) -> bytes:
        return load_binary(self.directory, digest)

    # --- building ------------------------------------------------------------------------------------
    def graph(self, key: str) -> Replayable:
        """Return the graph, restored or else captured. Raises GraphRefusedError if both fail."""
        with self._lock:
            if key not in self._graphs:
                self._graphs[key] = self._restore_or_capture(key)
            return self._graphs[key]

    def graph_or_none(self, key: str) -> Replayable | None:
        """Return the restored graph, or None with the reason in `fallbacks`; the caller then captures it."""
        with self._lock:
            if key not in self._graphs:
                start = time.monotonic()
                try:
                    self._graphs[key] = self._build(key)
                except GraphError as error:
                    self.fallbacks[key] = str(error)
                    return None
                self._note(f"graphs: {key}", start, time.monotonic(), "restore")
            return self._graphs[key]

    def _restore_or_capture(self, key: str) -> Replayable:
        restored = self.graph_or_none(key)
        if restored is not None:
            return restored
        start = time.monotonic()
        graph = self._capture(key)
        self._note(f"graphs: {key}", start, time.monotonic(), "capture")
        return graph

    def _capture(self, key: str) -> Replayable:
        try:
            captured: Captured = self.framework.capture(key)
        except GraphError as error:
            raise GraphRefusedError(
                f"{key} can be neither restored ({self.fallbacks[key]}) nor captured ({error})"
            ) from error
        return Replayable(self.driver, self.framework, captured.executable, restored=False, keep=[captured])

    def _build(self, key: str) -> Replayable:
        linked = self._linked
        if linked is None:
            raise GraphRefusedError(
                self.fallbacks.get("*", "the graphs of the bundle are not linked in this process")
            )
        if key not in linked.tables.keys:
            raise GraphRefusedError(linked.tables.refused.get(key, "the bundle does not contain this graph"))
        index = linked.tables.keys.index(key)
        if index in linked.ambiguous:
            raise GraphRefusedError(linked.ambiguous[index])
        nodes = linked.tables.graph(index)[0]
        for number in np.unique(nodes["kernel"][nodes["kind"] == 0]).tolist():
            if number in linked.missing:
                raise GraphRefusedError(linked.missing[number])
        graph = self.driver.new_graph()
        try:
            executable = fill(self.driver, graph, linked, index)
        except GraphError:
            self._attempt("destroy", functools.partial(self.driver.destroy, graph, 0))
            raise
        return Replayable(self.driver, self.framework, executable, restored=True, keep=[linked.rows, graph])

    def _attempt(self, what: str, work: Callable[[], None]) -> None:
        """Run a cleanup step and record its failure; an earlier failure of that name remains the reason."""
        try:
            work()
        except GraphError as error:
            self.fallbacks.setdefault(what, str(error))

    # --- order ---------------------------------------------------------------------------------------
    def list_first(self, batch: int = 1) -> list[str]:
        """Return the graphs that batches of up to `batch` rows use, and the largest graph, smallest first."""
        sizes = self.sizes()
        order = sorted(sizes, key=sizes.__getitem__)
        below = sum(size < batch for size in sizes.values())
        return list(dict.fromkeys([*order[: below + 1], *order[-1:]]))

    def sizes(self) -> dict[str, int]:
        """Return the batch size of every graph of the linked bundle."""
        if self._linked is None:
            return {}
        tables = self._linked.tables
        return dict(zip(tables.keys, tables.graphs["size"].tolist(), strict=True))

    def start(self, keys: Sequence[str], built: Built) -> None:
        """Build these graphs in the background, largest first; `built` is called in that thread after each success."""
        order = sorted(keys, key=lambda key: -self.sizes()[key])
        self._thread = threading.Thread(
            target=self._background, args=(order, built), name="graphs", daemon=True
        )
        self._thread.start()

    def holds(self, key: str) -> bool:
        """Return whether the linked bundle contains this graph."""
        return key in self.sizes()

    def has_two_readings(self, key: str) -> bool:
        """Return whether a word of this graph has two readings that differ in this process."""
        linked = self._linked
        if linked is None or key not in linked.tables.keys:
            return False
        return linked.tables.keys.index(key) in {graph for graph, _ in self._broken.values()}

    def list_read_as_starts(self) -> list[int]:
        """Return the rows of `assumed` whose two readings differ in this process."""
        return list(self._broken)

    def region(self, symbol: str) -> tuple[SymbolRegion, int]:
        """Return a region and its address in this process. Raises MissingRegionError."""
        for number, region in enumerate(self._linked.tables.regions if self._linked else []):
            if self._linked is not None and region.symbol == symbol:
                return region, int(self._linked.base[number])
        raise MissingRegionError(f"the graphs in the bundle use no memory named {symbol}")

    def _background(self, keys: Sequence[str], built: Built) -> None:
        """Build graphs without capturing any: only the thread that owns the framework may capture."""
        self._attempt("thread", self.driver.adopt_thread)
        for key in keys:
            with self._lock:
                try:
                    graph = self._graphs[key] = self._graphs.get(key) or self._build(key)
                except GraphError as error:
                    self.fallbacks[key] = str(error)
                    continue
            built(key, graph)

    def drop(self, reason: str) -> None:
        """Drop every restored graph and free the memory; all graphs are captured from then on."""
        with self._lock:
            restored = [g for g in self._graphs.values() if g.restored]
            self._graphs = {key: g for key, g in self._graphs.items() if not g.restored}
            self._linked = None
            self.fallbacks["*"] = reason
        for graph in restored:
            self._attempt("destroy", functools.partial(self.driver.destroy, graph.keep[1], graph.executable))
        self._attempt("release", self._bases.release)

    def wait(self) -> None:
        """Block until the background thread has ended."""
        if self._thread is not None:
            self._thread.join()
