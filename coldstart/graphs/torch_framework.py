"""PyTorch backend: names of tensor memory, segments of the private memory pool, and captured CUDAGraph objects.

Without a GPU, tests cover only the pure functions; benchmarks/gpu/plan.py runs this module on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from coldstart.graphs.api import AllocationEvent, Captured
from coldstart.graphs.errors import GraphRefusedError
from coldstart.graphs.tables import SymbolRegion

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver


class TorchFramework:
    """PyTorch backend for one model.

    `tensors` maps symbols (param:, buffer:, kv:, static:) to tensors. `capture` returns a CUDAGraph that keeps its raw
    graph. `pool` is the ID of the private memory pool (torch.cuda.graph_pool_handle()). A process that captures must
    record the memory history before its first allocation, because allocations are numbered in that history.
    """

    def __init__(
        self,
        driver: CudaDriver,
        tensors: Mapping[str, Any],
        sizes: Mapping[str, int],
        capture: Callable[[str], Any],
        pool: tuple[int, int],
    ) -> None:
        import torch

        self.torch, self.driver, self._pool = torch, driver, pool
        self.tensors, self.sizes, self._capture = tensors, dict(sizes), capture
        self.reserved: list[Any] = []

    def regions(self) -> list[SymbolRegion]:
        return tensor_regions(self.tensors)

    def pool(self) -> list[SymbolRegion]:
        return pool_segments(self.torch.cuda.memory._snapshot(), self._pool)

    def reserve(self, sizes: Sequence[int]) -> list[int]:
        """Allocate one block for each size in bytes, keep the blocks until `release`, and return their addresses."""
        new = [self.torch.empty(size, dtype=self.torch.uint8, device="cuda") for size in sizes]
        self.reserved += new
        return [tensor.data_ptr() for tensor in new]

    def release(self) -> None:
        self.reserved.clear()

    def trace(self) -> list[AllocationEvent]:
        return trace_events(self.torch.cuda.memory._snapshot(), self._pool)

    def capture(self, key: str) -> Captured:
        """Capture a graph, and instantiate it in the driver. Raises GraphRefusedError if PyTorch cannot capture it."""
        try:
            graph = self._capture(key)
            raw = int(graph.raw_cuda_graph())
        except RuntimeError as error:
            raise GraphRefusedError(f"cannot capture {key}: {error}") from error
        return Captured(raw, self.driver.instantiate(raw), [graph])

    def consumes_random(self, captured: Captured) -> bool:
        """Return whether a replay advances the default random generator, whose offset only PyTorch's own replay() updates."""
        cuda, (graph,) = self.torch.cuda, captured.keep
        generator = cuda.default_generators[cuda.current_device()]
        before = generator.get_offset()
        graph.replay()
        cuda.synchronize()
        return bool(generator.get_offset() != before)

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)


def define_kept_class(plain: Any) -> Any:
    """Return a subclass of CUDAGraph that keeps its raw graph after instantiation.

    The base class is a pybind class, so arguments must be passed to its `__init__`.
    """

    class Kept(plain):  # type: ignore[misc]
        def __init__(self, keep_graph: bool = True) -> None:
            super().__init__(True)

    return Kept


def tensor_regions(tensors: Mapping[str, Any]) -> list[SymbolRegion]:
    """Return one region for each storage (which views and tied weights share), named after its first tensor."""
    regions = []
    for symbol, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            regions.append(SymbolRegion(symbol, int(storage.nbytes()), int(storage.data_ptr())))
    return regions


def pool_segments(snapshot: Mapping[str, Any], pool: tuple[int, int]) -> list[SymbolRegion]:
    """Return the segments of one private memory pool in order of address."""
    mine = [s for s in snapshot["segments"] if tuple(s.get("segment_pool_id", (0, 0))) == tuple(pool)]
    mine.sort(key=itemgetter("address"))
    return [SymbolRegion(f"pool:{i}", int(s["total_size"]), int(s["address"])) for i, s in enumerate(mine)]


def trace_events(snapshot: Mapping[str, Any], pool: tuple[int, int]) -> list[AllocationEvent]:
    """Return the allocation and free events of the caching allocator in order."""
    kinds = {"alloc": "alloc", "free_completed": "free"}
    return [
        AllocationEvent(
            kinds[e["action"]], int(e["addr"]), int(e["size"]), tuple(e["pool_id"]) == tuple(pool)
        )
        for trace in snapshot.get("device_traces", [])
        for e in trace
        if e["action"] in kinds
    ]
