"""Order of the offline processes: which process of the engine starts next, until a bundle is proven.

Two processes with two layouts make a bundle. Another layout is recorded while words have two readings, and if
the proof shows that such a word matters. Graphs whose memory changes during a few live steps are refused. A
process that did not capture the bundle then proves it; graphs that fail are dropped, and the others are
proven again.

This module calls no driver: the caller provides the function that starts a process of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import gate, live, table_files
from coldstart.graphs.builder import drop_unused_regions, subset
from coldstart.graphs.errors import GraphRefusedError, NotProvenError, format_reasons
from coldstart.graphs.rounds import BUNDLE, REASON, layouts

LEAST, MOST = 2, 4
MOST_AFTER_PROOF = 8
Launch = Callable[[str, EngineTask], None]


def make(work: Path, launch: Launch) -> Path:
    """Return the directory of a proven bundle below `work`.

    Args:
        work: Directory of the offline phase.
        launch: Runs one process of the engine to its end; its arguments are a name and a task.

    Raises:
        GraphRefusedError, NotProvenError: No graph of this model can be restored. `launch` may raise other errors.
    """
    while len(layouts(work)) < LEAST or (len(layouts(work)) < MOST and _ambiguous(work)):
        _record(work, launch)
    dropped = False
    while True:
        live.settle(work, work / BUNDLE)
        launch("prove graphs", EngineTask(prove=work))
        _expect(work, (work / BUNDLE / gate.PROOF).exists() or (work / BUNDLE / gate.REJECTED).exists())
        if (work / BUNDLE / gate.PROOF).exists():
            return work / BUNDLE
        if needs_another_layout(work / BUNDLE, len(layouts(work))):
            _record(work, launch)
        elif dropped:
            raise NotProvenError(
                "graphs that passed the first verification failed the second one; no graph of the bundle is reliable"
            )
        else:
            keep_proven(work / BUNDLE)
            dropped = True


def needs_another_layout(bundle: Path, recorded: int) -> bool:
    """Return whether one more layout may save graphs that failed the proof.

    Two regions that touched in every recorded layout did not touch in the proof's layout, so another layout
    probably tells which of the two a word belongs to. `recorded` is the number of layouts so far.
    """
    return recorded < MOST_AFTER_PROOF and bool(gate.read_rejected(bundle)[1])


def _record(work: Path, launch: Launch) -> None:
    number = len(layouts(work)) + 1
    launch(f"record graphs, layout {number}", EngineTask(record=work))
    _expect(work, len(layouts(work)) == number)


def _expect(work: Path, done: bool) -> None:
    reason = work / REASON
    if reason.exists():
        raise GraphRefusedError(reason.read_text())
    if not done:
        raise GraphRefusedError("the engine captured no graph, or did not load the plug-in")


def _ambiguous(work: Path) -> bool:
    _expect(work, (work / BUNDLE).exists())
    tables = table_files.load(work / BUNDLE)
    if not tables.keys:
        raise GraphRefusedError(f"no graph can be relocated: {format_reasons(tables.refused)}")
    return len(tables.assumed) > 0


def keep_proven(bundle: Path) -> None:
    """Drop the graphs that the proof rejected, with its reasons. Raises NotProvenError if no graph remains."""
    failed, _ = gate.read_rejected(bundle)
    tables = table_files.load(bundle)
    if set(tables.keys) <= set(failed):
        raise NotProvenError(f"no graph was verified: {format_reasons(failed)}")
    kept = drop_unused_regions(subset(tables, lambda key: key not in failed, failed))
    binaries = {d: table_files.load_binary(bundle, d) for d in table_files.read_manifest(bundle)["binaries"]}
    table_files.save(kept, bundle, binaries)
    (bundle / gate.REJECTED).unlink()
