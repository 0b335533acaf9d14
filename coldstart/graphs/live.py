"""Adopted memory while the engine works: what a graph needs of it must stand still from one live step to the next.

A restored graph has a copy of its own of every workspace and constant that no tensor names.  A proof cannot tell such
memory from a buffer that the engine rewrites before each step, since both of its sides replay without the engine.  So
the recording process serves a few real steps and looks at the needed blocks after each: a block that has changed is
state, not contents, and every graph that points into its region is refused.
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
    """`blocks` are (symbol, address, bytes) of needed contents; `look` after every live step."""

    driver: DriverApi
    blocks: Sequence[tuple[str, int, int]]
    steps: int = 0
    changed: set[str] = field(default_factory=set)
    _last: list[bytes] = field(default_factory=list)

    def look(self) -> None:
        """Compare with the step before. Raises DriverError."""
        self.driver.synchronize()
        now = [self.driver.read(address, size) for _, address, size in self.blocks]
        if self._last:
            pairs = zip(self.blocks, self._last, now, strict=True)
            self.changed |= {symbol for (symbol, _, _), before, after in pairs if before != after}
        self._last, self.steps = now, self.steps + 1

    def save(self, work: Path) -> None:
        """Leave what was seen for whoever started this process."""
        (work / FILE).write_text(json.dumps({"steps": self.steps, "changed": sorted(self.changed)}))


def watch(driver: DriverApi, tables: Tables, adopted: Sequence[SymbolRegion]) -> ContentWatch:
    """A watch over the contents that these tables keep of memory without a name; `adopted` says where it is here."""
    base = {region.symbol: region.base for region in adopted if region.symbol.startswith(UNNAMED)}
    rows = [(tables.regions[r].symbol, offset, size) for r, size, offset, _ in tables.blocks.tolist()]
    return ContentWatch(
        driver, [(symbol, base[symbol] + at, size) for symbol, at, size in rows if symbol in base]
    )


def settle(work: Path, bundle: Path) -> None:
    """Drop from the bundle every graph that points into memory which changed.

    Raises Refused where fewer than two live steps were seen, or where no graph is left.
    """
    seen = _read(work)
    if seen["steps"] < LEAST:
        raise GraphRefusedError(
            f"the recording engine was seen to take {seen['steps']} live steps, {LEAST} are needed"
        )
    tables = table_files.load(bundle)
    reasons = refusals(tables, set(seen["changed"]))
    if not reasons:
        return
    if set(tables.keys) <= set(reasons):
        raise GraphRefusedError(f"no graph can be restored: {next(iter(reasons.values()))}")
    kept = drop_unused_regions(subset(tables, lambda key: key not in reasons, reasons))
    binaries = {d: table_files.load_binary(bundle, d) for d in table_files.read_manifest(bundle)["binaries"]}
    table_files.save(kept, bundle, binaries)


def _read(work: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((work / FILE).read_text()))
    except OSError:
        return {"steps": 0, "changed": []}


def refusals(tables: Tables, changed: set[str]) -> dict[str, str]:
    """Graph to reason, for those that point into one of these regions."""
    moving = {number for number, region in enumerate(tables.regions) if region.symbol in changed}
    reasons = {}
    for index, key in enumerate(tables.keys):
        mine = moving & set(np.unique(tables.graph(index)[2]["region"]).tolist())
        if mine:
            names = ", ".join(sorted(tables.regions[number].symbol for number in mine))
            reasons[key] = f"{names}: unnamed memory whose contents change between two live steps"
    return reasons
