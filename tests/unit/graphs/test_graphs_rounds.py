"""Record twice, link and prove, each in a worker with other addresses: what is refused, dropped or not stored."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from support.graphs_worker import KEYS, Change, Rounds, start

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import offline, tables
from coldstart.graphs.errors import GraphRefusedError, NotProvenError
from coldstart.graphs.prove import read_proof
from tests.support.graphs.model import SimModel

Here = dict[str, SimModel]
STEPS = 3


def _spoil(work: Path) -> Callable[[str], None]:
    """Move one relocation of the smallest graph after the bundle was linked."""

    def between(name: str) -> None:
        bundle = work / offline.BUNDLE
        if name != "prove graphs":
            return
        found = tables.load(bundle)
        rows = found.graphs[KEYS[0]].relocations
        symbols = [found.regions[i].symbol for i in rows["region"].tolist()]
        rows["offset"][symbols.index("static:ids")] += 4
        tables.replace_tables(found, bundle)

    return between


def test_a_graph_that_fails_the_proof_is_dropped_and_the_proof_is_of_the_rest(
    here: Here, tmp_path: Path
) -> None:
    directory = offline.run_offline_phase(tmp_path, Rounds(here, between=_spoil(tmp_path)))
    found = tables.load(directory)
    assert sorted(found.graphs) == sorted(KEYS[1:]) and "differ" in found.refused[KEYS[0]]
    assert read_proof(directory).proven == KEYS[1:]
    assert start(here, directory)[1].cudagraph_manager.captured == [1]


@pytest.mark.parametrize(
    ("written", "reason"), [(None, "captured none, or did not load the plug-in"), ("several ranks", None)]
)
def test_engine_without_output_is_reported_with_its_reason(
    tmp_path: Path, written: str | None, reason: str | None
) -> None:
    def launch(name: str, task: EngineTask) -> None:
        if written and task.record:
            offline.fail(task.record, written)

    with pytest.raises(GraphRefusedError, match=reason or written):
        offline.run_offline_phase(tmp_path, launch)


def test_layouts_in_which_every_graph_conflicts_are_no_bundle(rounds_bundle: Path, tmp_path: Path) -> None:
    """On an H100, all graphs of a model were refused for one reason, and the empty bundle counted as proven."""
    nothing = tables.load(rounds_bundle).drop_graphs(dict.fromkeys(KEYS, "a word points elsewhere"))

    def launch(name: str, task: EngineTask) -> None:
        assert task.record is not None, name
        (tmp_path / offline.FIRST).mkdir(exist_ok=True)
        tables.save(nothing, tmp_path / offline.BUNDLE, {})

    with pytest.raises(
        GraphRefusedError, match=rf"relocated: \S+ and {len(KEYS) - 1} more: a word points elsewhere$"
    ):
        offline.run_offline_phase(tmp_path, launch)


# --- contents that the engine rewrites between steps ---


def _moving(memory: str, at: int) -> Change:
    """Return a step that rewrites memory that no tensor names, the table or the semaphore, from one step to the next."""
    steps = count()

    def change(model: SimModel) -> None:
        if next(steps) % STEPS in (at, at + 1):
            address = model.rope_table if memory == "table" else model.hidden["semaphore"]
            (held,) = model.driver.read(address, 1)
            model.driver.write(address, bytes([held ^ 0x5A]))

    return change


@pytest.mark.parametrize("at", range(STEPS - 1))
def test_graphs_over_memory_that_moves_are_refused_and_the_others_proven(
    here: Here, tmp_path: Path, at: int
) -> None:
    """Its contents are not stored, so the proof fails for the graphs that need them."""
    found = tables.load(
        offline.run_offline_phase(tmp_path, Rounds(here, steps=STEPS, step=_moving("semaphore", at)))
    )
    assert sorted(found.graphs) == sorted(KEYS[1:]) and list(found.refused) == KEYS[:1]
    assert all(
        "restored and the captured graph have different outputs" in reason
        for reason in found.refused.values()
    )
    with pytest.raises(NotProvenError, match="no graph could be verified"):
        offline.run_offline_phase(tmp_path / "all", Rounds(here, steps=STEPS, step=_moving("table", at)))


@pytest.mark.parametrize("steps", [0, 1])
def test_engine_without_observed_steps_proves_no_graph(here: Here, tmp_path: Path, steps: int) -> None:
    with pytest.raises(GraphRefusedError, match=f"{steps} steps after its capture, but 2 are needed"):
        offline.run_offline_phase(tmp_path, Rounds(here, steps=steps))
