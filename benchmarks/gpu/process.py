"""One process of the GPU check: a workload, a driver, a framework, and how times are taken."""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.workloads import CASES, Llama, Shape, Workload
from coldstart.graphs.api import Captured
from coldstart.graphs.cuda.backend import CudaDriver
from coldstart.graphs.cuda.cupti import ModuleWatch
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import GraphError
from coldstart.graphs.torch_framework import TorchFramework, consumes_random

SEED = 17


class Process:
    """A workload, a driver and a framework; capturing ones watch modules and record memory history."""

    def __init__(self, case: str, seed: int, layers: int, *, watch: bool = False) -> None:
        self.log, self.times, self.notes = ModuleLog(), dict[str, float](), dict[str, str]()
        if watch:
            self._watch_modules()
        torch.cuda.init()
        if watch:
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
        with self.timed("weights_s"):
            self.work: Any = make(case, seed, layers)
        self.driver: Any = CudaDriver(self.log)
        self.framework: Any = TorchFramework(
            self.driver,
            self.work.tensors(),
            self.work.keys(),
            self.work.capture,
            self.work.pool,
            self.trigger,
        )

    def _watch_modules(self) -> None:
        """Before the context exists, so that no module is missed."""
        try:
            self.watch = ModuleWatch(self.log)
        except GraphError as error:
            self.notes["cupti"] = str(error)

    def trigger(self) -> None:
        """Capture the first layer at every size, each after an eager run, and look at its kernels' modules."""
        for key in self.order():
            self.work.eager(key)
            graph = self.work.capture(key, whole=False)  # its raw graph is destroyed with it
            self.driver.see_functions(int(graph.raw_cuda_graph()))

    def timed(self, name: str) -> Timer:
        return Timer(self, name)

    def order(self) -> list[str]:
        """Largest first, as engines do."""
        return sorted(self.work.keys(), key=lambda key: -self.work.keys()[key])

    def capture_all(self) -> tuple[dict[str, Any], dict[str, Captured]]:
        """(kept CUDAGraphs, captures instantiated by the driver)."""
        with self.timed("warm_up_s"):
            for key in self.order():
                self.work.eager(key)
                self.driver.synchronize()
        gc.collect()
        gc.freeze()
        with self.timed("capture_s"):
            graphs = {key: self.work.capture(key) for key in self.order()}
        with self.timed("instantiate_s"):
            captured = {key: self.instantiate(graph) for key, graph in graphs.items()}
        return graphs, captured

    def instantiate(self, graph: Any) -> Captured:
        raw = int(graph.raw_cuda_graph())
        return Captured(raw, self.driver.instantiate(raw), [graph])

    def hashes(self, runs: dict[str, Callable[[], object]]) -> dict[str, str]:
        """Return hashes of outputs and KV cache after each run on the seeded input."""
        return {key: hashlib.sha256(self.observe(key, run)).hexdigest()[:16] for key, run in runs.items()}

    def observe(self, key: str, run: Callable[[], object]) -> bytes:
        self.work.prepare(key, SEED)
        run()
        self.driver.synchronize()
        data: bytes = self.work.observe(key)
        return data

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def latency(self, run: Callable[[], object], rounds: int = 30) -> float:
        """Median microseconds of one replay."""
        samples = []
        for _ in range(rounds + 5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(1e3 * start.elapsed_time(end))
        return statistics.median(samples[5:])

    def consumes_random(self, graph: Any) -> bool:
        return consumes_random(graph)

    def resize_a_region(self) -> None:
        """Make a named region another size, as another engine configuration would."""
        tensors = self.framework.tensors
        name = next(n for n in tensors if n.startswith("static:"))
        self.framework.tensors = {**tensors, name: torch.empty(3, device="cuda")}


class Timer:
    """Wall-clock seconds between two synchronisations."""

    def __init__(self, process: Process, name: str) -> None:
        self._process, self._name = process, name

    def _now(self) -> float:
        driver = getattr(self._process, "driver", None)
        if driver is not None:
            driver.synchronize()
        return time.perf_counter()

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._process.times[self._name] = self._now() - self._start


def make(case: str, seed: int, layers: int) -> Workload:
    """A workload by name; llama and matmul are the two attention paths."""
    if case in ("llama", "matmul"):
        return Llama(seed, Shape(layers=layers), "matmul" if case == "matmul" else "sdpa")
    return CASES[case](seed)


def three(keys: list[str]) -> list[str]:
    """Smallest, middle and largest."""
    return [keys[-1], keys[len(keys) // 2], keys[0]]
