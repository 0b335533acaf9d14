"""Check that the adopted memory which graphs need does not change while the engine serves requests.

A restored graph has its own copy of every workspace and constant that no tensor names. The proof cannot tell
such memory from a buffer that the engine rewrites before each step, because both sides of the proof replay
without the engine. The recording process therefore serves a few real steps and compares the needed blocks
after each step. A block that changed is state and not contents, and every graph that points into its region
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.graphs import table_files
from coldstart.graphs.api import DriverApi
from coldstart.graphs.builder import drop_unused_regions, subset
from coldstart.graphs.errors import GraphRefusedError
from coldstart.graphs.tables import SymbolRegion, Tables

FILE = "live.json"
LEAST = 2
UNNAMED = ("lib:", "alloc#")


@dataclass
class ContentWatch:
    """Watch over needed contents: `blocks` are (symbol, address, bytes); call `look` after every live step."""

    driver: DriverApi
    blocks: Sequence[tuple[str, int, int]]
    steps: int = 0
    changed: set[str] = field(default_factory=set)
    _last: list[bytes] = field(default_factory=list)

    def look(self) -> None:
        """Compare the blocks with those after the previous step. Raises DriverError."""
        self.driver.synchronize()
        now = [self.driver.read(address, size) for _, address, size in self.blocks]
        if self._last:
            pairs = zip(self.blocks, self._last, now, strict=True)
            self.changed |= {symbol for (symbol, _, _), before, after in pairs if before != after}
        self._last, self.steps = now, self.steps + 1

    def save(self, work: Path) -> None:
        """Write the result for the process that runs the offline phase."""
        (work / FILE).write_text(json.dumps({"steps": self.steps, "changed": sorted(self.changed)}))


def watch(driver: DriverApi, tables: Tables, adopted: Sequence[SymbolRegion]) -> ContentWatch:
    """Return a watch over the contents of unnamed memory in these tables; `adopted` has the addresses in this process."""
    base = {region.symbol: region.base for region in adopted if region.symbol.startswith(UNNAMED)}
    rows = [(tables.regions[r].symbol, offset, size) for r, size, offset, _ in tables.blocks.tolist()]
    return ContentWatch(
        driver, [(symbol, base[symbol] + at, size) for symbol, at, size in rows if symbol in base]
    )


def settle(work: Path, bundle: Path) -> None:
    """Drop every graph from the bundle that points into memory which changed.

    Raises:
        GraphRefusedError: Fewer than two live steps were observed, or no graph remains.
    """
    seen = _read(work)
    if seen["steps"] < LEAST:
        raise GraphRefusedError(
            f"the recording engine ran {seen['steps']} live steps, but {LEAST} are needed"
        )
    tables = table_files.load(bundle)
    reasons = find_refusals(tables, set(seen["changed"]))
    if not reasons:
        return
    if set(tables.keys) <= set(reasons):
        raise GraphRefusedError(f"cannot restore any graph: {next(iter(reasons.values()))}")
    kept = drop_unused_regions(subset(tables, lambda key: key not in reasons, reasons))
    binaries = {d: table_files.load_binary(bundle, d) for d in table_files.read_manifest(bundle)["binaries"]}
    table_files.save(kept, bundle, binaries)


def _read(work: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((work / FILE).read_text()))
    except OSError:
        return {"steps": 0, "changed": []}


def find_refusals(tables: Tables, changed: set[str]) -> dict[str, str]:
    """Return the graphs that point into one of the changed regions, with the reasons."""
    moving = {number for number, region in enumerate(tables.regions) if region.symbol in changed}
    reasons = {}
    for index, key in enumerate(tables.keys):
        mine = moving & set(np.unique(tables.graph(index)[2]["region"]).tolist())
        if mine:
            names = ", ".join(sorted(tables.regions[number].symbol for number in mine))
            reasons[key] = f"{names}: unnamed memory whose contents change between two live steps"
    return reasons
