"""The vLLM worker's sessions (record twice, prove, restore) on the simulator, with fakes for vLLM's code."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs_worker import KEYS, SHAPE, Graph, Mode, Runner, start

from coldstart.graphs import offline
from coldstart.graphs import prove as gate
from coldstart.graphs import tables as stored
from coldstart.graphs.errors import DriverError
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import record, restore
from coldstart.vllm.graphs.hooks import build_graph_key
from tests.support.graphs.model import SimModel

torch = pytest.importorskip("torch")
Here = dict[str, SimModel]


def _captured(runner: Runner) -> set[str]:
    """Return the keys of the graphs that vLLM captured, after a comparison of each graph with a new capture."""
    model, found = runner.model, set[str]()
    for desc, graph in runner.cudagraph_manager.graphs.items():
        key, results = f"decode:{desc.num_tokens}", []
        held = graph.captured if isinstance(graph, Graph) else graph
        for executable in (held.executable, model.capture(key).executable):
            model.prepare(key, 5)
            model.driver.launch(executable, 0)
            results.append(model.observe(key))
        assert results[0] == results[1]
        found |= {build_graph_key(desc)} if isinstance(graph, Graph) else set()
    assert [desc.cg_mode for desc in runner.cudagraph_manager.graphs].count(Mode.FULL) == len(KEYS)
    return found


PIECES = {f"PIECEWISE:num_tokens={max(SHAPE.sizes)}"}


def test_a_start_captures_pieces_only(here: Here, rounds_bundle: Path) -> None:
    """A restored piece would read the bundle's pool, while the captured piece before it writes another one."""
    tables, proof = stored.load(rounds_bundle), gate.read_proof(rounds_bundle)
    assert proof.proven == KEYS == list(reversed(tables.graphs)) and proof.failed == {}
    session, runner = start(here, rounds_bundle)
    assert session.fallbacks == {} and _captured(runner) == PIECES
    assert [d.num_tokens for d in runner.cudagraph_manager._capture_descs[Mode.FULL]] == [256, 64, 8, 1]


def test_one_graph_that_cannot_be_built_is_captured_and_named(here: Here, rounds_bundle: Path) -> None:
    def break_the_largest(model: SimModel) -> None:
        real, built = model.driver.instantiate, list[int]()

        def instantiate(graph: int) -> int:
            built.append(graph)
            if len(built) == len(SHAPE.sizes):
                raise DriverError("cuGraphInstantiate failed: OUT_OF_MEMORY")
            return real(graph)

        model.driver.instantiate = instantiate  # type: ignore[method-assign]

    session, runner = start(here, rounds_bundle, before=break_the_largest)
    assert list(session.fallbacks) == ["FULL:num_tokens=256"]
    assert "OUT_OF_MEMORY" in session.fallbacks["FULL:num_tokens=256"]
    assert _captured(runner) == {"FULL:num_tokens=256", *PIECES}


def test_another_driver_of_the_same_branch_captures(
    here: Here, rounds_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "read_driver_version", lambda: "580.159.04")
    session, runner = start(here, rounds_bundle)
    assert session.fallbacks["*"].endswith("this machine has 580.159.04")
    assert _captured(runner) == {*KEYS, *PIECES}


def test_a_bundle_of_another_engine_and_a_capture_for_profiling_restore_nothing(
    here: Here, rounds_bundle: Path, bundle_directory: Path
) -> None:
    assert start(here, bundle_directory)[0].fallbacks == {
        "*": "the graphs of this bundle were not recorded from vLLM"
    }
    here["model"] = model = SimModel(SHAPE, 300)
    runner = Runner(model)
    runner.cudagraph_manager._max_full_descs_to_capture = 2
    restore.RestoringSession(rounds_bundle).run(runner, runner.own)
    assert _captured(runner) == {*KEYS, *PIECES}


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (
            {"parallel_config": SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)},
            "collectives",
        ),
        ({"vllm_config": SimpleNamespace(use_cumem_cudagraph_pool=True)}, "--sleep-mode-offload-cudagraph"),
        ({"use_aux_hidden_state_outputs": True}, "intermediate layers"),
    ],
)
def test_graphs_of_an_engine_that_is_not_supported_are_captured_and_not_recorded(
    here: Here, rounds_bundle: Path, tmp_path: Path, engine: dict[str, Any], reason: str
) -> None:
    here["model"] = model = SimModel(SHAPE, 300)
    runner = Runner(model)
    vars(runner).update(engine)
    # In its sleep mode vLLM captures into the pool that its allocator yields, and the manager's own pool remains unused.
    runner.cudagraph_manager.pool = (0, 99)
    session = restore.RestoringSession(rounds_bundle)
    assert session.run(runner, runner.own) == "captured" and reason in session.fallbacks["*"]
    (tmp_path / "work").mkdir()
    record.RecordingSession(tmp_path / "work").run(runner, runner.own)
    assert reason in (tmp_path / "work" / offline.REASON).read_text()


def test_the_output_buffer_is_created_before_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, manager = torch.empty, SimpleNamespace(hidden_states=None)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    restore.allocate_output(
        SimpleNamespace(cudagraph_manager=manager), {"shape": [4, 8], "dtype": "bfloat16"}
    )
    assert manager.hidden_states.shape == (4, 8) and manager.hidden_states.dtype is torch.bfloat16


def test_tokens_and_kv_are_whole_storages_and_outputs_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, kv, output = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 3), torch.zeros(4, 8)
    tensors = {"kv:0": kv[1:], "static:input_buffers.input_ids": ids[:2], "static:view.input_ids": ids}
    monkeypatch.setattr(restore, "name_runner_tensors", lambda runner: tensors)
    model, manager = SimpleNamespace(get_vocab_size=lambda: 64), SimpleNamespace(hidden_states=output)
    full, written = {str(n): SimpleNamespace(num_tokens=n) for n in (2, 9)}, list[Any]()
    found = restore.create_workload(
        SimpleNamespace(model_config=model, cudagraph_manager=manager),
        Any,
        full,  # type: ignore[arg-type]
        lambda descriptor, warmup: written.append((descriptor, warmup)),
    )
    assert found.tokens == [((ids.data_ptr(), 16), 4)] and found.kv == [(kv.data_ptr(), 24)]
    assert found.outputs == {"2": (output.data_ptr(), 64), "9": (output.data_ptr(), 128)}
    found.write("9")
    assert written == [(full["9"], False)] and found.vocabulary == 64
