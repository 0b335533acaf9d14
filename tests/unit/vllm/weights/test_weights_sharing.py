"""A full worker maps the weights that a rank serves, packed ones included, and nothing else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.environment import VLLM_PP_LAYER_PARTITION
from coldstart.contract.plan import LaunchPlan
from coldstart.system.ipc.peers import PeerError
from coldstart.weights.load import stage
from tests.support.graphs.library import fake_cuda

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
        module.quant_method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
        weight = torch.empty(SIZE, SIZE).normal_(generator=torch.Generator().manual_seed(seed))
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
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
    assert rank and 0 < sharer.shared_bytes <= WEIGHT_BYTES  # the norm is equal
    assert sharer.weight_bytes >= 2 * WEIGHT_BYTES


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


COUNTS = (1, 2, 5, 12, 22, 28, 32, 36, 61, 80, 126)
PARTITIONS = ((5, "1,4"), (12, "4,4,4"), (22, "5,6,6,5"), (3, " 3"), (4, "0,4"))


@pytest.mark.parametrize(("count", "partition"), [*((count, None) for count in COUNTS), *PARTITIONS])
def test_layers_are_divided_as_vllm_divides_them(
    count: int, partition: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.utils import get_pp_indices

    if partition:
        monkeypatch.setenv(VLLM_PP_LAYER_PARTITION, partition)
    for size in [partition.count(",") + 1] if partition else range(1, 17):
        for rank in range(size):
            held = stage.list_stage_layers(count, rank, size, partition)
            assert (held.start, held.stop) == get_pp_indices(count, rank, size), (rank, size)


# These come last: memory that they free would hold packed weights of the CPU, which are only found in new mappings.
class GpuLoads:
    """Loads of our loader in this process, where the double of the driver has the memory of the GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from coldstart.vllm import compat
        from coldstart.vllm.weights import loader

        self.driver, self.loader, self.fallbacks, self.own = fake_cuda(), loader, list[Any](), list[float]()
        self.driver.fake_fail_at(-1, 0)
        self.has_names = True
        self.physical = self.driver.fake_physical()
        vllms, build_ranks = loader.DefaultModelLoader, lambda _, config, *__: build(*config.seeds)
        monkeypatch.setattr(compat, "fallbacks", self.fallbacks)
        monkeypatch.setattr(loader, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(vllms, "create_model", build_ranks)
        monkeypatch.setattr(vllms, "load_model", build_ranks)
        monkeypatch.setattr(vllms, "load_weights", lambda _, model, config: self._copy(model, config.seeds))
        self.made: Any = loader.ColdLoader.__new__(loader.ColdLoader)
        self.made.report = loader.ladder.begin_report()

    def serve_rank(self, *seeds: int) -> Any:
        return self.made.load_model(_configure(seeds, 2), None)

    def load_full(self, *seeds: int) -> tuple[int, Any]:
        """Return the bytes that the rank offers, and the model, whose weights are loaded in halves."""
        config = _configure(seeds, 1)
        external, model = self.made.get_external_weight_memory(config), self.made.create_model(config, None)
        self.made.load_weights(model, config)
        return external, model

    def _copy(self, model: Any, seeds: tuple[int, ...]) -> None:
        layers = build(*seeds).layers
        loaded = {
            f"layers.{n}.{half}": layers[n].weight.chunk(2)[half]
            for n in range(len(seeds))
            for half in (0, 1)
        }
        names: Any = [SimpleNamespace(name=name) for name in loaded if self.has_names]
        for name, tensor in self.loader._watch(model, names, loaded.items()):
            _, number, half = name.split(".")
            model.layers[int(number)].weight.chunk(2)[int(half)].copy_(tensor)
            held = sum(layer.weight.untyped_storage().nbytes() for layer in model.layers)
            sharer = self.loader._find_sharer()
            self.own.append(round((held - (sharer.shared_bytes if sharer else 0)) / WEIGHT_BYTES, 2))


def _configure(seeds: tuple[int, ...], ranks: int) -> Any:
    return SimpleNamespace(seeds=seeds, parallel_config=SimpleNamespace(world_size=ranks))


def has_weights(model: Any, *seeds: int) -> bool:
    import torch

    pairs = zip(model.layers, build(*seeds).layers, strict=True)
    return all(torch.equal(one.weight, other.weight) for one, other in pairs)


# One layer at a time is held twice, and those that the rank lacks remain. If vLLM's own loader reads, all are.
@pytest.mark.parametrize(("has_names", "own"), [(True, [1, 1, 1, 1, 1, 1, 2, 2]), (False, [4] * 8)])
def test_a_full_worker_maps_the_gpu_memory_of_its_rank(
    socket: Path, monkeypatch: pytest.MonkeyPatch, has_names: bool, own: list[int]
) -> None:
    gpu = GpuLoads(monkeypatch)
    gpu.has_names = has_names
    rank = gpu.serve_rank(1, 2)
    external, full = gpu.load_full(1, 2, 3, 4)
    assert external == 2 * WEIGHT_BYTES and gpu.fallbacks == []
    assert has_weights(rank, 1, 2) and has_weights(full, 1, 2, 3, 4)
    assert gpu.own == own
    rank.layers[1].weight[0, 0] = 99
    assert full.layers[1].weight[0, 0] == 99


def test_other_gpu_weights_are_not_shared(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuLoads(monkeypatch)
    rank, (_, full) = gpu.serve_rank(1, 2), gpu.load_full(1, 3)
    assert has_weights(rank, 1, 2) and has_weights(full, 1, 3)
    (fallback,) = gpu.fallbacks
    assert fallback.stage == "sharing" and "different bytes in layers.1.weight" in fallback.reason
    # Two allocations of the rank, of which the full worker maps one.
    assert gpu.driver.fake_physical() == gpu.physical + 3


@pytest.mark.parametrize("failing", ["rank", "full"])
def test_each_worker_has_its_own_weights_after_a_failed_driver_call(
    socket: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    gpu = GpuLoads(monkeypatch)
    for number in range(1, 8):
        gpu.fallbacks.clear()
        gpu.driver.fake_fail_at(number if failing == "rank" else -1, 0)
        rank = gpu.serve_rank(1)
        gpu.driver.fake_fail_at(number if failing == "full" else -1, 0)
        external, full = gpu.load_full(1, 2)
        assert external == 0 and has_weights(rank, 1) and has_weights(full, 1, 2), number
        assert gpu.own[-1] == 2 and gpu.fallbacks, number


def test_no_memory_stays_mapped_when_a_full_worker_maps_only_a_part(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldstart.vllm.sleep.device import ExportableMemory

    gpu = GpuLoads(monkeypatch)
    rank, parts, map_part = gpu.serve_rank(1, 2), iter((1, 2)), ExportableMemory.map_descriptor
    monkeypatch.setattr(
        ExportableMemory, "map_descriptor", lambda *given: map_part(*given[:2], given[2] // next(parts))
    )
    external, full = gpu.load_full(1, 2)
    assert external == 0 and has_weights(rank, 1, 2) and has_weights(full, 1, 2)
    assert next(parts, None) is None and gpu.driver.fake_physical() == gpu.physical + 2
