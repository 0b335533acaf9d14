"""Restore graphs in a vLLM worker: in the last offline round, and in every start from a proven bundle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from coldstart.graphs import offline
from coldstart.graphs.cuda.driver import CudaDriver
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.inputs import Workload
from coldstart.graphs.prove import prove, read_proof, write
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import read_manifest
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import hooks
from coldstart.vllm.graphs.hooks import log, refuse_unsupported
from coldstart.vllm.graphs.names import runner_tensors
from coldstart.vllm.graphs.record import VLLM, keep_graphs, vllm_framework


def read_extras(directory: Path) -> Mapping[str, Any]:
    """Return the recorded form of the buffer of vLLM's graph manager, and the driver's version.

    Raises AlteredTableError, or GraphRefusedError for a bundle of another engine.
    """
    held = read_manifest(directory).report.get(VLLM)
    if not isinstance(held, dict) or "output" not in held:
        raise GraphRefusedError("the bundle was not recorded from vLLM")
    return held


def create_output(runner: Any, like: Mapping[str, Any]) -> None:
    """Create the buffer that a capture would have created on the manager; graphs write into it."""
    import torch

    buffer = torch.empty(like["shape"], dtype=getattr(torch, like["dtype"]), device="cuda")
    runner.cudagraph_manager.hidden_states = buffer


def create_workload(
    runner: Any, driver: CudaDriver, full: Mapping[str, Any], write: Callable[..., Any]
) -> Workload:
    """Return the inputs and outputs of the runner's graphs, given their descriptors; `write` writes vLLM's inputs of one."""
    tensors, output = runner_tensors(runner), runner.cudagraph_manager.hidden_states
    storages = {symbol: tensor.untyped_storage() for symbol, tensor in tensors.items()}
    spans = {symbol: (held.data_ptr(), held.nbytes()) for symbol, held in storages.items()}
    ids = {
        spans[symbol]: tensor.element_size()
        for symbol, tensor in tensors.items()
        if symbol.endswith("input_ids") and not tensor.is_floating_point()
    }
    first, row = output.untyped_storage().data_ptr(), output.nbytes // output.shape[0]
    return Workload(
        driver, lambda key: write(full[key], warmup=False),
        {key: (first, min(int(d.num_tokens), output.shape[0]) * row) for key, d in full.items()},
        [span for symbol, span in spans.items() if symbol.startswith("kv:")],
        list(ids.items()), int(runner.model_config.get_vocab_size()),
    )  # fmt: skip


class Proving:
    """Session that restores everything, lets vLLM capture everything, and compares."""

    def __init__(self, work: Path) -> None:
        self._work, self.fallbacks = work, dict[str, str]()

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Prove the graphs where vLLM captures them."""
        with ExitStack() as stack:
            try:
                refuse_unsupported(runner)
                stack.enter_context(hooks.hooked(runner, functools.partial(self._prove, runner)))
                stack.enter_context(keep_graphs())
            except GraphError as error:
                self._fail(error)
            return own()

    def _fail(self, error: GraphError) -> None:
        log.warning("cannot prove graphs: %s", error)
        offline.fail(self._work, str(error))

    def _prove(
        self, runner: Any, full: Mapping[str, Any], write_inputs: Callable[..., Any], own: Callable[[], None]
    ) -> None:
        """Prove the graphs. vLLM's capture runs when a captured graph is first needed, hence after the restore."""
        import torch

        capture = functools.cache(own)
        try:
            driver, bundle = CudaDriver(), self._work / offline.BUNDLE
            create_output(runner, read_extras(bundle)["output"])
            restorer = Restorer(bundle, driver, vllm_framework(driver, runner, capture))
            with torch.inference_mode():  # as vLLM's capture, whose function writes the inputs
                proof = prove(restorer, create_workload(runner, driver, full, write_inputs))
            write(proof, restorer.directory)
        except GraphError as error:
            self._fail(error)
        capture()


class Restoring:
    """Session of an online start."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fallbacks = {"*": "vLLM has captured no CUDA graph"}

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Restore the graphs and let vLLM capture the rest."""
        with ExitStack() as stack:
            try:
                refuse_unsupported(runner)
                self.fallbacks = {}
                instead = functools.partial(
                    hooks.capture_rest, runner.cudagraph_manager, self._restore(runner)
                )
                stack.enter_context(hooks.hooked(runner, instead))
            except GraphError as error:
                log.warning("vLLM captures its CUDA graphs: %s", error)
                self.fallbacks["*"] = str(error)
            return own()

    def _restore(self, runner: Any) -> dict[str, Replayable]:
        """Return the restored graphs.

        Another driver is refused: its data in graph nodes may change with each patch release.
        """
        read_proof(self.directory)
        extras, present = read_extras(self.directory), nvml.read_driver_version()
        if extras.get("driver") != present:
            raise GraphRefusedError(
                f"the graphs were recorded with driver {extras.get('driver')}, this machine has {present}"
            )
        driver = CudaDriver()
        create_output(runner, extras["output"])
        restorer = Restorer(self.directory, driver, vllm_framework(driver, runner))
        graphs = restorer.restore_all()
        self.fallbacks = restorer.fallbacks
        for key, reason in self.fallbacks.items():
            log.warning("%s is captured normally: %s", key, reason)
        if not graphs:
            runner.cudagraph_manager.hidden_states = None  # vLLM creates its own
        return graphs
