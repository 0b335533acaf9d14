"""Record graphs in a vLLM worker: vLLM captures, and the graphs are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldstart.graphs import offline
from coldstart.graphs.cuda.driver import CudaDriver
from coldstart.graphs.cuda.modules import ModuleLog, ModuleWatch
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.torch_framework import TorchFramework, define_kept_class
from coldstart.system.devices import nvml
from coldstart.vllm.graphs.hooks import graph_key, is_full, log, refuse_unsupported
from coldstart.vllm.graphs.names import runner_tensors

VLLM = "vllm"  # entry of the report
PADDING = (1 << 21, 1 << 26)


class GraphRecording:
    """Offline round; `directory` is the work directory of offline.py."""

    def __init__(self, directory: Path) -> None:
        self._work, self.modules = directory, ModuleLog()
        self._padding: list[Any] = []
        self.fallbacks: dict[str, str] = {}
        try:
            self._watch = ModuleWatch(self.modules)
        except GraphError as error:
            log.warning(
                "no graph can be recorded, because the binaries of the kernels are unknown: %s", error
            )

    def prepare_load(self) -> None:
        """Number all allocations from here on; allocate random sizes first, so that no two processes have the same layout."""
        import torch

        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)
        rng = random.SystemRandom()
        sizes = [rng.randrange(*PADDING) for _ in range(rng.randrange(3, 12))]
        self._padding = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Capture with kept graphs, then write this process's layout."""
        with keep_graphs():
            result = own()
        try:
            refuse_unsupported(runner)
            self._watch_steps(runner, self._save(runner, CudaDriver(self.modules)))
        except GraphError as error:
            log.warning("cannot record graphs: %s", error)
            offline.fail(self._work, str(error))
        return result

    def _watch_steps(self, runner: Any, watch: offline.ContentWatch) -> None:
        """Compare stored contents after each step that this engine takes from now on."""
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
        framework = vllm_framework(driver, runner)
        captured = {key: framework.capture(key) for key in captured_graphs(runner)}
        output = runner.cudagraph_manager.hidden_states
        # A restore must create this buffer, which a capture creates.
        like = {"shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}
        report = {VLLM: {"output": like, "driver": nvml.read_driver_version()}}
        return offline.record(self._work, driver, framework, captured, report)


def captured_graphs(runner: Any) -> dict[str, tuple[Any, Any]]:
    """Return key to (descriptor, graph) of every full graph; pieces stay with vLLM."""
    return {graph_key(d): (d, graph) for d, graph in runner.cudagraph_manager.graphs.items() if is_full(d)}


def vllm_framework(
    driver: CudaDriver, runner: Any, capture: Callable[[], None] = lambda: None
) -> TorchFramework:
    """Return the runner's memory by name, with vLLM's graphs as captures; `capture` is called before one is returned."""

    def find_captured(key: str) -> Any:
        capture()
        graphs = captured_graphs(runner)
        if key not in graphs:
            raise GraphRefusedError(f"vLLM did not capture {key} in this process")
        return graphs[key][1]

    sizes = {key: int(d.num_tokens) for key, (d, _) in captured_graphs(runner).items()}
    return TorchFramework(driver, runner_tensors(runner), sizes, find_captured, runner.cudagraph_manager.pool)


@contextmanager
def keep_graphs() -> Iterator[None]:
    """Replace the class of vLLM's captured graphs by one that keeps them, in the block."""
    import torch

    plain = torch.cuda.CUDAGraph
    torch.cuda.CUDAGraph = define_kept_class(plain)
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = plain
