"""The offline rounds as seen from inside a process of the engine: record, record again and link, prove.

<work>/layout-1/, layout-2/ ...   one snapshot for each capturing process
<work>/bundle/                    what all of them make together: written from the second on
<work>/reason                     why this process did nothing
Invariant: bundle/ appears whole, and holds proof.json only when a process that captured nothing of it has proved it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coldstart.graphs import capture, combine, contents, gate, live, references, table_files
from coldstart.graphs.api import Captured, DriverApi, FrameworkApi, Workload
from coldstart.graphs.inputs import InputLog
from coldstart.graphs.restore import Restorer
from coldstart.graphs.snapshot import Snapshot, load_snapshot
from coldstart.graphs.tables import Tables

BUNDLE, REASON = "bundle", "reason"


def layouts(work: Path) -> list[Path]:
    """Snapshots of earlier processes, oldest first."""
    return sorted(work.glob("layout-*"), key=lambda path: int(path.name.removeprefix("layout-")))


def fail(work: Path, reason: str) -> None:
    """Tell whoever started this process."""
    (work / REASON).write_text(reason)


def record(
    work: Path, driver: DriverApi, framework: FrameworkApi, captured: dict[str, Captured], workload: Workload,
    log: InputLog, report: Mapping[str, Any], *, by_reference: bool = False,
) -> live.ContentWatch:  # fmt: skip
    """Leave this process's layout, and from the second on the bundle; `report` is sealed with it.

    Whoever records takes live steps afterwards, calls the watch's `look` after each and saves it into `work`.
    Raises GraphError: the layouts collide, or no graph can be relocated.
    """
    mine, earlier = capture.take(driver, framework, captured), layouts(work)
    target = work / f"layout-{len(earlier) + 1}"
    mine.save(target.with_suffix(".part"))
    target.with_suffix(".part").rename(target)
    if not earlier:
        return live.ContentWatch(driver, [])
    first, *more = map(load_snapshot, earlier)
    combined = combine.combine(first, mine, more)
    tables = contents.minimise(driver, workload, captured, combined, mine.contents)
    _write(work, replace(tables, report=tables.report | dict(report)), mine, log, by_reference)
    return live.watch(driver, tables, combined.adopted)


def _write(work: Path, tables: Tables, mine: Snapshot, log: InputLog, by_reference: bool) -> None:
    part = work / f"{BUNDLE}.part"
    used = {k.binary for k in tables.kernels if k.binary}
    binaries = {digest: data for digest, data in mine.binaries.items() if digest in used}
    if by_reference:
        tables.report["references"] = references.refer(binaries, references.loaded_libraries())
        binaries = {d: data for d, data in binaries.items() if d not in tables.report["references"]}
    table_files.save(tables, part, binaries)
    log.save(part)
    shutil.rmtree(work / BUNDLE, ignore_errors=True)
    part.rename(work / BUNDLE)


def prove(
    work: Path, driver: DriverApi, framework: FrameworkApi, workload: Callable[[Restorer], Workload]
) -> gate.Proof:
    """Restore before anything is captured, compare, and seal the proof where every graph has passed.

    Raises NotProvenError, AlteredTableError.
    """
    # Unnamed memory of capture is not made by a process that does not capture: the bundle brings it.
    restorer = Restorer(work / BUNDLE, driver, framework, adopt=True)
    proof = gate.prove(restorer, driver, framework, workload(restorer))
    if proof.failed:
        gate.reject(proof, work / BUNDLE)
    else:
        gate.publish(proof, work / BUNDLE)
    return proof
