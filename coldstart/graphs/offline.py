"""Offline phase: two processes record graphs and a third one verifies them; they share a work directory.

<work>/layout-1/    the snapshot of the first process
<work>/bundle/      the bundle of both, written by the second process
<work>/live.json    blocks of its contents that changed while the second process ran a few steps
<work>/reason       why a process wrote no result
Invariant: bundle/ appears in one step. Its proof.json is of a process that did not record it.

`make` calls no driver: the caller provides the function that starts a process of the engine.
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
from coldstart.graphs.record import load_snapshot, take

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver
    from coldstart.graphs.torch_framework import TorchFramework

FIRST, BUNDLE, REASON, LIVE = "layout-1", "bundle", "reason", "live.json"
LEAST_STEPS = 2
Launch = Callable[[str, EngineTask], None]


def make(work: Path, launch: Launch) -> Path:
    """Run the offline phase; return the directory of the verified graphs below `work`.

    Args:
        work: Directory of the offline phase.
        launch: Runs one process of the engine to its end; its arguments are a name and a task.

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
        raise GraphRefusedError("the engine captured no graph, or did not load the plug-in")


def keep_proven(bundle: Path, proof: prove.Proof) -> None:
    """Drop the graphs that failed verification. Raises NotProvenError if no graph remains."""
    if not proof.proven:
        raise NotProvenError(f"no graph could be verified: {format_reasons(proof.failed)}")
    if proof.failed:
        seal = tables.rewrite(tables.load(bundle).drop_graphs(proof.failed), bundle)
        prove.write(replace(proof, seal=seal, failed={}), bundle)


def fail(work: Path, reason: str) -> None:
    """Report to the process that runs the offline phase why this process failed."""
    (work / REASON).write_text(reason)


# --- one process of the engine -----------------------------------------------------------------------


def record(
    work: Path, driver: CudaDriver, framework: TorchFramework, captured: Mapping[str, Captured],
    report: Mapping[str, Any],
) -> ContentWatch:  # fmt: skip
    """Write this process's layout or, in the second process, the combined graphs; their sealed report includes `report`.

    The caller then runs live steps and calls `look` of the returned watch after each.

    Raises:
        GraphError: Two layouts have equal addresses, or no graph can be relocated.
    """
    mine, first = take(driver, framework, captured), work / FIRST
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
    """Detector of changes in the stored contents, (address, bytes) per block, while the engine runs live steps.

    A restored graph has its own copy of this memory. Both sides of the proof replay without the engine, so the proof cannot
    tell a constant from a buffer that the engine rewrites before each step. A block that changes is therefore not stored:
    the proof then fails for each graph that reads any part of it, and passes for those that write it themselves.
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
        """Compare the blocks with their recorded contents; save which have ever changed. Raises DriverError."""
        pairs = zip(self._before, self._read(), strict=True)
        self._changed |= {number for number, (before, now) in enumerate(pairs) if before != now}
        self.steps += 1
        found = {"steps": self.steps, "changed": sorted(self._changed)}
        (self.work / LIVE).write_text(json.dumps(found))


def drop_changed(work: Path) -> None:
    """Drop the contents that changed during the live steps. Raises GraphRefusedError if fewer than two were observed."""
    seen = json.loads((work / LIVE).read_text()) if (work / LIVE).exists() else {"steps": 0}
    if seen["steps"] < LEAST_STEPS:
        raise GraphRefusedError(
            f"the recording engine ran {seen['steps']} live steps, but {LEAST_STEPS} are needed"
        )
    found = tables.load(work / BUNDLE)
    kept = ~np.isin(np.arange(len(found.blocks)), seen["changed"])
    owner = np.searchsorted(found.blocks["start"], found.content_relocations["place"], side="right") - 1
    rows = found.content_relocations[kept[owner]]
    tables.rewrite(replace(found, blocks=found.blocks[kept], content_relocations=rows), work / BUNDLE)
