"""Restore graphs in a vLLM worker: in the last offline round, and in every start from a proven bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from coldstart.graphs import offline
from coldstart.graphs.cuda.driver import CudaDriver
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.inputs import open_inputs
from coldstart.graphs.prove import prove, read_proof, restore_proven, write
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import read_manifest
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import hooks
from coldstart.vllm.graphs.hooks import log, refuse_unsupported
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


class Proving:
    """Session that restores everything, lets vLLM capture everything, and compares."""

    def __init__(self, work: Path) -> None:
        self._work, self.extras = work, read_extras(work / offline.BUNDLE)

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Prove the graphs. vLLM's capture runs when a captured graph is first needed, hence after the restore."""
        try:
            refuse_unsupported(runner)
            return self._prove(runner, own)
        except GraphError as error:
            log.warning("cannot prove graphs: %s", error)
            offline.fail(self._work, str(error))
            return own()

    def _prove(self, runner: Any, own: Callable[[], Any]) -> Any:
        driver, result = CudaDriver(), list[Any]()
        create_output(runner, self.extras["output"])

        def capture() -> None:
            if not result:
                with keep_graphs():
                    result.append(own())

        restorer = Restorer(self._work / offline.BUNDLE, driver, vllm_framework(driver, runner, capture))
        write(prove(restorer, open_inputs(restorer)), restorer.directory)
        return result[0] if result else own()


class Restoring:
    """Session of an online start."""

    def __init__(self, directory: Path, *, canary: str = "1") -> None:
        self.directory, self._canary = directory, canary
        self.proof, self.extras = read_proof(directory), read_extras(directory)
        self.fallbacks: dict[str, str] = {}

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Restore the graphs and let vLLM capture the rest."""
        with ExitStack() as stack:
            try:
                refuse_unsupported(runner)
                self._refuse_another_driver()
                stack.enter_context(hooks.hooked(runner, self._restore(runner)))
            except GraphError as error:
                log.warning("vLLM captures its CUDA graphs: %s", error)
                self.fallbacks["*"] = str(error)
            return own()

    def _refuse_another_driver(self) -> None:
        """Raise GraphRefusedError for another driver: its data in graph nodes may change with each patch release."""
        wanted, present = self.extras.get("driver"), nvml.driver()
        if wanted != present:
            raise GraphRefusedError(
                f"the graphs were recorded with driver {wanted}, this machine has {present}"
            )

    def _restore(self, runner: Any) -> dict[str, Replayable]:
        driver = CudaDriver()
        create_output(runner, self.extras["output"])
        restorer = Restorer(self.directory, driver, vllm_framework(driver, runner))
        graphs = restore_proven(restorer, self.proof, open_inputs(restorer), every=self._canary == "all")
        self.fallbacks = restorer.fallbacks
        for key, reason in self.fallbacks.items():
            log.warning("%s is captured normally: %s", key, reason)
        if not graphs:
            runner.cudagraph_manager.hidden_states = None  # vLLM creates its own
        return graphs
