"""Record graphs in a vLLM worker: vLLM captures, and the graphs, their inputs and their outputs are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coldstart.graphs import live, rounds
from coldstart.graphs.cuda.backend import CudaDriver
from coldstart.graphs.cuda.cupti import ModuleWatch
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.inputs import ENTRY, InputLog, Inputs, Place, StoredInputs, View, finder
from coldstart.graphs.tables import SymbolRegion
from coldstart.graphs.torch_framework import TorchFramework, consumes_random, define_kept_class
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import hook, outputs
from coldstart.vllm.graphs.graph_source import graph_key, log, refuse_unsupported
from coldstart.vllm.graphs.names import runner_tensors
from coldstart.vllm.graphs.outputs import Like

FULL = "FULL"
SMALL = 1 << 20
MANAGER = "static:cudagraph_manager."
OUTPUTS = (f"{MANAGER}hidden_states", f"{MANAGER}aux_hidden_states.")
PADDING = (1 << 21, 1 << 26)


class GraphRecording:
    """Offline round; `directory` is the work directory of rounds.py."""

    def __init__(self, directory: Path) -> None:
        self._work, self.modules = directory, ModuleLog()
        self._padding: list[Any] = []
        try:
            self._watch = ModuleWatch(self.modules)
        except GraphError as error:
            log.warning("kernels are recorded by name, without their binaries: %s", error)
        self.inputs: InputLog | None = None
        self._named: dict[str, set[str]] = {}

    def fallbacks(self) -> dict[str, str]:
        """Return nothing: a recording restores no graph."""
        return {}

    def prepare_load(self) -> None:
        """Allocate random sizes first, so that no two processes have the same memory layout."""
        import torch

        rng = random.SystemRandom()
        sizes = [rng.randrange(*PADDING) for _ in range(rng.randrange(3, 12))]
        self._padding = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Capture with kept graphs, then write this process's layout."""
        import torch

        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
        driver = CudaDriver(self.modules)
        self.inputs = InputLog(driver)
        # An error of the first layout is reported where the layouts are combined.
        with suppress(GraphError):
            self._named = rounds.first_symbols(self._work)
        undo = hook.watch(runner, lambda key: self._remember(runner, key))
        try:
            with keep_graphs():
                result = own()
        finally:
            undo()
        try:
            refuse_unsupported(runner)
            self._watch_steps(runner, self._save(runner, driver, self.inputs))
        except GraphError as error:
            log.warning("cannot record graphs: %s", error)
            rounds.fail(self._work, str(error))
        return result

    def _remember(self, runner: Any, key: str) -> None:
        tensors = runner_tensors(runner)
        spans = tensor_spans(input_tensors(tensors).values(), tensors)
        if self.inputs is not None:
            self.inputs.remember(key, [r for r in spans if r.symbol in self._named.get(key, ())])

    def _watch_steps(self, runner: Any, watch: live.ContentWatch) -> None:
        """Compare unnamed memory after each step that this engine takes from now on."""
        own = runner.execute_model

        def execute_model(*arguments: Any, **keywords: Any) -> Any:
            result = own(*arguments, **keywords)
            try:
                watch.look()
                watch.save(self._work)
            except GraphError as error:
                rounds.fail(self._work, f"cannot read unnamed memory between steps: {error}")
            return result

        runner.execute_model = execute_model

    def _save(self, runner: Any, driver: CudaDriver, inputs: InputLog) -> live.ContentWatch:
        graphs = captured_graphs(runner)
        framework = vllm_framework(driver, runner, graphs, _pool(runner))
        captured = {key: framework.capture(key) for key in graphs}
        pool = framework.pool()
        likes = {key: outputs.describe(output, pool) for key, (_, _, output) in graphs.items()}
        attributes = manager_attributes(runner)
        held = Inputs(
            token_regions(runner), [r.symbol for r in framework.regions() if r.symbol.startswith("kv:")],
            inputs.static,
            {key: places(likes[key], attributes, int(d.num_tokens)) for key, (d, _, _) in graphs.items()},
        )  # fmt: skip
        here = finder(framework.regions, framework.pool)
        workload = StoredInputs(driver, held, inputs.held.__getitem__, here, View(here), None)
        if self._named:
            refuse_random(framework, workload, graphs)
        vllm = {"attributes": attributes, "outputs": likes, "driver": nvml.driver()}
        report = {ENTRY: held.document(), outputs.ENTRY: vllm}
        return rounds.record(self._work, driver, framework, captured, workload, inputs, report)


def refuse_random(
    framework: TorchFramework, workload: StoredInputs, graphs: dict[str, tuple[Any, Any, Any]]
) -> None:
    """Refuse the graphs that consume random numbers.

    Each is replayed on its own inputs: with those of another size, attention reads outside its memory.
    """
    for key, (_, graph, _) in graphs.items():
        workload.prepare(key, 0)
        if consumes_random(graph):
            framework.refusals[key] = "the graph consumes random numbers"


def captured_graphs(runner: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Return key to (descriptor, graph, output) of every full graph of either runner; pieces stay with vLLM."""
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is not None:
        return {graph_key(d, FULL): (d, g, None) for d, g in manager.graphs.items() if d.cg_mode.name == FULL}
    entries = getattr(runner.model, "concrete_cudagraph_entries", {})
    kept = {d: e for d, e in entries.items() if e.cudagraph is not None}
    return {graph_key(d, FULL): (d, e.cudagraph, e.output) for d, e in kept.items()}


def vllm_framework(
    driver: CudaDriver, runner: Any, graphs: dict[str, tuple[Any, Any, Any]], pool: tuple[int, int]
) -> TorchFramework:
    """Return the runner's memory by name, with vLLM's graphs as captures."""

    def captured(key: str) -> Any:
        if key not in graphs:
            raise GraphRefusedError(f"{key} is captured by vLLM itself")
        return graphs[key][1]

    sizes = {key: int(d.num_tokens) for key, (d, _, _) in graphs.items()}
    return TorchFramework(driver, runner_tensors(runner), sizes, captured, pool)


def _pool(runner: Any) -> tuple[int, int]:
    manager = getattr(runner, "cudagraph_manager", None)
    pool: tuple[int, int] = manager.pool if manager is not None else runner.model.graph_pool
    return pool


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

    The buffers that graphs write their outputs to affect no graph.
    """
    static = {s: t for s, t in tensors.items() if s.startswith("static:") and not s.startswith(OUTPUTS)}
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


def manager_attributes(runner: Any) -> dict[str, Like]:
    """Return the buffers that a capture creates on the manager, which a restore must create first.

    The buffers in a list have the name of the list and their index.
    """
    manager = getattr(runner, "cudagraph_manager", None)
    hidden = getattr(manager, "hidden_states", None)
    buffers = {} if hidden is None else {"hidden_states": hidden}
    auxiliary = getattr(manager, "aux_hidden_states", None) or []
    buffers |= {f"aux_hidden_states.{number}": buffer for number, buffer in enumerate(auxiliary)}
    return {
        name: {"shape": list(b.shape), "dtype": str(b.dtype).removeprefix("torch.")}
        for name, b in buffers.items()
    }


def places(like: Any, attributes: dict[str, Like], rows: int) -> list[Place]:
    """Return the places of a graph's outputs: in the pool, or the first `rows` rows of the manager's buffers.

    The manager's buffers have the rows of the largest graph. A graph writes only as many rows as it has tokens.
    """
    if like is None:
        return [(MANAGER + name, 0, outputs.size(outputs.first(a, rows))) for name, a in attributes.items()]
    return [(one["symbol"], one["offset"], outputs.size(one)) for one in outputs.leaves(like)]
