"""Record the CUDA graphs that a vLLM worker captures, and store them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from coldstart.graphs import offline
from coldstart.graphs.cuda.driver import CudaDriver
from coldstart.graphs.cuda.modules import ModuleLog, ModuleWatch
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.torch_framework import TorchFramework, define_kept_class
from coldstart.system.devices import nvml
from coldstart.vllm import late
from coldstart.vllm.graphs.hooks import build_graph_key, check_runner, is_full_graph, log
from coldstart.vllm.graphs.names import name_runner_tensors

VLLM = "vllm"  # field in the report of the bundle
PADDING = (1 << 21, 1 << 26)


class RecordingSession:
    """Capture session that records graphs offline; `directory` is the work directory of graphs/offline.py."""

    def __init__(self, directory: Path) -> None:
        self._work, self.modules = directory, ModuleLog()
        self._padding: list[Any] = []
        self.fallbacks: dict[str, str] = {}
        try:
            self._watch = ModuleWatch(self.modules)
        except GraphError as error:
            log.warning("cannot record graphs, because the binaries of the kernels are unknown: %s", error)

    def prepare_load(self) -> None:
        """Trace all later allocations. First allocate random sizes, so that every process has a different memory layout."""
        import torch

        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)
        rng = random.SystemRandom()
        sizes = [rng.randrange(*PADDING) for _ in range(rng.randrange(3, 12))]
        self._padding = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Run vLLM's own capture, keep its graphs, and record them in the work directory."""
        with keep_captured_graphs():
            result = own()
        try:
            check_runner(runner)
            self._watch_steps(runner, self._save(runner, CudaDriver(self.modules)))
        except GraphError as error:
            log.warning("cannot record graphs: %s", error)
            offline.fail(self._work, str(error))
        return result

    def _watch_steps(self, runner: Any, watch: offline.ContentWatch) -> None:
        """Compare the stored contents after each later step of this engine."""
        own = runner.execute_model

        def execute_model(*arguments: Any, **keywords: Any) -> Any:
            result = own(*arguments, **keywords)
            try:
                watch.look()
            except GraphError as error:
                offline.fail(self._work, f"cannot read unnamed memory between steps: {error}")
            return result

        runner.execute_model = execute_model

    def _save(self, runner: Any, driver: CudaDriver) -> offline.ContentWatch:
        framework = create_framework(driver, runner)
        captured = {key: framework.capture(key) for key in list_captured_graphs(runner)}
        output = runner.cudagraph_manager.hidden_states
        # A capture creates this buffer, so a restore must create it, too.
        like = {"shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}
        report = {VLLM: {"output": like, "driver": nvml.read_driver_version()}}
        return offline.record(self._work, driver, framework, captured, report)


def list_captured_graphs(runner: Any) -> dict[str, tuple[Any, Any]]:
    """Return (descriptor, graph) for each captured full graph by key, without piecewise graphs."""
    graphs = runner.cudagraph_manager.graphs.items()
    return {build_graph_key(d): (d, graph) for d, graph in graphs if is_full_graph(d)}


def create_framework(
    driver: CudaDriver, runner: Any, capture: Callable[[], None] = lambda: None
) -> TorchFramework:
    """Return the PyTorch backend for a runner's memory and graphs. It calls `capture` before it returns a graph."""

    def find_captured(key: str) -> Any:
        capture()
        graphs = list_captured_graphs(runner)
        if key not in graphs:
            raise GraphRefusedError(f"vLLM did not capture the graph {key} in this process")
        return graphs[key][1]

    sizes = {key: int(d.num_tokens) for key, (d, _) in list_captured_graphs(runner).items()}
    tensors, pool = name_runner_tensors(runner), runner.cudagraph_manager.pool
    return TorchFramework(driver, tensors, sizes, find_captured, pool)


def keep_captured_graphs() -> AbstractContextManager[None]:
    """Return a context manager that makes torch keep the raw graphs that vLLM captures in its block."""
    import torch

    return late.replace_attribute(torch.cuda, "CUDAGraph", define_kept_class(torch.cuda.CUDAGraph))
