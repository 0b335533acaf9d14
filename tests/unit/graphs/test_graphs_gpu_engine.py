"""benchmarks/gpu/engine.py over the simulated engine: all rounds, the report, time limits and failing steps."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import engine, engine_pool, engine_process, engine_report
from coldstart.materialize import graphs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[engine.Run]:
    """Return a run whose processes are simulated engines."""
    monkeypatch.setattr(engine_pool, "COMMAND", [sys.executable, "-m", "support.graphs_bench_process"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    monkeypatch.setattr(graphs, "absent", lambda vllm_args: None)
    place = tmp_path / "logs"
    place.mkdir()
    pool = engine_pool.Pool(place, os.environ)
    model = engine.write_model("tiny", tmp_path)
    run = engine.Run(tmp_path, time.monotonic() + 300, tmp_path / "out.json", model, [], pool)
    yield run
    pool.close()


def report(run: engine.Run) -> dict[str, Any]:
    """Return the report on disk, with its steps by label."""
    assert run.out is not None
    found: dict[str, Any] = json.loads(run.out.read_text())
    return found | {"steps": {row["label"]: row for row in found["steps"]}}


@pytest.mark.slow
def test_all_steps_record_prove_and_restore_and_the_report_compares_them(bench: engine.Run) -> None:
    bench.step("plain.1")
    bench.compare(bench.record(), 2)
    bench.import_alone()
    found = report(bench)
    concluded, steps = found["conclusions"], found["steps"]
    assert concluded["steps_failed"] == [] and "error" not in concluded
    assert concluded["graphs"]["restore.2"] == {"restored": 4, "captured": 0}
    assert concluded["graphs"]["plain.3"] == {"restored": 0, "captured": 4}
    assert concluded["capture_s"]["times_shorter"] == 8.0 and concluded["capture_s"]["range"] == [8.0, 8.0]
    assert concluded["engine_s"] == {
        "plain": [6.0, 6.0],
        "restore": [2.5, 2.5],
        "times_shorter": 2.4,
        "range": [2.4, 2.4],
    }
    assert concluded["answers_equal_first_plain"]["restore.1"]["1"] == {"equal": True, "logprobs_apart": 0.0}
    assert concluded["import_s"] == [1.5] and concluded["restore_parts_s"]["link_s"] == [0.1, 0.1]
    assert {"record graphs, layout 1", "record graphs, layout 2", "prove graphs"} <= {*concluded["offline_s"]}
    bundle = steps["graphs"]["bundle"]
    assert bundle["proof"]["graphs"] == 4 and bundle["kernels_without_binary"] == []
    assert bundle["bytes_by_part"]["inputs"] > 0
    assert [*steps["prove graphs"]["rounds"]["layouts_bytes"]][:2] == ["layout-1", "layout-2"]


@pytest.mark.parametrize("failing", ["record", pytest.param("prove", marks=pytest.mark.slow)])
def test_without_proven_graphs_the_plain_starts_run_and_the_report_has_the_reason(
    bench: engine.Run, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setenv("FAIL", failing)
    bench.pool._environment = dict(os.environ)
    bench.step("plain.1")
    bench.compare(bench.record(), 1)
    found = report(bench)
    assert "no device" in found["steps"]["graphs"]["error"]
    assert "no graphs were recorded" in found["steps"]["restore.1"]["error"]
    assert found["steps"]["plain.2"]["ok"] and found["conclusions"]["capture_s"]["times_shorter"] is None
    failed = next(row for label, row in found["steps"].items() if label.startswith(failing))
    assert failed["exit"] == 1 and "no device" in failed["log_end"] and "layouts_bytes" in failed["rounds"]


def test_step_that_hangs_ends_at_its_limit_and_its_results_so_far_remain(
    bench: engine.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG", "plain")
    monkeypatch.setattr(engine, "LEAST_S", 0.0)
    bench.pool._environment = dict(os.environ)
    row = bench.step("plain.1", limit=3)
    assert "no answer in 3 s" in row["error"] and row["exit"] is None
    assert row["result"] == {"times": {"config_s": 1.0}} and row["seconds"] < 60


def test_failed_import_and_lack_of_time_are_reasons(
    bench: engine.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "import")
    bench.pool._environment = dict(os.environ)
    (bench.work / "logs" / "process-1.json").write_text('{"import_s": 1}')  # of an earlier run
    assert "no vLLM here" in bench.step("plain.1")["error"]
    bench.end = time.monotonic()
    bench.import_alone()
    assert all("no time was left" in row["error"] for row in bench.steps[1:])
    assert report(bench)["conclusions"]["steps_failed"] == ["plain.1", "import"]


def test_start_that_restored_nothing_is_no_figure_and_is_repeated_without_the_canary(
    bench: engine.Run,
) -> None:
    broken = bench.work / "broken"
    broken.mkdir()
    times = {"engine_s": 1.0, "capture_s": 1.0}
    rows = [
        {"label": "plain.1", "ok": True, "result": {"times": times}},
        {"label": "restore.1", "ok": True, "result": {"times": times, "graphs": {"restored": []}}},
    ]
    assert engine_report.conclude(rows)["capture_s"]["restore"] == []
    bench.step = lambda label, *rest, **env: bench.steps.append({"label": label, "env": env}) or {"ok": True}  # type: ignore[method-assign,assignment,func-returns-value]
    bench.compare(broken, 1)
    assert [row["label"] for row in bench.steps] == ["restore.1", "restore.without-canary", "plain.2"]
    assert bench.steps[1]["env"] == {"COLDSTART_GRAPHS_CANARY": "0"}


def test_arguments_of_the_start_name_the_sizes() -> None:
    few, every = engine.vllm_args("1,2", 1), engine.vllm_args("all", 1)
    assert json.loads(few[-1])["cudagraph_capture_sizes"] == [1, 2]
    assert "cudagraph_capture_sizes" not in json.loads(every[-1]) and "256" in every


def test_capture_seconds_contain_the_plugin_and_survive_a_crash(tmp_path: Path) -> None:
    class Runner:
        def capture_model(self) -> int:
            return 7

    class Worker:
        def __init__(self) -> None:
            self.model_runner = Runner()

        def load_model(self) -> None:
            raise RuntimeError("no memory")

        def compile_or_warm_up_model(self) -> int:
            return self.model_runner.capture_model()

    measured = engine_process.Measured(tmp_path / "result.json")
    measured.time_methods(Runner, capture_model="vllm_capture_s")
    engine_process.watch_worker(measured, SimpleNamespace(Worker=Worker))
    own = Runner.capture_model

    def slow(runner: Runner) -> int:
        time.sleep(0.05)
        return own(runner)

    Runner.capture_model = slow  # type: ignore[method-assign]
    worker = Worker()
    assert worker.compile_or_warm_up_model() == 7
    with pytest.raises(RuntimeError, match="no memory"):
        worker.load_model()
    times = json.loads((tmp_path / "result.json").read_text())["times"]
    assert times["warm_up_and_capture_s"] >= times["capture_s"] >= 0.05 > times["vllm_capture_s"]
    assert "load_model_s_until_failure" in times and "load_model_s" not in times
    measured.attempt("memory", lambda: 1 // 0)
    assert "ZeroDivisionError" in json.loads((tmp_path / "result.json").read_text())["memory_error"]


@pytest.mark.slow
def test_dummy_weights_are_the_same_in_each_process_and_large_enough_to_matter() -> None:
    torch = pytest.importorskip("torch")

    class Loader:
        def load_weights(self, model: Any, config: None) -> None:
            torch.nn.init.zeros_(model[0].weight)

    engine_process.spread_weights(SimpleNamespace(DummyModelLoader=Loader))
    models = [torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.LayerNorm(64)).bfloat16() for _ in "ab"]
    for model in models:
        Loader().load_weights(model, None)
    (one, other), norm = (model[0].weight for model in models), models[0][1]
    assert torch.equal(one, other) and 0.05 < one.float().std() < 0.08
    assert bool((norm.weight == 1).all()) and bool((norm.bias == 0).all())
