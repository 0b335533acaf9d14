"""What one process saw: raw payloads, the addresses of everything that they may point to, and contents.

A snapshot is offline material.  Two of them, taken in processes whose bases differ, become a bundle.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from coldstart.graphs.api import Range
from coldstart.graphs.builder import subset
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.table_files import load, load_binary, save
from coldstart.graphs.tables import Array, SymbolRegion, Tables

# `held` marks the bytes of a map that code its address.
MAP = np.dtype([("place", "<u4"), ("address", "<u8"), ("held", "?", 128)])


@dataclass
class Snapshot:
    """Raw tables of one process; `contents` are bytes by base address."""

    tables: Tables
    regions: list[SymbolRegion]
    ranges: list[Range]
    trace: Array
    maps: Array
    contents: dict[int, bytes]
    binaries: dict[str, bytes]

    def save(self, directory: Path) -> None:
        """Write into `directory`."""
        save(self.tables, directory / "tables", self.binaries)
        for name in ("trace", "maps"):
            np.save(directory / f"{name}.npy", getattr(self, name), allow_pickle=False)
        for base, data in self.contents.items():
            (directory / f"content-{base:x}.bin").write_bytes(data)
        facts = {"regions": [asdict(r) for r in self.regions], "ranges": [asdict(r) for r in self.ranges]}
        (directory / "snapshot.json").write_text(json.dumps(facts))

    def keep(self, keys: Collection[str]) -> Snapshot:
        """The same process, fewer graphs."""
        tables = subset(self.tables, lambda key: key in keys)
        mine = np.repeat([key in keys for key in self.tables.keys], self.tables.graphs["nodes"])
        renumbered = np.cumsum(mine) - 1
        owner = np.searchsorted(self.tables.nodes["payload"], self.maps["place"], side="right") - 1
        maps = self.maps[mine[owner]].copy()
        owner = owner[mine[owner]]
        inner = maps["place"].astype(np.int64) - self.tables.nodes["payload"][owner]
        maps["place"] = tables.nodes["payload"][renumbered[owner]] + inner
        return replace(self, tables=tables, maps=maps)


def load_snapshot(directory: Path) -> Snapshot:
    """Read what save wrote. Raises AlteredTableError."""
    try:
        facts = json.loads((directory / "snapshot.json").read_text())
        arrays = {n: np.load(directory / f"{n}.npy", allow_pickle=False) for n in ("trace", "maps")}
    except (OSError, ValueError, EOFError) as error:
        raise AlteredTableError(f"snapshot cannot be read: {error}") from error
    tables = load(directory / "tables")
    digests = {k.binary for k in tables.kernels if k.binary}
    return Snapshot(
        tables=tables,
        regions=[SymbolRegion(**r) for r in facts["regions"]],
        ranges=[Range(**r) for r in facts["ranges"]],
        contents={int(p.stem[8:], 16): p.read_bytes() for p in directory.glob("content-*.bin")},
        binaries={d: load_binary(directory / "tables", d) for d in digests},
        **arrays,
    )
