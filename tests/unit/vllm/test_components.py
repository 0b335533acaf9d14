"""A feature whose vLLM integration point is missing falls back, and the starter gets the reason. No feature stops a server."""

import gc
import json
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from support.engines import REASON
from tools.raw_server import Asked, answer, answering

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.handover import Pull
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.system.start_progress import KEY, LineReader, StartProgress
from coldstart.vllm import compat, counting, stock
from coldstart.vllm.engine import components, offline, server
from coldstart.vllm.handover import CONNECTOR, handover_arguments
from coldstart.weights.load import ladder


@pytest.mark.vllm
def test_vllms_worker_runs_when_ours_does_not_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    from coldstart.vllm.engine import executor

    def choose() -> str:
        chosen = SimpleNamespace(worker_cls=components.WORKER)
        executor.use_vllm_worker_if_needed(SimpleNamespace(parallel_config=chosen))  # type: ignore[arg-type]
        return str(chosen.worker_cls)

    monkeypatch.setattr(compat, "fallbacks", found := [])
    assert (choose(), found) == (components.WORKER, [])
    monkeypatch.delitem(sys.modules, components.WORKER.rpartition(".")[0])
    for kind in CPUWorker.__mro__:
        if "load_model" in vars(kind):
            monkeypatch.delattr(kind, "load_model")
    assert choose() == components.VLLM_WORKER
    assert found[0].stage == "worker" and "has no attribute 'load_model'" in found[0].reason


@pytest.mark.vllm
def test_start_with_a_failed_import_runs_stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "import_runtime", lambda: import_module("vllm.gone"))
    monkeypatch.setattr(stock, "run", lambda plan, reason: reason)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert "No module named 'vllm.gone'" in str(server.run(LaunchPlan(["--model", "m"])))
    assert gc.isenabled()


def test_stock_server_is_reported_ready_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(READY_FD_ENV, str(writer))
    line: list[bytes] = []

    def respond(connection: socket.socket, asked: Asked) -> None:
        answer(connection, 200 if asked.path == "/health" and len(place.asked) > 2 else 503)

    def as_vllm(module: str, run_name: str) -> None:
        assert (module, run_name, sys.argv[1:]) == (stock.ENTRY_POINT, "__main__", words)
        assert READY_FD_ENV not in os.environ
        line.append(os.read(reader, 1 << 16))
        raise SystemExit(3)

    monkeypatch.setattr(stock.runpy, "run_module", as_vllm)
    monkeypatch.setattr(sys, "argv", ["server"])
    with answering(respond) as place:
        words = ["--model", "m", "--port", str(place.port)]
        moving = handover_arguments("127.0.0.1", "m")
        plan = LaunchPlan(Arguments([*words, *moving]), fallbacks=[Fallback("a", "b")])
        assert stock.run(plan, REASON) == 3
    report = json.loads(line[0])
    assert report["fallbacks"] == [
        {"section": "a", "reason": "b"}, {"section": "start", "reason": f"{REASON}; vLLM's own server runs"},
        {"section": "handover", "reason": "vLLM's own server does not move requests with their KV"},
    ]  # fmt: skip
    assert report["fast_path"] == {"start": False} and report["tokens"] == [] and len(place.asked) > 2
    assert os.read(reader, 1) == b""  # one line only
    os.close(reader)


def _engine(worker: str = components.WORKER) -> Any:
    return SimpleNamespace(config=SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker)))


def test_bundle_without_compiled_code_has_the_reason(lacking: set[str]) -> None:
    assert offline.explain_missing_forward(_engine()) is None
    assert "uses another" in str(offline.explain_missing_forward(_engine(components.VLLM_WORKER)))
    lacking.add("compile")
    assert offline.explain_missing_forward(_engine()) == REASON


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("--pipeline-parallel-size 2", ("mp", components.WORKER)),
        ("--pipeline-parallel-size 2 --distributed-executor-backend mp", ("mp", components.WORKER)),
        ("--pipeline-parallel-size 2 --nnodes 2 --node-rank 1 --headless", ("mp", components.WORKER)),
        ("--pipeline-parallel-size 2 --worker-cls mine.Worker", (None, "mine.Worker")),
        ("--pipeline-parallel-size 2 --tensor-parallel-size 2", (None, "auto")),
        ("--distributed-executor-backend mp", ("mp", "auto")),
        ("", (components.EXECUTOR, components.WORKER)),
    ],
)
def test_each_rank_of_a_pipeline_runs_our_worker(words: str, chosen: tuple[str | None, str]) -> None:
    args, fallbacks = server.parse_args(["--model", "m", *words.split()])
    assert (args.distributed_executor_backend, args.worker_cls, fallbacks) == (*chosen, [])


@pytest.mark.vllm
def test_a_pipeline_runs_vllms_worker_when_ours_cannot_be_imported(lacking: set[str]) -> None:
    lacking.add("worker")
    args, fallbacks = server.parse_args(["--model", "m", "--pipeline-parallel-size", "2"])
    assert args.worker_cls == "auto" and [one.stage for one in fallbacks] == ["worker", "compile"]


class Stock:
    """Fake of vLLM's worker without a device."""

    def init_device(self) -> None:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        self.model_runner = CPUModelRunner.__new__(CPUModelRunner)
        self.model_runner.model = None

    def load_model(self, **_: object) -> None:
        """Load nothing, as the loader does with a model whose weights are being fetched."""
        assert ladder.before_fetched is not None
        ladder.before_fetched(self.model_runner.model)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[LaunchPlan], Any]:
    """Return worker(plan), which creates a ColdWorker on the fake."""
    pytest.importorskip("vllm")
    from coldstart.vllm.engine import worker as module

    def make(plan: LaunchPlan) -> Any:
        monkeypatch.setattr(module.LaunchPlan, "current", lambda: plan)
        for name in ("init_device", "load_model"):
            monkeypatch.setattr(module.CPUWorker, name, getattr(Stock, name))
        monkeypatch.setattr(module.entry, "register", lambda: None)
        made = module.ColdWorker.__new__(module.ColdWorker)
        made.parallel_config = SimpleNamespace(world_size=1)
        made.init_device()
        return made

    return make


@pytest.mark.vllm
def test_unrestorable_code_is_compiled(lacking: set[str], worker: Any, tmp_path: Path) -> None:
    lacking.add("compile")
    made = worker(LaunchPlan([], compile_dir=str(tmp_path)))
    made.load_model()
    assert made.fallbacks == [Fallback("compile", REASON)]
    assert made.used_sections == {"compile": False} and not made.restored


@pytest.mark.vllm
def test_rank_saves_and_restores_code(worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coldstart.vllm.engine.worker import compiled

    places = list[tuple[object, Path]]()
    monkeypatch.setattr(compiled, "save_forwards", lambda model, place: places.append((model, place)))
    monkeypatch.setattr(compiled, "restore_forwards", lambda model, place: places.append((model, place)))
    for rank in range(2):
        kernel = tmp_path / f"cache-{rank}" / "ab" / f"kernel{rank}.so"
        kernel.parent.mkdir(parents=True)
        kernel.touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"cache-{rank}"))
        made = worker(LaunchPlan([], compile_dir=str(tmp_path)))
        made.rank, made.parallel_config = rank, SimpleNamespace(world_size=2)
        made.model_runner.model = f"layers of rank {rank}"
        assert made.save_compiled(str(tmp_path)) is None
        made.load_model()
        assert made.restored
    expected = [(f"layers of rank {rank}", tmp_path / f"rank-{rank}") for rank in range(2)]
    assert places == [place for place in expected for _ in range(2)]
    assert {file.name for file in (tmp_path / "inductor" / "ab").iterdir()} == {"kernel0.so", "kernel1.so"}


@pytest.mark.parametrize("reasons", [[None, "rank 1 cannot"], [None, None]])
def test_code_is_written_only_if_every_rank_has_saved_it(reasons: list[str | None], tmp_path: Path) -> None:
    executor = SimpleNamespace(collective_rpc=lambda method, args: reasons)
    engine: Any = SimpleNamespace(core=SimpleNamespace(model_executor=executor))
    assert offline.write_compiled(engine, tmp_path / "compile") == reasons[1]
    assert (tmp_path / "compile").exists() is (reasons[1] is None)


@pytest.mark.vllm
def test_an_arena_that_cannot_be_left_to_the_kernel_is_zeroed(lacking: set[str], worker: Any) -> None:
    from coldstart.vllm.engine.worker import CPUModelRunner, LazyKvRunner

    assert type(worker(LaunchPlan([])).model_runner) is LazyKvRunner
    lacking.add("lazy-kv")
    made = worker(LaunchPlan([]))
    assert type(made.model_runner) is CPUModelRunner
    assert made.fallbacks == [Fallback("kv", REASON)]


@pytest.mark.vllm
@pytest.mark.parametrize("feature", ["template", "worker"])
def test_a_template_without_our_worker_still_serves(
    lacking: set[str], feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldstart.vllm.engine import template

    lacking.add(feature)
    for name in ("import_runtime", "import_engine", "import_gpu_engine"):
        monkeypatch.setattr(template.server, name, lambda *_: None)
    monkeypatch.setattr(template.server, "parse_args", lambda _: (Namespace(), []))
    monkeypatch.setattr(template.server, "create_config", lambda _: None)
    monkeypatch.setattr(template.application, "warm_up", lambda *_: None)
    monkeypatch.setattr(template.threading, "active_count", lambda: 1)
    monkeypatch.setattr(template.gc, "freeze", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert template.build_template(LaunchPlan([]), "runtime") == []
    assert template.build_template(LaunchPlan([]), "engine") == [
        Fallback("template", f"{REASON}; each server builds its own worker")
    ]


@pytest.mark.vllm
def test_requests_move_without_their_kv_where_the_connector_cannot_be_loaded(lacking: set[str]) -> None:
    words = ["--model", "m", *handover_arguments("127.0.0.1", "m")]
    args, fallbacks = server.parse_args(words)
    assert args.kv_transfer_config.kv_connector_module_path == CONNECTOR and not fallbacks
    lacking.add("handover")
    args, fallbacks = server.parse_args(words)
    assert args.kv_transfer_config is None
    assert [str(one.reason) for one in fallbacks] == [f"{REASON}; requests are moved without their KV"]


@pytest.mark.parametrize("rejects", [True, False])
def test_a_start_that_vllm_rejects_beside_the_connector_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, rejects: bool
) -> None:
    def create(args: Namespace) -> Any:
        if args.kv_transfer_config is not None and rejects:
            raise ValueError("no")
        return SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=not rejects))

    monkeypatch.setattr(server, "create_config", create)
    plan = LaunchPlan([])
    args = Namespace(kv_transfer_config=SimpleNamespace(kv_connector_module_path=CONNECTOR))
    assert server.create_supported_config(args, plan) and args.kv_transfer_config is None
    (fallback,) = plan.fallbacks
    assert fallback.stage == "handover"
    assert ("ValueError: no;" if rejects else "encoder-decoder models;") in fallback.reason


@pytest.mark.vllm
@pytest.mark.parametrize("wanted", [True, False])
def test_the_connector_does_not_let_clients_send_embeddings(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = SimpleNamespace(enable_mm_embeds=True, allow_missing_mm_embeddings=True)
    config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=settings))
    given = SimpleNamespace(create_engine_config=lambda **_: config)
    monkeypatch.setattr(AsyncEngineArgs, "from_cli_args", lambda _: given)
    words = ["--model", "m", *["--enable-mm-embeds"][:wanted], *handover_arguments("127.0.0.1", "m")]
    assert server.create_config(server.parse_args(words)[0]) is config
    assert (settings.enable_mm_embeds, settings.allow_missing_mm_embeddings) == (wanted, False)


STEPS = counting.STEPS["vllm.v1.worker.gpu_worker", "Worker"]


def read(pipe: int) -> list[str]:
    return [StartProgress.parse(line[KEY]).describe() for line in LineReader(pipe).read() or ()]


def test_steps_of_the_first_rank_are_reported(pipe: int) -> None:
    class Worker:
        rank = 0

        def load_model(self) -> str:
            return "loaded"

    module: Any = SimpleNamespace(Worker=Worker)
    counting._name_steps("Worker", STEPS, module)
    assert Worker().load_model() == "loaded" and read(pipe) == ["load the model"]
    Worker.rank = 1
    assert Worker().load_model() == "loaded" and read(pipe) == []


@pytest.mark.vllm
def test_the_kv_of_a_sliding_window_is_not_moved() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from coldstart.vllm.handover.connector import find_incompatibility

    parallel = SimpleNamespace(world_size=1, pipeline_parallel_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel, speculative_config=None)
    size: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    for spec, moves in (
        (FullAttentionSpec(**size), True),
        (SlidingWindowSpec(**size, sliding_window=8), False),
    ):
        caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        assert (not find_incompatibility(config, caches)) is moves


SECRET = "ab" * 32


@pytest.mark.vllm
def test_a_transfer_ends_with_the_lease_of_its_pin() -> None:
    """A target that is slow, or behind a cut link, must not get the blocks of another request."""
    import torch

    from coldstart.vllm.handover.blocks import KvBlocks
    from coldstart.vllm.handover.connector import BlockTransfers, HandoverMetadata, HeldBlocks, KvLoad
    from coldstart.vllm.handover.wire import BlockQuery

    caches = {name: torch.arange(4 * 8, dtype=torch.uint8).view(4, 8) for name in ("layers.0", "layers.1")}
    copies = BlockTransfers("127.0.0.1", blocks := KvBlocks(caches, 4))
    try:
        with patch.object(blocks, "mark_iteration") as marked:  # a GPU must have written the blocks first
            copies.apply_metadata(HandoverMetadata(pinned={"pin": HeldBlocks(SECRET, (2, 1))}))
        marked.assert_called_once()
        query = BlockQuery("pin", 0, 2, blocks.layers)
        expected = bytes(range(16, 24)) + bytes(range(8, 16))
        assert dict(copies._read(query)) == dict.fromkeys(query.layers, expected)
        with patch.object(blocks, "read", side_effect=RuntimeError("out of memory")):
            assert list(copies._read(query)) == []
        layers = copies._read(query)
        assert next(layers)[1] == expected
        copies.apply_metadata(HandoverMetadata(ended_pins={"pin"}))
        assert list(layers) == []
        load = KvLoad("a", Pull("pin", SECRET, 2, "shape", ()), 0, (3, 0))
        with patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
            copies.apply_metadata(HandoverMetadata(loads=[load]))
        assert (copies.pop_finished_requests(), copies.pop_failed_blocks()) == ({"a"}, {3, 0}), "recomputed"
    finally:
        copies.port.close()


@pytest.mark.vllm
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_kv_blocks_move_between_memory_layouts(
    dtype: str, axes: tuple[int, ...], on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`axes` is the order in memory of vLLM's axes (block, head, token, content); two of its blocks are one here."""
    import torch

    from coldstart.vllm.handover.blocks import KvBlocks

    shape, kind, stream = (8, 3, 4, 5), getattr(torch, dtype), Mock()
    with torch.inference_mode():
        source = torch.randint(0, 100, [shape[axis] for axis in axes]).to(kind).permute(axes)
        target = torch.zeros(shape, dtype=kind)
    ours, theirs = (KvBlocks({"layer": cache}, 4) for cache in (source, target))
    assert ours.layers != KvBlocks({"layer": source}, 2).layers
    if dtype == "uint8" and axes != (0, 1, 2, 3):  # packed types may have a meaning in the order of memory
        assert theirs.layers != ours.layers
        return
    assert theirs.layers == ours.layers
    (layer,) = ours.layers
    expected = ours.read(layer, (3, 1))
    assert len(expected) == 2 * ours.get_block_bytes(layer)
    if on_gpu:  # a GPU's order of calls, without a GPU
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        for blocks in (ours, theirs):
            blocks._stream, blocks._iteration = stream, Mock()
        monkeypatch.setattr("coldstart.vllm.handover.blocks.COPY_BYTES", 1)  # one block at a time
    assert ours.read(layer, (3, 1)) == expected and not ours.read(layer, ())
    theirs.write(layer, (0, 2), bytearray(expected))
    assert [call[0] for call in stream.method_calls] == on_gpu * (["wait_event"] * 3 + ["synchronize"])
    moved, kept = target.view(4, 2, *shape[1:])[[0, 2]], target.view(4, -1)[[1, 3]]
    assert torch.equal(moved, source.reshape(4, 2, *shape[1:])[[3, 1]]) and not kept.any()
