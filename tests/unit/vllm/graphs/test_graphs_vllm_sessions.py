"""The vLLM worker's sessions (record twice, prove, restore) on the simulator, with fakes for vLLM's code."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs_worker import KEYS, SHAPE, Graph, Runner, start

from coldstart.graphs import offline
from coldstart.graphs import prove as gate
from coldstart.graphs import tables as stored
from coldstart.graphs.errors import DriverError
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import record, restore
from tests.support.graphs.model import SimModel

pytest.importorskip("torch")


@pytest.fixture
def bundle_directory(rounds_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rounds_bundle, tmp_path / "bundle"))


def _equal(runner: Runner) -> dict[int, bool]:
    """Compare each graph of vLLM with a new capture."""
    model, found = runner.model, {}
    for desc, graph in runner.cudagraph_manager.graphs.items():
        key = f"decode:{desc.num_tokens}"
        held = graph.captured.executable if isinstance(graph, Graph) else graph.executable
        results = []
        for executable in (held, model.capture(key).executable):
            model.prepare(key, 5)
            model.driver.launch(executable, 0)
            results.append(model.observe(key))
        found[desc.num_tokens] = results[0] == results[1]
    return found


def test_recorded_and_proved_inside_the_worker(bundle_directory: Path) -> None:
    tables, proof = stored.load(bundle_directory), gate.read_proof(bundle_directory)
    assert proof.proven == KEYS == list(reversed(tables.graphs)) and proof.failed == {}


def test_a_start_captures_nothing(here: dict[str, SimModel], bundle_directory: Path) -> None:
    session, runner = start(here, bundle_directory)
    assert runner.cudagraph_manager.captured == [] and session.fallbacks == {}
    assert _equal(runner) == dict.fromkeys((1, 8, 64, 256), True)
    assert all(rows for rows in runner.cudagraph_manager._candidates.values())


def test_one_graph_that_cannot_be_built_is_captured_and_named(
    here: dict[str, SimModel], bundle_directory: Path
) -> None:
    def break_the_largest(model: SimModel) -> None:
        real, built = model.driver.instantiate, list[int]()

        def instantiate(graph: int) -> int:
            built.append(graph)
            if len(built) == len(SHAPE.sizes):
                raise DriverError("cuGraphInstantiate", "OUT_OF_MEMORY")
            return real(graph)

        model.driver.instantiate = instantiate  # type: ignore[method-assign]

    session, runner = start(here, bundle_directory, before=break_the_largest)
    assert list(session.fallbacks) == ["FULL:num_tokens=256"]
    assert "OUT_OF_MEMORY" in session.fallbacks["FULL:num_tokens=256"]
    assert runner.cudagraph_manager.captured == [256] and _equal(runner)[256]


def test_another_driver_of_the_same_branch_captures(
    here: dict[str, SimModel], bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "driver", lambda: "580.159.04")
    session, runner = start(here, bundle_directory)
    assert session.fallbacks["*"].endswith("this machine has 580.159.04")
    assert runner.cudagraph_manager.captured == [256, 64, 8, 1]


PARALLEL = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
ASLEEP = SimpleNamespace(use_cumem_cudagraph_pool=True)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"parallel_config": PARALLEL}, "collectives"),
        ({"vllm_config": ASLEEP}, "--sleep-mode-offload-cudagraph"),
    ],
)
def test_graphs_of_an_engine_that_is_not_supported_are_captured_and_not_recorded(
    here: dict[str, SimModel], bundle_directory: Path, tmp_path: Path, engine: dict[str, Any], reason: str
) -> None:
    here["model"] = model = SimModel(SHAPE, 300)
    runner = Runner(model, **engine)
    # In its sleep mode vLLM captures into the pool that its allocator yields, and the manager's own pool remains unused.
    runner.cudagraph_manager.pool = (0, 99)
    session = restore.Restoring(bundle_directory)
    assert session.run(runner, runner.own) == "captured" and reason in session.fallbacks["*"]
    (tmp_path / "work").mkdir()
    record.GraphRecording(tmp_path / "work").run(runner, runner.own)
    assert reason in (tmp_path / "work" / offline.REASON).read_text()
