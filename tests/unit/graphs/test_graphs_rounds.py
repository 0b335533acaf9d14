"""Record twice, link, prove, publish and restore: each in a process with different addresses, with a real store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.graphs_processes import KEYS, Launches, engine

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import gate, offline, rounds, table_files
from coldstart.graphs.builder import subset
from coldstart.graphs.errors import GraphRefusedError, NotProvenError


def test_an_altered_input_is_caught_by_the_canary_and_all_graphs_are_captured(
    created_rounds: tuple[Path, Launches], tmp_path: Path
) -> None:
    copy = shutil.copytree(created_rounds[0], tmp_path / "b")
    for path in (copy / "inputs").iterdir():
        path.write_bytes(bytes(len(path.read_bytes())))
    done = engine(EngineTask(restore=copy))
    assert not done["used"] and done["restored"] == [] and "canary" in done["fallbacks"]["*"]
    assert all(done["equal"].values())


def _spoil(work: Path) -> Callable[[str], None]:
    """Move one relocation of the smallest graph after the bundle was linked."""

    def between(name: str) -> None:
        bundle = work / rounds.BUNDLE
        if name != "prove graphs" or (bundle / "spoilt").exists():
            return
        tables = table_files.load(bundle)
        rows, graph = tables.relocations.copy(), tables.graphs[tables.keys.index("decode:1")]
        mine = range(int(graph["relocation"]), int(graph["relocation"] + graph["relocations"]))
        at = next(i for i in mine if tables.regions[rows["region"][i]].symbol == "static:ids")
        rows["offset"][at] += 4
        tables.relocations = rows
        binaries = {
            d: table_files.load_binary(bundle, d) for d in table_files.read_manifest(bundle)["binaries"]
        }
        table_files.save(tables, bundle, binaries)
        (bundle / "spoilt").touch()

    return between


@pytest.mark.slow
def test_a_graph_that_fails_the_gate_is_dropped_and_the_rest_is_proved_again(tmp_path: Path) -> None:
    launches = Launches(_spoil(tmp_path))
    directory = offline.make(tmp_path, launches)
    assert launches.names[-2:] == ["prove graphs", "prove graphs"]
    assert "differ" in launches.answers[-2]["failed"]["decode:1"]
    tables = table_files.load(directory)
    assert sorted(tables.keys) == sorted(KEYS[1:]) and "differ" in tables.refused["decode:1"]
    assert gate.read_proof(directory).proven == KEYS[1:]


@pytest.mark.slow
def test_the_proof_decides_about_regions_that_touch_everywhere_else(tmp_path: Path) -> None:
    """With these addresses two regions touch in all four layouts but not in the proof, whose equal outputs decide."""
    launches = Launches(first=3460)
    directory = offline.make(tmp_path, launches)
    assert launches.names.count("prove graphs") == 1 and launches.names[-2] == "record graphs, layout 4"
    proof = gate.read_proof(directory)
    assert proof.proven == KEYS and not table_files.load(directory).refused
    assumed = table_files.load(directory).assumed
    assert proof.settled and set(proof.settled) <= set(range(len(assumed)))


def test_engine_without_output_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GraphRefusedError, match="captured no graph, or did not load the plug-in"):
        offline.make(tmp_path, lambda name, task: None)


def test_layouts_in_which_every_graph_conflicts_are_no_bundle(
    created_rounds: tuple[Path, Launches], tmp_path: Path
) -> None:
    """On an H100, all graphs of a model were refused for one reason, and the empty bundle counted as proven."""
    tables = table_files.load(created_rounds[0])
    nothing = subset(tables, lambda key: False, dict.fromkeys(KEYS, "a word points elsewhere"))

    def launch(name: str, task: EngineTask) -> None:
        assert task.record is not None, name
        (tmp_path / f"layout-{len(rounds.layouts(tmp_path)) + 1}").mkdir()
        table_files.save(nothing, tmp_path / rounds.BUNDLE, {})

    with pytest.raises(
        GraphRefusedError, match=rf"relocated: \S+ and {len(KEYS) - 1} more: a word points elsewhere$"
    ):
        offline.make(tmp_path, launch)


def test_reason_contains_the_error_of_the_process(tmp_path: Path) -> None:
    def launch(name: str, task: EngineTask) -> None:
        assert task.record is not None
        rounds.fail(task.record, "graphs of several ranks hold collectives")

    with pytest.raises(GraphRefusedError, match="several ranks"):
        offline.make(tmp_path, launch)


def test_no_bundle_is_published_without_a_proven_graph(
    created_rounds: tuple[Path, Launches], tmp_path: Path
) -> None:
    shutil.copytree(created_rounds[0].parent, tmp_path / "w")
    bundle = tmp_path / "w" / rounds.BUNDLE
    gate.reject(gate.Proof("", [1], failed=dict.fromkeys(KEYS, "wrong")), bundle)
    with pytest.raises(NotProvenError, match="no graph was verified"):
        offline.keep_proven(bundle)
