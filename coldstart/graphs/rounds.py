"""Work of one process in the offline phase: record a layout, combine the layouts, or prove the bundle.

<work>/layout-1/, layout-2/ ...   one snapshot for each capturing process
<work>/bundle/                    the bundle of all snapshots, written from the second on
<work>/reason                     why this process did nothing
Invariant: bundle/ appears in one step. It contains proof.json only after a process that did not capture it has proven it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coldstart.graphs import capture, combine, contents, gate, live, named, table_files
from coldstart.graphs.api import Captured, DriverApi, FrameworkApi, Workload
from coldstart.graphs.inputs import ENTRY, InputLog, Inputs
from coldstart.graphs.restore import Restorer
from coldstart.graphs.snapshot import Snapshot, load_snapshot
from coldstart.graphs.tables import Tables

BUNDLE, REASON = "bundle", "reason"


def layouts(work: Path) -> list[Path]:
    """Return the snapshots of earlier processes, oldest first."""
    return sorted(work.glob("layout-*"), key=lambda path: int(path.name.removeprefix("layout-")))


def fail(work: Path, reason: str) -> None:
    """Write the reason for the process that runs the offline phase."""
    (work / REASON).write_text(reason)


def record(
    work: Path, driver: DriverApi, framework: FrameworkApi, captured: dict[str, Captured], workload: Workload,
    log: InputLog, report: Mapping[str, Any],
) -> live.ContentWatch:  # fmt: skip
    """Write this process's layout, and from the second one on the bundle, whose sealed report includes `report`.

    The caller then runs live steps, calls `look` of the returned watch after each, and saves the watch into
    `work`.

    Raises:
        GraphError: Two layouts have equal addresses, or no graph can be relocated.
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
    inputs = named.narrow(Inputs.parse_report(report), tables)
    tables = replace(tables, report=tables.report | dict(report) | {ENTRY: inputs.document()})
    part = _write(work, tables, mine)
    log.save(part, inputs)
    shutil.rmtree(work / BUNDLE, ignore_errors=True)
    part.rename(work / BUNDLE)
    return live.watch(driver, tables, combined.adopted)


def first_symbols(work: Path) -> dict[str, set[str]]:
    """Return the symbols that each graph may name, by the first layout; only these need stored inputs.

    Without a layout the result is empty: this process writes no bundle. Raises AlteredTableError.
    """
    return named.possible_symbols(load_snapshot(layouts(work)[0])) if layouts(work) else {}


def _write(work: Path, tables: Tables, mine: Snapshot) -> Path:
    """Write the tables into a new directory, and return it."""
    part = work / f"{BUNDLE}.part"
    used = {k.binary for k in tables.kernels if k.binary}
    binaries = {digest: data for digest, data in mine.binaries.items() if digest in used}
    table_files.save(tables, part, binaries)
    return part


def prove(
    work: Path, driver: DriverApi, framework: FrameworkApi, workload: Callable[[Restorer], Workload]
) -> gate.Proof:
    """Restore the bundle before any capture, compare, and write the proof if every graph passed.

    Raises NotProvenError, AlteredTableError.
    """
    # A process that does not capture lacks the unnamed memory of a capture: it adopts that of the bundle.
    restorer = Restorer(work / BUNDLE, driver, framework, adopt=True, settled=None)
    proof = gate.prove(restorer, driver, framework, workload(restorer))
    if proof.failed:
        gate.reject(proof, work / BUNDLE)
    else:
        gate.publish(proof, work / BUNDLE)
    return proof
