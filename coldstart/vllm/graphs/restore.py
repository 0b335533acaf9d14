"""Restore graphs in a vLLM worker, for verification in the last offline round and in every start from a verified bundle."""

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
from coldstart.vllm.graphs.hooks import check_runner, log
from coldstart.vllm.graphs.names import name_runner_tensors
from coldstart.vllm.graphs.record import VLLM, create_framework, keep_captured_graphs


def read_vllm_report(directory: Path) -> Mapping[str, Any]:
    """Return the report of the recording: the shape and type of the output buffer, and the driver version.

    Raises AlteredTableError if the manifest is invalid, and GraphRefusedError if the bundle was not recorded from vLLM.
    """
    held = read_manifest(directory).report.get(VLLM)
    if not isinstance(held, dict) or "output" not in held:
        raise GraphRefusedError("the graphs of this bundle were not recorded from vLLM")
    return held


def allocate_output(runner: Any, like: Mapping[str, Any]) -> None:
    """Allocate the manager's output buffer, which graphs write to, with the recorded shape and type."""
    import torch

    buffer = torch.empty(like["shape"], dtype=getattr(torch, like["dtype"]), device="cuda")
    runner.cudagraph_manager.hidden_states = buffer


def create_workload(
    runner: Any, driver: CudaDriver, descriptors: Mapping[str, Any], write: Callable[..., Any]
) -> Workload:
    """Return the inputs and outputs of the runner's graphs. `write` makes vLLM write the inputs of a descriptor."""
    tensors, output = name_runner_tensors(runner), runner.cudagraph_manager.hidden_states
    storages = {symbol: tensor.untyped_storage() for symbol, tensor in tensors.items()}
    spans = {symbol: (held.data_ptr(), held.nbytes()) for symbol, held in storages.items()}
    ids = {
        spans[symbol]: tensor.element_size()
        for symbol, tensor in tensors.items()
        if symbol.endswith("input_ids") and not tensor.is_floating_point()
    }
    first, row = output.untyped_storage().data_ptr(), output.nbytes // output.shape[0]
    return Workload(
        driver, lambda key: write(descriptors[key], warmup=False),
        {key: (first, min(int(d.num_tokens), output.shape[0]) * row) for key, d in descriptors.items()},
        [span for symbol, span in spans.items() if symbol.startswith("kv:")],
        list(ids.items()), int(runner.model_config.get_vocab_size()),
    )  # fmt: skip


class ProvingSession:
    """Capture session that restores all graphs, lets vLLM capture all graphs, and compares the outputs of both."""

    def __init__(self, work: Path) -> None:
        self._work, self.fallbacks = work, dict[str, str]()

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Verify the graphs at the point where vLLM captures them."""
        with ExitStack() as stack:
            try:
                check_runner(runner)
                stack.enter_context(hooks.replace_capture(runner, functools.partial(self._prove, runner)))
                stack.enter_context(keep_captured_graphs())
            except GraphError as error:
                self._fail(error)
            return own()

    def _fail(self, error: GraphError) -> None:
        log.warning("cannot verify graphs: %s", error)
        offline.fail(self._work, str(error))

    def _prove(
        self, runner: Any, full: Mapping[str, Any], write_inputs: Callable[..., Any], own: Callable[[], None]
    ) -> None:
        """Verify the graphs. vLLM's capture runs when a captured graph is first needed, which is after the restore."""
        import torch

        capture = functools.cache(own)
        try:
            driver, bundle = CudaDriver(), self._work / offline.BUNDLE
            allocate_output(runner, read_vllm_report(bundle)["output"])
            restorer = Restorer(bundle, driver, create_framework(driver, runner, capture))
            with torch.inference_mode():  # as in vLLM's capture, whose function writes the inputs
                proof = prove(restorer, create_workload(runner, driver, full, write_inputs))
            write(proof, restorer.directory)
        except GraphError as error:
            self._fail(error)
        capture()


class RestoringSession:
    """Capture session that restores the graphs in a bundle when a server starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fallbacks = {"*": "vLLM did not capture any CUDA graph"}

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Restore the graphs, and run vLLM's own capture for all graphs that were not restored."""
        with ExitStack() as stack:
            try:
                check_runner(runner)
                self.fallbacks = {}
                instead = functools.partial(
                    hooks.capture_unrestored, runner.cudagraph_manager, self._restore(runner)
                )
                stack.enter_context(hooks.replace_capture(runner, instead))
            except GraphError as error:
                log.warning("vLLM captures its CUDA graphs: %s", error)
                self.fallbacks["*"] = str(error)
            return own()

    def _restore(self, runner: Any) -> dict[str, Replayable]:
        """Return the restored graphs by key.

        Graphs of another driver version are refused, because any patch release can change the driver data in nodes.
        """
        read_proof(self.directory)
        extras, present = read_vllm_report(self.directory), nvml.read_driver_version()
        if extras.get("driver") != present:
            raise GraphRefusedError(
                f"the graphs were recorded with driver {extras.get('driver')}, but this machine has {present}"
            )
        driver = CudaDriver()
        allocate_output(runner, extras["output"])
        restorer = Restorer(self.directory, driver, create_framework(driver, runner))
        graphs = restorer.restore_all()
        self.fallbacks = restorer.fallbacks
        for key, reason in self.fallbacks.items():
            log.warning("%s is captured normally: %s", key, reason)
        if not graphs:
            runner.cudagraph_manager.hidden_states = None  # vLLM creates its own
        return graphs
