"""Deferred capture with vLLM's own dispatch, on the simulator: every size before and after its capture."""

import asyncio
import gc
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.graphs import CAPTURE_NEXT, EngineTask
from coldstart.vllm.graphs import deferred, plugin
from coldstart.vllm.graphs.deferred import DeferredCapture
from tests.support.graphs.model import Shape, SimModel

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
]
SIZES = (1, 2, 4, 8, 16, 24, 32)
LATER = (16, 24)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace what a capture calls of torch on a GPU, and return those calls."""
    import torch

    calls, patch = list[str](), monkeypatch.setattr
    patch(torch.cuda, "synchronize", lambda: calls.append("wait"))
    patch(torch.cuda, "graph", lambda capture_error_mode="global": calls.append(capture_error_mode))
    return calls


class Runner:
    """A runner with vLLM's CudaGraphManager and the simulator's graphs: it captures what vLLM lists, and runs its dispatch."""

    def __init__(self, mode: str, broken: int = 0) -> None:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        self.model = SimModel(Shape("deferred", 2, sizes=SIZES), 1)
        self.mode, self.broken = CUDAGraphMode[mode], broken
        self.held: dict[Any, Any] = {}
        self.order: list[tuple[str, int]] = []
        model_config = SimpleNamespace(is_hybrid=False, is_attention_free=False, is_multimodal_model=False)
        self.vllm_config: Any = SimpleNamespace(
            speculative_config=None, num_speculative_tokens=0, lora_config=None, model_config=model_config,
            parallel_config=SimpleNamespace(data_parallel_size=1),
            observability_config=SimpleNamespace(jit_monitor_mode="warn"),
            scheduler_config=SimpleNamespace(max_num_seqs=max(SIZES)),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            compilation_config=SimpleNamespace(
                cudagraph_mode=self.mode, cudagraph_capture_sizes=list(SIZES), compile_sizes=[],
                max_cudagraph_capture_size=max(SIZES), cudagraph_specialize_lora=False,
                is_attention_compiled_piecewise=lambda: True,
            ),
        )  # fmt: skip
        manager = self.cudagraph_manager = CudaGraphManager.__new__(CudaGraphManager)
        vars(manager).update(
            vllm_config=self.vllm_config,
            compilation_config=self.vllm_config.compilation_config,
            cudagraph_mode=self.mode,
            decode_query_len=1,
            varlen_decode=False,
            max_num_reqs=max(SIZES),
            lora_capture_cases=[0],
            ubatch_runner=None,
            graphs={},
            _graphs_captured=True,
            _lora_dispatch_map={},
            _candidates={},
            _capture_descs={},
        )
        manager._init_candidates()

    def capture_model(self) -> int:
        import torch
        from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

        with freeze_gc_for_cudagraph_capture():
            for mode, rows in self.cudagraph_manager._capture_descs.items():
                for row in rows:
                    torch.cuda.graph()  # type: ignore[call-arg]
                    if row.num_tokens == self.broken:
                        raise RuntimeError("out of memory")
                    self.held[mode, row] = self.model.capture(f"decode:{row.num_tokens}")
                    self.order.append((mode.name, row.num_tokens))
        return 0

    def run(self, size: int, *, decode: bool) -> tuple[str, bytes]:
        """Run a batch of this size as vLLM dispatches it; return the mode and all that the model has written."""
        self.model.prepare(f"decode:{size}", size)
        row = self.cudagraph_manager.dispatch(size, size, 1 if decode else None, 0, 1 if decode else None)
        if (mode := row.cg_mode.name) == "NONE":
            graph = self.model.capture(f"decode:{size}")
        else:
            assert row.num_tokens == size
            graph = self.held[row.cg_mode, row]
        self.model.driver.launch(graph.executable, 0)
        return mode, self.model.observe(f"decode:{size}")


BATCHES = [(size, decode) for size in SIZES for decode in (True, False)]


def run_all(runner: Runner) -> dict[tuple[int, bool], tuple[str, bytes]]:
    return {(size, decode): runner.run(size, decode=decode) for size, decode in BATCHES}


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_each_size_gives_equal_results_before_and_after_its_capture(mode: str) -> None:
    plain, runner = Runner(mode), Runner(mode)
    plain.capture_model()
    wanted = run_all(plain)
    deferral = DeferredCapture()
    deferral.run(runner, runner.capture_model)
    assert {size for _, size in runner.order} == {*deferred.FIRST_SIZES, max(SIZES)}
    # vLLM's own order: the larger activations of PIECEWISE first, large sizes first.
    assert runner.order == [one for one in plain.order if one[1] not in LATER]
    left = len(plain.order) - len(runner.order)
    while True:
        found = run_all(runner)
        assert {batch: one[1] for batch, one in found.items()} == {b: one[1] for b, one in wanted.items()}
        assert all(found[batch][0] == wanted[batch][0] for batch in BATCHES if batch[0] not in LATER)
        report = deferral.capture_next(True)
        if not report["left"]:
            break
        assert report == {"left": left, "error": None}
        left -= 1
    assert left == 0 and run_all(runner) == wanted
    assert sorted(runner.order) == sorted(plain.order)
    assert runner.order[-1][1] == 24  # small sizes first, each one in all its modes
    assert deferral.capture_next(True) == {"left": 0, "error": None}


def test_graph_is_not_dispatched_before_all_ranks_agree() -> None:
    runner = Runner("FULL_DECODE_ONLY")
    deferral = DeferredCapture()
    deferral.run(runner, runner.capture_model)
    deferral.capture_next(True)
    assert runner.order[-1] == ("FULL", 16) and runner.run(16, decode=True)[0] == "NONE"
    deferral.capture_next(True)
    assert runner.run(16, decode=True)[0] == "FULL" and runner.run(24, decode=True)[0] == "NONE"


def test_failed_capture_leaves_its_size_eager_in_all_ranks() -> None:
    ranks = [Runner("FULL_DECODE_ONLY"), Runner("FULL_DECODE_ONLY", broken=16)]
    wanted = {size: ranks[0].run(size, decode=False)[1] for size in SIZES}
    deferrals = [DeferredCapture(), DeferredCapture()]
    for deferral, runner in zip(deferrals, ranks, strict=True):
        deferral.run(runner, runner.capture_model)
    engine = Engine(deferrals)
    asyncio.run(deferred.capture_remaining(engine))
    assert engine.agreed == [True, False]
    for runner in ranks:
        modes = {size: runner.run(size, decode=True) for size in SIZES}
        assert {size for size, (mode, _) in modes.items() if mode == "NONE"} == set(LATER)
        assert {size: written for size, (_, written) in modes.items()} == wanted


@pytest.mark.parametrize("broken", [0, LATER[0]])
def test_later_capture_leaves_the_heap_and_other_threads_alone(calls: list[str], broken: int) -> None:
    import torch

    runner, deferral = Runner("FULL_DECODE_ONLY", broken), DeferredCapture()
    deferral.run(runner, runner.capture_model)
    assert calls == ["global"] * len(runner.order)
    calls.clear()
    gc.freeze()
    try:
        report = deferral.capture_next(True)
        assert gc.isenabled() and gc.get_freeze_count()
    finally:
        gc.unfreeze()
    assert calls == ["wait", "thread_local", "wait"]
    assert (report["error"] or "").endswith("out of memory" if broken else "")
    torch.cuda.graph()  # type: ignore[call-arg]
    assert calls[-1] == "global"


class Engine:
    """The engine of a server, with these ranks and requests that end after so many looks."""

    def __init__(self, ranks: list[DeferredCapture], busy: int = 0) -> None:
        self._ranks, self.busy, self.agreed, self.output_processor = ranks, busy, list[bool](), self

    def has_unfinished_requests(self) -> bool:
        self.busy -= 1
        return self.busy >= 0

    async def collective_rpc(self, method: str, args: tuple[bool]) -> list[Any]:
        assert method == CAPTURE_NEXT and self.busy < 0
        self.agreed.append(*args)
        return [rank.capture_next(*args) for rank in self._ranks]


def test_server_captures_all_sizes_when_no_request_runs() -> None:
    runner, deferral = Runner("FULL_AND_PIECEWISE"), DeferredCapture()
    deferral.run(runner, runner.capture_model)
    asyncio.run(deferred.capture_remaining(engine := Engine([deferral], busy=5)))
    assert engine.agreed == [True] * 5 and len(runner.held) == 2 * len(SIZES)


def test_sleeping_engine_captures_nothing_until_all_its_memory_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator

    # As after `/wake_up?tags=weights`.
    held = {
        tag: AllocationData((0, 1, 2, 3), tag, is_asleep=tag == "kv_cache") for tag in ("weights", "kv_cache")
    }
    monkeypatch.setattr(CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=held))
    monkeypatch.setattr(deferred, "ASLEEP_POLL_S", 0.02)
    runner, deferral = Runner("FULL_DECODE_ONLY"), DeferredCapture()
    deferral.run(runner, runner.capture_model)
    first, engine = len(runner.order), Engine([deferral])

    async def capture_and_wake() -> None:
        capturing = asyncio.create_task(deferred.capture_remaining(engine))
        await asyncio.sleep(0.1)
        assert len(runner.order) == first and 1 <= len(engine.agreed) <= 6
        held["kv_cache"].is_asleep = False
        await capturing

    asyncio.run(capture_and_wake())
    assert len(runner.held) == len(SIZES) and runner.run(24, decode=True)[0] == "FULL"


def test_server_survives_an_engine_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()  # what the log retains depends on vLLM's settings of logging, which other tests load
    monkeypatch.setattr(deferred.log, "warning", lambda text, *_: said.append(text))
    asyncio.run(deferred.capture_remaining(SimpleNamespace(output_processor=None)))
    assert len(said) == 1 and "cannot capture more CUDA graphs" in said[0]


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("model_config", "is_hybrid", True),
        ("model_config", "is_attention_free", True),
        ("model_config", "is_multimodal_model", True),
        ("parallel_config", "data_parallel_size", 2),
        ("observability_config", "jit_monitor_mode", "error"),
        (None, "lora_config", object()),
        (None, "speculative_config", object()),
    ],
)
def test_what_a_later_capture_would_disturb_captures_all_before(
    where: str | None, name: str, value: Any
) -> None:
    runner, deferral = Runner("FULL_DECODE_ONLY"), DeferredCapture()
    config = runner.vllm_config
    setattr(getattr(config, where) if where else config, name, value)
    deferral.run(runner, runner.capture_model)
    assert len(runner.held) == len(SIZES) and "before the server is ready" in deferral.fallbacks["*"]
    assert deferral.capture_next(True) == {"left": 0, "error": None}


def test_first_model_runner_captures_all_before() -> None:
    deferral, runner = DeferredCapture(), SimpleNamespace(vllm_config=Runner("PIECEWISE").vllm_config)
    assert deferral.run(runner, lambda: "captured") == "captured"
    assert deferral.fallbacks["*"].endswith("this engine uses vLLM's model runner V1")


def test_task_hooks_the_runner_and_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, worker = type("Runner", (), {"capture_model": Runner.capture_model}), type("Worker", (), {})
    module = SimpleNamespace(GPUModelRunner=kind, Worker=worker)
    monkeypatch.setattr(plugin.late, "run_when_imported", lambda name, work, failed=None: work(module))
    monkeypatch.setattr(plugin.compat, "fallback_sources", [])
    plugin.register(EngineTask(deferred=True))
    assert kind.capture_model is not Runner.capture_model
    assert plugin.compat.build_worker_report()["fallbacks"] == []
    assert getattr(worker(), CAPTURE_NEXT)(True)["left"] == 0
    monkeypatch.setattr(
        plugin.compat, "find_unsupported_reason", lambda feature, load=None: f"{feature} is gone."
    )
    plugin.register(EngineTask(deferred=True))
    (fallback,) = plugin.compat.build_worker_report()["fallbacks"]
    assert fallback["section"] == "graphs" and "deferred-capture is gone." in fallback["reason"]
