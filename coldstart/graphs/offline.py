"""Offline phase of CUDA graphs: two processes record the graphs and a third verifies them, in a shared work directory.

<work>/layout-1/    snapshot of the first process
<work>/bundle/      relocatable graphs combined from both snapshots, written by the second process
<work>/live.json    blocks of stored contents that changed while the second process ran a few more steps
<work>/reason       reason why a process wrote no result
Invariant: bundle/ appears atomically. The process that writes proof.json in it is not the one that recorded it.
`run_offline_phase` does not call the CUDA driver: its caller provides the function that runs an engine process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import prove, tables
from coldstart.graphs.api import Captured
from coldstart.graphs.errors import GraphRefusedError, NotProvenError, format_reasons
from coldstart.graphs.link import combine
from coldstart.graphs.record import create_snapshot, load_snapshot

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver
    from coldstart.graphs.torch_framework import TorchFramework

FIRST, BUNDLE, REASON, LIVE = "layout-1", "bundle", "reason", "live.json"
LEAST_STEPS = 2
Launch = Callable[[str, EngineTask], None]


def run_offline_phase(work: Path, launch: Launch) -> Path:
    """Run the offline phase, and return the directory inside `work` that contains the verified graphs.

    Args:
        work: Work directory of the offline phase.
        launch: Function that runs one engine process until it exits, given a name and a task.

    Raises:
        GraphRefusedError, NotProvenError: No graph of this model can be restored. `launch` may raise other errors.
    """
    bundle = work / BUNDLE
    for number, written in ((1, work / FIRST), (2, bundle)):
        launch(f"record graphs, layout {number}", EngineTask(record=work))
        _expect(work, written)
    found = tables.load(bundle)
    if not found.graphs:
        raise GraphRefusedError(f"no graph can be relocated: {format_reasons(found.refused)}")
    drop_changed(work)
    launch("prove graphs", EngineTask(prove=work))
    _expect(work, bundle / prove.PROOF)
    keep_proven(bundle, prove.parse_proof(bundle))
    return bundle


def _expect(work: Path, written: Path) -> None:
    if (work / REASON).exists():
        raise GraphRefusedError((work / REASON).read_text())
    if not written.exists():
        raise GraphRefusedError("the engine recorded no graphs: none was captured, or no plug-in was loaded")


def keep_proven(bundle: Path, proof: prove.Proof) -> None:
    """Drop a bundle's graphs that failed verification. Raises NotProvenError if no graph remains."""
    if not proof.proven:
        raise NotProvenError(f"no graph could be verified: {format_reasons(proof.failed)}")
    if proof.failed:
        seal = tables.replace_tables(tables.load(bundle).drop_graphs(proof.failed), bundle)
        prove.write(replace(proof, seal=seal, failed={}), bundle)


def fail(work: Path, reason: str) -> None:
    """Write the reason why this process failed, for the process that runs the offline phase."""
    (work / REASON).write_text(reason)


# --- one process of the engine -----------------------------------------------------------------------


def record(
    work: Path, driver: CudaDriver, framework: TorchFramework, captured: Mapping[str, Captured],
    report: Mapping[str, Any],
) -> ContentWatch:  # fmt: skip
    """Write the layout of the first process or, in the second process, the combined graphs with `report` in their manifest.

    Return a watch; the caller must call its `look` after each further engine step.

    Raises:
        GraphError: A pointer has the same address in both layouts, or no graph can be relocated.
    """
    mine, first = create_snapshot(driver, framework, captured), work / FIRST
    if not first.exists():
        mine.save(first.with_suffix(".part"))
        first.with_suffix(".part").rename(first)
        return ContentWatch(driver, work, [])
    found = combine(load_snapshot(first), mine)
    part, used = work / f"{BUNDLE}.part", {kernel.binary for kernel in found.kernels}
    binaries = {digest: data for digest, data in mine.binaries.items() if digest in used}
    tables.save(replace(found, report=dict(report)), part, binaries)
    part.rename(work / BUNDLE)
    spans = [(found.regions[r].base + offset, size) for r, size, offset, _ in found.blocks.tolist()]
    return ContentWatch(driver, work, spans)


# --- contents that are state -------------------------------------------------------------------------


@dataclass
class ContentWatch:
    """Detector of stored contents that change while the engine runs steps. `blocks` are pairs (address, size in bytes).

    A restored graph has its own copy of this memory. Verification replays graphs without the engine, so it cannot
    distinguish a constant from a buffer that the engine rewrites before each step. A block that changes is therefore not
    stored. Verification then fails for graphs that read it, and passes for graphs that write it before they read it.
    """

    driver: CudaDriver
    work: Path
    blocks: list[tuple[int, int]]
    steps: int = 0

    def __post_init__(self) -> None:
        self._before, self._changed = self._read(), set[int]()

    def _read(self) -> list[bytes]:
        self.driver.synchronize()
        return [self.driver.read(address, size) for address, size in self.blocks]

    def look(self) -> None:
        """Save the indices of all blocks that have ever differed from their first contents. Raises DriverError."""
        pairs = zip(self._before, self._read(), strict=True)
        self._changed |= {number for number, (before, now) in enumerate(pairs) if before != now}
        self.steps += 1
        found = {"steps": self.steps, "changed": sorted(self._changed)}
        (self.work / LIVE).write_text(json.dumps(found))


def drop_changed(work: Path) -> None:
    """Drop the contents that changed during engine steps. Raises GraphRefusedError if fewer than two steps were compared."""
    seen = json.loads((work / LIVE).read_text()) if (work / LIVE).exists() else {"steps": 0}
    if seen["steps"] < LEAST_STEPS:
        raise GraphRefusedError(
            f"the recording engine ran {seen['steps']} steps after the capture, but at least {LEAST_STEPS} are needed"
        )
    found = tables.load(work / BUNDLE)
    kept = ~np.isin(np.arange(len(found.blocks)), seen["changed"])
    owner = np.searchsorted(found.blocks["start"], found.content_relocations["place"], side="right") - 1
    rows = found.content_relocations[kept[owner]]
    tables.replace_tables(replace(found, blocks=found.blocks[kept], content_relocations=rows), work / BUNDLE)
