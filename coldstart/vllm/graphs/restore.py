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
from coldstart.graphs.prove import read_proof, restore_proven
from coldstart.graphs.restore import Replayable, Restorer
from coldstart.graphs.tables import read_manifest
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import hooks
from coldstart.vllm.graphs.hooks import log, refuse_unsupported
from coldstart.vllm.graphs.record import VLLM, Like, keep_graphs, vllm_framework


def read_extras(directory: Path) -> Mapping[str, Any]:
    """Return the recorded attributes of vLLM's graph manager and the driver's version.

    Raises AlteredTableError, or GraphRefusedError for a bundle of another engine.
    """
    held = read_manifest(directory).report.get(VLLM)
    if not isinstance(held, dict) or "attributes" not in held:
        raise GraphRefusedError("the bundle was not recorded from vLLM")
    return held


def make_attributes(runner: Any, wanted: Mapping[str, Like]) -> dict[str, Any]:
    """Create the buffers that a capture would have created on the manager; graphs write into them."""
    import torch

    values = dict[str, Any]()
    for name, like in wanted.items():
        tensor = torch.empty(like["shape"], dtype=getattr(torch, like["dtype"]), device="cuda")
        attribute, _, number = name.partition(".")
        if number:
            values.setdefault(attribute, []).append(tensor)
        else:
            values[attribute] = tensor
    for name, value in values.items():
        setattr(runner.cudagraph_manager, name, value)
    return values


def remove_attributes(runner: Any, values: Mapping[str, Any]) -> None:
    """Reset the manager's buffers, so that vLLM creates its own."""
    for name, value in values.items():
        setattr(runner.cudagraph_manager, name, [] if isinstance(value, list) else None)


class Proving:
    """Session that restores everything, lets vLLM capture everything, and compares."""

    def __init__(self, work: Path) -> None:
        self._work, self.extras = work, read_extras(work / offline.BUNDLE)

    def fallbacks(self) -> dict[str, str]:
        """Return nothing: this process does not serve."""
        return {}

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
        make_attributes(runner, self.extras["attributes"])

        def capture() -> None:
            if not result:
                with keep_graphs():
                    result.append(own())

        restorer = Restorer(self._work / offline.BUNDLE, driver, vllm_framework(driver, runner, capture))
        offline.prove_bundle(restorer, open_inputs(restorer))
        return result[0] if result else own()


class Restoring:
    """Session of an online start."""

    def __init__(self, directory: Path, *, canary: str = "1") -> None:
        self.directory, self._canary = directory, canary
        self.proof, self.extras = read_proof(directory), read_extras(directory)
        self._fallbacks: dict[str, str] = {}

    def fallbacks(self) -> dict[str, str]:
        return dict(self._fallbacks)

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Restore the graphs and let vLLM capture the rest."""
        with ExitStack() as stack:
            try:
                refuse_unsupported(runner)
                self._refuse_another_driver()
                stack.enter_context(hooks.hooked(runner, self._restore(runner)))
            except GraphError as error:
                log.warning("vLLM captures its CUDA graphs: %s", error)
                self._fallbacks["*"] = str(error)
            return own()

    def _refuse_another_driver(self) -> None:
        """Raise GraphRefusedError for another driver: its data in graph nodes may change with each patch release."""
        wanted, present = self.extras.get("driver"), nvml.driver()
        if wanted != present:
            raise GraphRefusedError(
                f"the graphs were recorded with driver {wanted}, this machine has {present}"
            )

    def _restore(self, runner: Any) -> dict[str, Replayable]:
        driver, made = CudaDriver(), make_attributes(runner, self.extras["attributes"])
        restorer = Restorer(self.directory, driver, vllm_framework(driver, runner))
        graphs = restore_proven(restorer, self.proof, open_inputs(restorer), every=self._canary == "all")
        self._fallbacks = restorer.fallbacks
        for key, reason in self._fallbacks.items():
            log.warning("%s is captured normally: %s", key, reason)
        if not graphs:
            remove_attributes(runner, made)
        return graphs
