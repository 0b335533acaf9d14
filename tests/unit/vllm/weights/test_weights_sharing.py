"""A full worker maps the weights that a rank serves, packed ones included, and nothing else."""

import ast
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.environment import VLLM_PP_LAYER_PARTITION
from coldstart.contract.plan import LaunchPlan
from coldstart.system.ipc.peers import PeerError
from coldstart.weights.load import stage

pytestmark = pytest.mark.vllm

SIZE = 2048
"""A weight of this size fits no hole of the heap, and so has pages of its own."""
WEIGHT_BYTES = 4 * SIZE * SIZE


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLDSTART_WEIGHTS_SOCKET", str(tmp_path / "weights"))
    return tmp_path / "weights"


def build(*seeds: int) -> Any:
    """Return a model with a linear layer for each seed, which determines its weights."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def layer(seed: int) -> Any:
        module: Any = torch.nn.Module()
        weight = torch.empty(SIZE, SIZE).normal_(generator=torch.Generator().manual_seed(seed))
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.quant_method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
        return module

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(map(layer, seeds))
    model.norm = torch.nn.Parameter(torch.full((SIZE, SIZE), 0.5), requires_grad=False)
    return model


def pack(model: Any) -> None:
    """Process the weights as vLLM does after it has loaded all of them."""
    for layer in model.layers:
        layer.quant_method.process_weights_after_loading(layer)


def outputs(model: Any) -> list[Any]:
    import torch

    row = torch.arange(SIZE, dtype=torch.float32)[None] / SIZE
    return [layer.cpu_linear(row, layer.weight, None) for layer in model.layers]


def serve_rank(*seeds: int) -> Any:
    from coldstart.vllm.weights import sharing

    runner = SimpleNamespace()
    with sharing.share_weights(runner, is_rank=True):
        runner.model = build(*seeds)
        pack(runner.model)
    return runner.model


def load_full(*seeds: int, early: bool = False) -> tuple[Any, Any]:
    from coldstart.vllm.weights import sharing

    runner = SimpleNamespace()
    with sharing.share_weights(runner, is_rank=False):
        sharer = sharing.get_loading_worker()
        runner.model = build(*seeds)
        names = [f"layers.{number}.{part}" for number in range(len(seeds)) for part in "ab"]
        for name in names if early else ():
            assert sharer is not None
            sharer.record_loaded(runner.model, name, names)
        pack(runner.model)
    return runner.model, sharer


@pytest.mark.parametrize("early", [False, True])
def test_a_full_worker_shares_the_layers_of_its_rank(socket: Path, early: bool) -> None:
    import torch

    rank = serve_rank(1, 2)
    before = outputs(rank)
    full, sharer = load_full(1, 2, 3, 4, early=early)
    # Two of four packed layers, and the norm.
    assert sharer.shared_bytes >= 3 * (WEIGHT_BYTES - 8192)
    assert sharer.weight_bytes - sharer.shared_bytes >= 2 * WEIGHT_BYTES
    assert all(map(torch.equal, outputs(full)[:2], before)) and all(map(torch.equal, outputs(rank), before))


def test_layers_are_packed_when_their_last_tensor_is_loaded(socket: Path) -> None:
    from coldstart.vllm.weights import sharing

    rank = serve_rank(1)
    runner = SimpleNamespace()
    with sharing.share_weights(runner, is_rank=False):
        sharer = sharing.get_loading_worker()
        assert sharer is not None
        runner.model = model = build(1, 2)
        names = ["layers.0.a", "layers.0.b", "layers.1.a", "norm"]
        packed = []
        for name in names:
            sharer.record_loaded(model, name, names)
            packed.append([layer.weight.numel() == 0 for layer in model.layers])
    assert rank and packed == [[False, False], [True, False], [True, True], [True, True]]


def test_other_weights_are_not_shared(socket: Path) -> None:
    rank, (_, sharer) = serve_rank(1, 2), load_full(3, 4)
    assert (
        rank and 0 < sharer.shared_bytes <= WEIGHT_BYTES < 2 * WEIGHT_BYTES <= sharer.weight_bytes
    )  # the norm is equal


def test_worker_loads_weights_that_no_rank_shares(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coldstart.vllm.engine import worker
    from coldstart.vllm.weights import sharing

    with pytest.raises(PeerError), sharing.share_weights(SimpleNamespace(), is_rank=False):
        pytest.fail("entered")
    loads = list[str]()
    monkeypatch.setattr(worker.CPUWorker, "load_model", lambda self, **_: loads.append("loaded"))
    monkeypatch.setattr(worker.entry, "register", lambda: None)
    made = worker.ColdWorker.__new__(worker.ColdWorker)
    made.plan, made.used_sections, made.fallbacks = LaunchPlan([]), {}, []
    made.model_runner, made.parallel_config = SimpleNamespace(model=None), SimpleNamespace(world_size=1)
    made.load_model()
    assert loads == ["loaded"] and [one.stage for one in made.fallbacks] == ["sharing"]


def test_adopted_worker_reports_unshared_weights(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coldstart.vllm.engine import executor, worker

    def adopt() -> Any:
        made = worker.ColdWorker.__new__(worker.ColdWorker)
        made.vllm_config, made.used_sections, made.fallbacks = SimpleNamespace(), {}, []
        own = executor.ColdExecutor.__new__(executor.ColdExecutor)
        own.vllm_config = SimpleNamespace(kv_transfer_config="of the server")
        own._adopt(SimpleNamespace(worker=made))
        assert made.kv_transfer_config == made.vllm_config.kv_transfer_config == "of the server"
        return made

    (fallback,) = adopt().fallbacks
    assert fallback.stage == "sharing" and "before the fork" in fallback.reason
    monkeypatch.delenv("COLDSTART_WEIGHTS_SOCKET")
    assert adopt().fallbacks == []


FOUND = importlib.util.find_spec("vllm")
Indices = Callable[[int, int, int], tuple[int, int]]


def _vllms(partition: str | None) -> Indices:
    assert FOUND is not None and FOUND.origin is not None
    file = Path(FOUND.origin).parent / "distributed" / "utils.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "get_pp_indices"]
    scope: dict[str, Any] = {
        "envs": SimpleNamespace(**{VLLM_PP_LAYER_PARTITION: partition}),
        "logger": logging.getLogger(__name__),
    }
    exec(compile(tree, file, "exec"), scope)
    indices: Indices = scope["get_pp_indices"]
    return indices


@pytest.mark.parametrize("count", [1, 2, 5, 12, 22, 28, 32, 36, 61, 80, 126])
def test_layers_are_divided_as_vllm_divides_them(count: int) -> None:
    theirs = _vllms(None)
    for size in range(1, 17):
        for rank in range(size):
            held = stage.list_stage_layers(count, rank, size)
            assert (held.start, held.stop) == theirs(count, rank, size), (rank, size)


@pytest.mark.parametrize(
    ("count", "partition"), [(5, "1,4"), (12, "4,4,4"), (22, "5,6,6,5"), (3, " 3"), (4, "0,4")]
)
def test_a_partition_is_read_as_vllm_reads_it(count: int, partition: str) -> None:
    theirs, size = _vllms(partition), partition.count(",") + 1
    for rank in range(size):
        held = stage.list_stage_layers(count, rank, size, partition)
        assert (held.start, held.stop) == theirs(count, rank, size)
