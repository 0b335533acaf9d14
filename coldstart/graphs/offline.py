"""The offline rounds as seen from outside: which processes to start, until a bundle is proven.

Two processes with two layouts make a bundle; a further layout is taken while words with two readings are left, and
where the proof's layout shows that they matter; what of it changes while the last of them serves a few steps is refused.
Then one process that captured nothing of it proves it; graphs that fail are dropped, and what is left is proved
again.  Nothing here touches a driver: whoever calls says how a process of the engine is started.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import gate, live, table_files
from coldstart.graphs.builder import drop_unused_regions, subset
from coldstart.graphs.errors import GraphRefusedError, NotProvenError
from coldstart.graphs.rounds import BUNDLE, REASON, layouts

LEAST, MOST = 2, 4
MOST_AFTER_PROOF = 8
Launch = Callable[[str, EngineTask], None]


def make(work: Path, launch: Launch, *, by_reference: bool = False) -> Path:
    """A proven bundle below `work`; launch(name, task) runs one process of the engine to its end.

    Raises Refused or NotProvenError with the reason when no graph of this model can be restored; what `launch` raises.
    """
    while len(layouts(work)) < LEAST or (len(layouts(work)) < MOST and _ambiguous(work)):
        _record(work, launch, by_reference)
    dropped = False
    while True:
        live.settle(work, work / BUNDLE)
        launch("prove graphs", EngineTask(prove=work))
        _expect(work, (work / BUNDLE / gate.PROOF).exists() or (work / BUNDLE / gate.REJECTED).exists())
        if (work / BUNDLE / gate.PROOF).exists():
            return work / BUNDLE
        if worth_another(work / BUNDLE, len(layouts(work))):
            _record(work, launch, by_reference)
        elif dropped:
            raise NotProvenError(
                "graphs that were proven once failed the second time: nothing of it can be relied on"
            )
        else:
            keep_proven(work / BUNDLE)
            dropped = True


def worth_another(bundle: Path, recorded: int) -> bool:
    """Whether one more layout may save what the proof has refused.

    Two regions that touched in every layout recorded so far did not in the proof's: a further one is likely to tell
    which of the two a word belongs to. Where they always touch, the proof's own layout would have been no different.
    """
    return recorded < MOST_AFTER_PROOF and bool(gate.read_rejected(bundle)[1])


def _record(work: Path, launch: Launch, by_reference: bool) -> None:
    number = len(layouts(work)) + 1
    launch(f"record graphs, layout {number}", EngineTask(record=work, by_reference=by_reference))
    _expect(work, len(layouts(work)) == number)


def _expect(work: Path, done: bool) -> None:
    reason = work / REASON
    if reason.exists():
        raise GraphRefusedError(reason.read_text())
    if not done:
        raise GraphRefusedError("the engine captured no graph, or did not load the plug-in")


def _ambiguous(work: Path) -> bool:
    _expect(work, (work / BUNDLE).exists())
    return len(table_files.load(work / BUNDLE).assumed) > 0


def keep_proven(bundle: Path) -> None:
    """Drop the graphs that the gate rejected, with its reasons. Raises NotProvenError where none is left."""
    failed, _ = gate.read_rejected(bundle)
    tables = table_files.load(bundle)
    if set(tables.keys) <= set(failed):
        raise NotProvenError(f"no graph was proven: {failed}")
    kept = drop_unused_regions(subset(tables, lambda key: key not in failed, failed))
    binaries = {d: table_files.load_binary(bundle, d) for d in table_files.read_manifest(bundle)["binaries"]}
    table_files.save(kept, bundle, binaries)
    (bundle / gate.REJECTED).unlink()
