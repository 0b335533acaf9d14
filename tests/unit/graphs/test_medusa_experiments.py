"""MEDUSA's experiments that need a GPU: they are refused without one, and a rehearsal stores nothing."""

from pathlib import Path

import pytest
from support.graphs_worker import SHAPE

from benchmarks import common, papers
from benchmarks.papers import Experiment
from benchmarks.papers.medusa import EXPERIMENTS
from benchmarks.papers.medusa_gpu import count_nodes
from coldstart.graphs import tables
from coldstart.system.devices import nvml


def measure(shapes: str | None, rehearse: bool) -> papers.Found:
    return [("decode", "2.4x", f"{shapes}, {rehearse}")], {}


ONE = {"3": Experiment(measure, needs_gpu=True)}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "papers").mkdir()
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("number", [number for number, one in EXPERIMENTS.items() if one.needs_gpu])
def test_experiment_without_gpu_is_refused_with_a_hint(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "read_free_bytes", lambda: None)
    with pytest.raises(SystemExit, match=rf"papers/medusa-{number} needs a GPU\nhint: .* --rehearse"):
        papers.run("medusa", EXPERIMENTS, [number])


def test_rehearsal_marks_rows_and_stores_nothing(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    papers.run("medusa", ONE, ["3", "--rehearse"])
    assert capsys.readouterr().out == "rehearsal, no measurement: decode: paper 2.4x, ours None, True\n"
    assert [path for path in results.rglob("*") if path.is_file()] == []


def test_gpu_measurement_stores_command_and_shapes(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "read_free_bytes", lambda: 1 << 36)
    papers.run("medusa", ONE, ["3", "--shapes", "1B"])
    stored = common.load("papers/medusa-3")
    assert stored["command"] == ["python", "-m", "benchmarks", "papers/medusa-3", "--shapes", "1B"]
    assert stored["rows"] == [["decode", "2.4x", "1B, False"]]


def test_experiment_on_the_cpu_refuses_the_options_of_a_gpu() -> None:
    with pytest.raises(SystemExit, match="no effect on papers/medusa-7"):
        papers.run("medusa", EXPERIMENTS, ["7", "--rehearse"])


def test_nodes_are_counted_by_batch_size_without_refused_graphs(rounds_bundle: Path, tmp_path: Path) -> None:
    found = tables.load(rounds_bundle)
    nodes, captured = count_nodes(rounds_bundle)
    assert tuple(nodes) == SHAPE.sizes and captured == 0
    assert sum(nodes.values()) == sum(len(graph.nodes) for graph in found.graphs.values()) > 0
    first = next(iter(found.graphs))
    tables.save(found.drop_graphs({first: "a word points elsewhere"}), tmp_path / "less", {})
    nodes.pop(found.graphs[first].size)
    assert count_nodes(tmp_path / "less") == (nodes, 1)
