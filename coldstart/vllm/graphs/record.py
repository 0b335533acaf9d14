"""Record graphs in a vLLM worker: vLLM captures, and the graphs, their inputs and their outputs are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coldstart.graphs import offline
from coldstart.graphs.cuda.driver import CudaDriver
from coldstart.graphs.cuda.modules import ModuleLog, ModuleWatch
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.inputs import ENTRY, InputLog, Inputs, Place, StoredInputs, finder
from coldstart.graphs.tables import SymbolRegion
from coldstart.graphs.torch_framework import TorchFramework, consumes_random, define_kept_class
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import hooks
from coldstart.vllm.graphs.hooks import graph_key, is_full, log, refuse_unsupported
from coldstart.vllm.graphs.names import runner_tensors

SMALL = 1 << 20
VLLM = "vllm"  # entry of the report
OUTPUT = "static:cudagraph_manager.hidden_states"
PADDING = (1 << 21, 1 << 26)


class GraphRecording:
    """Offline round; `directory` is the work directory of offline.py."""

    def __init__(self, directory: Path) -> None:
        self._work, self.modules = directory, ModuleLog()
        self._padding: list[Any] = []
        try:
            self._watch = ModuleWatch(self.modules)
        except GraphError as error:
            log.warning(
                "no graph can be recorded, because the binaries of the kernels are unknown: %s", error
            )
        self.inputs: InputLog | None = None
        self._named: dict[str, set[str]] = {}

    def prepare_load(self) -> None:
        """Number all allocations from here on; allocate random sizes first, so that no two processes have the same layout."""
        import torch

        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)
        rng = random.SystemRandom()
        sizes = [rng.randrange(*PADDING) for _ in range(rng.randrange(3, 12))]
        self._padding = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Capture with kept graphs, then write this process's layout."""
        driver = CudaDriver(self.modules)
        self.inputs = InputLog(driver)
        # An error of the first layout is reported where the layouts are combined.
        with suppress(GraphError):
            self._named = offline.find_possible_symbols(self._work)
        with hooks.hooked(runner, seen=lambda key: self._remember(runner, key)), keep_graphs():
            result = own()
        try:
            refuse_unsupported(runner)
            self._watch_steps(runner, self._save(runner, driver, self.inputs))
        except GraphError as error:
            log.warning("cannot record graphs: %s", error)
            offline.fail(self._work, str(error))
        return result

    def _remember(self, runner: Any, key: str) -> None:
        tensors = runner_tensors(runner)
        spans = tensor_spans(input_tensors(tensors).values(), tensors)
        if self.inputs is not None:
            self.inputs.remember(key, [r for r in spans if r.symbol in self._named.get(key, ())])

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

    def _save(self, runner: Any, driver: CudaDriver, inputs: InputLog) -> offline.ContentWatch:
        graphs = captured_graphs(runner)
        framework = vllm_framework(driver, runner)
        captured = {key: framework.capture(key) for key in graphs}
        output = runner.cudagraph_manager.hidden_states
        held = Inputs(
            token_regions(runner), [r.symbol for r in framework.regions() if r.symbol.startswith("kv:")], inputs.static,
            {key: places(output, int(d.num_tokens)) for key, (d, _) in graphs.items()},
        )  # fmt: skip
        if self._named:
            workload = StoredInputs(driver, held, inputs.held.__getitem__, finder(framework.regions))
            refuse_random(framework, workload, graphs)
        # A restore must create this buffer, which a capture creates.
        like = {"shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}
        report = {ENTRY: asdict(held), VLLM: {"output": like, "driver": nvml.driver()}}
        return offline.record(self._work, driver, framework, captured, inputs, report)


def refuse_random(
    framework: TorchFramework, workload: StoredInputs, graphs: Mapping[str, tuple[Any, Any]]
) -> None:
    """Refuse the graphs that consume random numbers.

    Each is replayed on its own inputs: with those of another size, attention reads outside its memory.
    """
    for key, (_, graph) in graphs.items():
        workload.prepare(key, 0)
        if consumes_random(graph):
            framework.refusals[key] = "the graph consumes random numbers"


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


def input_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the static buffers that affect a graph: all that may contain indices, and other small ones.

    The buffer that graphs write their outputs to affects no graph.
    """
    static = {s: t for s, t in tensors.items() if s.startswith("static:") and s != OUTPUT}
    return {symbol: t for symbol, t in static.items() if not t.is_floating_point() or t.nbytes <= SMALL}


def tensor_spans(wanted: Iterable[Any], tensors: dict[str, Any]) -> list[SymbolRegion]:
    """Return the complete storage of each wanted tensor, once.

    Of the symbols in `tensors` that share a storage, relocations use the first in alphabetical order.
    """
    symbols = {t.untyped_storage().data_ptr(): s for s, t in sorted(tensors.items(), reverse=True)}
    storages = {held.data_ptr(): held for held in (t.untyped_storage() for t in wanted)}
    return [
        SymbolRegion(symbols[base], int(held.nbytes()), base)
        for base, held in storages.items()
        if held.nbytes()
    ]


def token_regions(runner: Any) -> dict[str, tuple[int, int]]:
    """Return buffers of token ids by symbol: bytes per id, and the exclusive upper limit of ids."""
    below = int(runner.model_config.get_vocab_size())
    tensors = runner_tensors(runner)
    ids = [t for s, t in input_tensors(tensors).items() if s.endswith("input_ids")]
    width = {t.untyped_storage().data_ptr(): t.element_size() for t in ids}
    return {r.symbol: (width[r.base], below) for r in tensor_spans(ids, tensors)}


def places(output: Any, rows: int) -> list[Place]:
    """Return the place of a graph's outputs: the first `rows` rows of a buffer that has the rows of the largest graph."""
    return [(OUTPUT, 0, min(rows, output.shape[0]) * (output.nbytes // output.shape[0]))]
