"""Record twice, link, prove, publish and restore: each in a process with different addresses, with a real store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.graphs_processes import KEYS, Launches, engine

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import offline, tables
from coldstart.graphs.errors import GraphRefusedError, NotProvenError
from coldstart.graphs.prove import Proof, read_proof, reject


def test_two_layouts_and_a_proof(created_rounds: tuple[Path, Launches]) -> None:
    directory, launches = created_rounds
    recorded = [a["bases"] for a in launches.answers if "bases" in a]
    assert len({tuple(bases) for bases in recorded}) == 2
    assert launches.names == ["record graphs, layout 1", "record graphs, layout 2", "prove graphs"]
    assert launches.answers[-1]["proven"] == KEYS == read_proof(directory).proven


def test_restore_works_in_a_process_that_captured_nothing(created_rounds: tuple[Path, Launches]) -> None:
    done = engine(EngineTask(restore=created_rounds[0]))
    assert done["fallbacks"] == {} and done["restored"] == KEYS
    assert done["launches_before_ready"] == 0 and all(done["equal"].values())


def test_an_altered_input_is_caught_by_the_canary_and_all_graphs_are_captured(
    created_rounds: tuple[Path, Launches], tmp_path: Path
) -> None:
    copy = shutil.copytree(created_rounds[0], tmp_path / "b")
    for path in (copy / "inputs").iterdir():
        path.write_bytes(bytes(len(path.read_bytes())))
    done = engine(EngineTask(restore=copy))
    assert done["restored"] == [] and "canary" in done["fallbacks"]["*"]
    assert all(done["equal"].values())


def _spoil(work: Path) -> Callable[[str], None]:
    """Move one relocation of the smallest graph after the bundle was linked."""

    def between(name: str) -> None:
        bundle = work / offline.BUNDLE
        if name != "prove graphs" or (bundle / "spoilt").exists():
            return
        found = tables.load(bundle)
        rows = found.graphs["decode:1"].relocations
        symbols = [found.regions[i].symbol for i in rows["region"].tolist()]
        rows["offset"][symbols.index("static:ids")] += 4
        tables.rewrite(found, bundle)
        (bundle / "spoilt").touch()

    return between


@pytest.mark.slow
def test_a_graph_that_fails_the_gate_is_dropped_and_the_rest_is_proved_again(tmp_path: Path) -> None:
    launches = Launches(_spoil(tmp_path))
    directory = offline.make(tmp_path, launches)
    assert launches.names[-2:] == ["prove graphs", "prove graphs"]
    assert "differ" in launches.answers[-2]["failed"]["decode:1"]
    found = tables.load(directory)
    assert sorted(found.graphs) == sorted(KEYS[1:]) and "differ" in found.refused["decode:1"]
    assert read_proof(directory).proven == KEYS[1:]


def test_engine_without_output_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GraphRefusedError, match="captured no graph, or did not load the plug-in"):
        offline.make(tmp_path, lambda name, task: None)


def test_layouts_in_which_every_graph_conflicts_are_no_bundle(
    created_rounds: tuple[Path, Launches], tmp_path: Path
) -> None:
    """On an H100, all graphs of a model were refused for one reason, and the empty bundle counted as proven."""
    nothing = tables.load(created_rounds[0]).without(dict.fromkeys(KEYS, "a word points elsewhere"))

    def launch(name: str, task: EngineTask) -> None:
        assert task.record is not None, name
        (tmp_path / offline.FIRST).mkdir(exist_ok=True)
        tables.save(nothing, tmp_path / offline.BUNDLE, {})

    with pytest.raises(
        GraphRefusedError, match=rf"relocated: \S+ and {len(KEYS) - 1} more: a word points elsewhere$"
    ):
        offline.make(tmp_path, launch)


def test_reason_contains_the_error_of_the_process(tmp_path: Path) -> None:
    def launch(name: str, task: EngineTask) -> None:
        assert task.record is not None
        offline.fail(task.record, "graphs of several ranks hold collectives")

    with pytest.raises(GraphRefusedError, match="several ranks"):
        offline.make(tmp_path, launch)


def test_no_bundle_is_published_without_a_proven_graph(
    created_rounds: tuple[Path, Launches], tmp_path: Path
) -> None:
    shutil.copytree(created_rounds[0].parent, tmp_path / "w")
    bundle = tmp_path / "w" / offline.BUNDLE
    reject(Proof("", [1], failed=dict.fromkeys(KEYS, "wrong")), bundle)
    with pytest.raises(NotProvenError, match="no graph was proven"):
        offline.keep_proven(bundle)


def test_no_directory_appears_before_it_is_complete(created_rounds: tuple[Path, Launches]) -> None:
    assert not list(created_rounds[0].parent.glob("*.part"))
