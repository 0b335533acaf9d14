"""The plug-in behind `entry.register`: record captures offline, restore them online.

COLDSTART_GRAPHS_RECORD=<directory>   each capturing worker leaves a snapshot there
COLDSTART_GRAPHS_RESTORE=<directory>  a proven bundle; descriptors that it holds are not captured
With neither set `entry` does not even import this.  Whatever goes wrong, vLLM's own capture runs, and the reason
is logged.  In vLLM every restored graph is built before ready, and the canary is left to the caller.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from coldstart import timeline
from coldstart.graphs import capture, gate, vllm_hook
from coldstart.graphs.cuda.backend import CudaDriver
from coldstart.graphs.cuda.cupti import Watch
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.entry import RECORD, RESTORE
from coldstart.graphs.errors import GraphError, Refused
from coldstart.graphs.restore import Restorer
from coldstart.graphs.torch_framework import TorchFramework, consumes_random
from coldstart.graphs.vllm_names import runner_tensors

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
EXTRAS = "vllm.json"
log = logging.getLogger("vllm.coldstart.graphs")


def register() -> None:
    """What vLLM calls in each of its processes."""
    record, restore = os.environ.get(RECORD), os.environ.get(RESTORE)
    if not record and not restore:
        return
    try:
        vllm_hook.checked_adapter()
        session = Recording(Path(record)) if record else Restoring(Path(str(restore)))
    except GraphError as error:
        log.warning("CUDA graphs are captured as always: %s", error)
        return
    for name in RUNNERS:
        runner = import_module(name).GPUModelRunner
        runner.capture_model = _wrapped(runner.capture_model, session.run)


Run = Callable[[Any, Callable[[], Any]], Any]


def _wrapped(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_model(self: Any, *arguments: Any, **keywords: Any) -> Any:
        own = functools.partial(original, self, *arguments, **keywords)
        return own() if keywords.get("profile_only") else run(self, own)

    return capture_model


def _refuse_parallel(runner: Any) -> None:
    parallel = runner.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise Refused("graphs of several ranks hold collectives")


def captured_graphs(runner: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Key to (descriptor, graph, output) of every full graph of either runner."""
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is not None:
        return {vllm_hook.key_of(d, d.cg_mode.name): (d, g, None) for d, g in manager.graphs.items()}
    entries = getattr(runner.model, "concrete_cudagraph_entries", {})
    kept = {d: e for d, e in entries.items() if e.cudagraph is not None}
    return {vllm_hook.key_of(d, "FULL"): (d, e.cudagraph, e.output) for d, e in kept.items()}


class Recording:
    """The offline half in a worker."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.modules = directory, ModuleLog()
        self._watch = Watch(self.modules)

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Capture as always, but keep the graphs; then save a snapshot."""
        import torch

        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
        with patch.object(torch.cuda, "CUDAGraph", kept_class(torch.cuda.CUDAGraph)):
            result = own()
        try:
            _refuse_parallel(runner)
            self._save(runner)
        except GraphError as error:
            log.warning("no graphs were recorded: %s", error)
        return result

    def _save(self, runner: Any) -> None:
        graphs = captured_graphs(runner)
        driver = CudaDriver(self.modules)
        sizes = {key: int(d.num_tokens) for key, (d, _, _) in graphs.items()}
        pool = _pool(runner)
        framework = TorchFramework(driver, runner_tensors(runner), sizes, _no_capture, pool)
        captured = {key: _captured(driver, graph) for key, (_, graph, _) in graphs.items()}
        for key, (_, graph, _) in graphs.items():
            if consumes_random(graph):
                framework.refusals[key] = "the graph consumes random numbers"
        target = self.directory / f"snapshot-{os.getpid()}"
        capture.take(driver, framework, captured).save(target)
        outputs = {key: describe(output, framework.pool()) for key, (_, _, output) in graphs.items()}
        extras = {"attributes": manager_attributes(runner), "outputs": outputs}
        (target / EXTRAS).write_text(json.dumps(extras))


def _captured(driver: CudaDriver, graph: Any) -> Any:
    from coldstart.graphs.api import Captured

    raw = int(graph.raw_cuda_graph())
    return Captured(raw, driver.instantiate(raw), [graph])


def _pool(runner: Any) -> tuple[int, int]:
    manager = getattr(runner, "cudagraph_manager", None)
    pool: tuple[int, int] = manager.pool if manager is not None else runner.model.graph_pool
    return pool


def kept_class(plain: Any) -> Any:
    """CUDAGraph with its raw graph kept after instantiation."""

    class Kept(plain):  # type: ignore[misc]
        def __new__(cls, keep_graph: bool = True) -> Any:
            return super().__new__(cls, True)

    return Kept


def _no_capture(key: str) -> Any:
    raise Refused(f"{key} is captured by vLLM itself")


def manager_attributes(runner: Any) -> dict[str, Any]:
    """Buffers that capture makes on the manager, which a restore must make first."""
    manager = getattr(runner, "cudagraph_manager", None)
    hidden = getattr(manager, "hidden_states", None)
    if hidden is None:
        return {}
    return {"hidden_states": {"shape": list(hidden.shape), "dtype": str(hidden.dtype).removeprefix("torch.")}}


def describe(output: Any, pool: list[Any]) -> dict[str, Any] | None:
    """Where a captured output tensor lies in the pool; None for what is no single tensor of the pool."""
    if not hasattr(output, "data_ptr"):
        return None
    address = int(output.data_ptr())
    for region in pool:
        if region.base <= address < region.base + region.size:
            return {
                "symbol": region.symbol, "offset": address - region.base, "shape": list(output.shape),
                "stride": list(output.stride()), "dtype": str(output.dtype).removeprefix("torch."),
            }  # fmt: skip
    return None


class Restoring:
    """The online half in a worker; also the hook's Source."""

    def __init__(self, directory: Path) -> None:
        self.adopt = gate.read_proof(directory).adopt
        self.directory = directory
        try:
            self.extras: dict[str, Any] = json.loads((directory / EXTRAS).read_text())
        except (OSError, ValueError) as error:
            raise Refused(f"the bundle was not recorded from vLLM: {error}") from error

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Link, hook, and let vLLM's own capture do what is left."""
        try:
            _refuse_parallel(runner)
            self._bind(runner)
            undo = vllm_hook.install(self, log.warning)
        except GraphError as error:
            log.warning("CUDA graphs are captured as always: %s", error)
            return own()
        try:
            return own()
        finally:
            undo()

    def _bind(self, runner: Any) -> None:
        import torch

        driver = CudaDriver()
        manager = getattr(runner, "cudagraph_manager", None)
        self._made = {n: self._empty(torch, a) for n, a in self.extras["attributes"].items()}
        for name, tensor in self._made.items():
            setattr(manager, name, tensor)
        sizes = dict.fromkeys(self.extras["outputs"], 0)
        self.framework = TorchFramework(driver, runner_tensors(runner), sizes, _no_capture, (0, 0))
        self.restorer = Restorer(self.directory, driver, self.framework, note=timeline.emit, adopt=self.adopt)
        if not self.restorer.link():
            for name in self._made:
                setattr(manager, name, None)
            raise Refused(self.restorer.fallbacks["*"])

    @staticmethod
    def _empty(torch: Any, like: Mapping[str, Any]) -> Any:
        return torch.empty(like["shape"], dtype=getattr(torch, like["dtype"]), device="cuda")

    def usable(self, key: str) -> bool:
        return self.restorer.holds(key)

    def replayable(self, key: str) -> Any:
        return self.restorer.graph(key)

    def output(self, key: str) -> Any:
        like = self.extras["outputs"].get(key)
        if like is None:
            raise Refused(f"{key}: its output is no single tensor of the pool")
        region, base = self.restorer.region(like["symbol"])
        return self.framework.view(region, base, like["offset"], like)

    def attributes(self) -> Mapping[str, Any]:
        return self._made
