"""Restore graphs in a vLLM worker: in the last offline round, and in every start from a proven bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coldstart.contract.plan import CANARY_BATCH
from coldstart.graphs import gate, rounds
from coldstart.graphs.cuda.backend import CudaDriver
from coldstart.graphs.errors import AlteredTableError, GraphError, GraphRefusedError
from coldstart.graphs.inputs import Inputs, Span, StoredInputs, View, finder, make_reader
from coldstart.graphs.online import Online
from coldstart.graphs.restore import Restorer
from coldstart.graphs.table_files import read_manifest
from coldstart.graphs.tables import SymbolRegion
from coldstart.graphs.torch_framework import TorchFramework
from coldstart.system import timeline
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import hook, outputs
from coldstart.vllm.graphs.graph_source import log, refuse_unsupported
from coldstart.vllm.graphs.names import runner_tensors
from coldstart.vllm.graphs.record import captured_graphs, keep_graphs, vllm_framework


def workload(
    driver: CudaDriver, framework: TorchFramework, restorer: Restorer, captured: View | None
) -> StoredInputs:
    """Return the bundle's stored inputs in this process's memory. Raises AlteredTableError."""

    def restored(symbol: str) -> SymbolRegion:
        region, base = restorer.region(symbol)
        return SymbolRegion(symbol, region.size, base)

    held = Inputs.parse_report(read_manifest(restorer.directory)["report"])
    read = make_reader(restorer.directory)
    return StoredInputs(driver, held, read, finder(framework.regions), captured, View(restored))


def extras(directory: Path) -> Mapping[str, Any]:
    """Return the recorded attributes and outputs of vLLM's graph manager.

    Raises AlteredTableError, or GraphRefusedError for a bundle of another engine.
    """
    held = read_manifest(directory)["report"].get(outputs.ENTRY)
    if not isinstance(held, dict) or not {"attributes", "outputs"} <= set(held):
        raise GraphRefusedError("the bundle was not recorded from vLLM")
    return held


def make_attributes(runner: Any, wanted: Mapping[str, outputs.Like]) -> dict[str, Any]:
    """Create the buffers that a capture would have created on the manager; graphs write into them."""
    import torch

    manager, values = getattr(runner, "cudagraph_manager", None), dict[str, Any]()
    for name, like in wanted.items():
        tensor = torch.empty(like["shape"], dtype=getattr(torch, like["dtype"]), device="cuda")
        attribute, _, number = name.partition(".")
        if number:
            values.setdefault(attribute, []).append(tensor)
        else:
            values[attribute] = tensor
    for name, value in values.items():
        setattr(manager, name, value)
    return values


def remove_attributes(runner: Any, values: Mapping[str, Any]) -> None:
    """Reset the manager's buffers, so that vLLM creates its own."""
    for name, value in values.items():
        setattr(runner.cudagraph_manager, name, [] if isinstance(value, list) else None)


class Proving:
    """Session that restores everything, lets vLLM capture everything, and compares."""

    def __init__(self, work: Path) -> None:
        self._work, self.extras = work, extras(work / rounds.BUNDLE)
        self._known: dict[str, list[Span]] = {}

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
            rounds.fail(self._work, str(error))
            return own()

    def _prove(self, runner: Any, own: Callable[[], Any]) -> Any:
        driver, graphs, result = CudaDriver(), dict[str, Any](), list[Any]()
        make_attributes(runner, self.extras["attributes"])

        def capture(key: str) -> Any:
            if not result:
                with keep_graphs():
                    result.append(own())
                graphs.update(captured_graphs(runner))
                self._look(graphs)
            if key not in graphs:
                raise GraphRefusedError(f"vLLM did not capture {key} in this process")
            return graphs[key][1]

        framework = TorchFramework(driver, runner_tensors(runner), {}, capture, (0, 0))
        view = View(finder(framework.regions), self._known)
        rounds.prove(self._work, driver, framework, lambda r: workload(driver, framework, r, view))
        return result[0] if result else own()

    def _look(self, graphs: Mapping[str, tuple[Any, Any, Any]]) -> None:
        """Record where the graphs captured here have their outputs."""
        known_spans = {key: outputs.spans(output) for key, (_, _, output) in graphs.items()}
        self._known.update({key: spans for key, spans in known_spans.items() if spans is not None})


class Restoring:
    """Session of an online start; also the hook's GraphSource."""

    def __init__(self, directory: Path, *, canary: str = "1") -> None:
        self.directory, self._canary = directory, canary
        self.proof, self.extras = gate.read_proof(directory), extras(directory)
        self._declined: dict[str, str] = {}
        self.online: Online | None = None

    def fallbacks(self) -> dict[str, str]:
        return self._declined | (dict(self.online.fallbacks) if self.online else {})

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Link and hook, let vLLM capture the rest, then build the remaining graphs in the background."""
        try:
            refuse_unsupported(runner)
            self._refuse_another_driver()
            online = self._begin(runner)
            undo = hook.install(runner, self, log.warning)
        except GraphError as error:
            log.warning("vLLM captures its CUDA graphs: %s", error)
            self._declined["*"] = str(error)
            return own()
        try:
            result = own()
        finally:
            undo()
        online.build_deferred()
        return result

    def _refuse_another_driver(self) -> None:
        """Raise GraphRefusedError for another driver: its data in graph nodes may change with each patch release."""
        wanted, present = self.extras.get("driver"), nvml.driver()
        if wanted != present:
            raise GraphRefusedError(
                f"the graphs were recorded with driver {wanted}, this machine has {present}"
            )

    def _begin(self, runner: Any) -> Online:
        driver = CudaDriver()
        self._made = make_attributes(runner, self.extras["attributes"])
        self.framework = vllm_framework(driver, runner, {}, (0, 0))
        restorer = Restorer(
            self.directory, driver, self.framework, note=timeline.emit, adopt=self.proof.adopt,
            settled=self.proof.settled,
        )  # fmt: skip
        wanted = workload(driver, self.framework, restorer, None) if self._canary != "0" else None
        online = self.online = Online(
            restorer, self.proof, wanted, every=self._canary == "all", batch=CANARY_BATCH
        )
        if not online.begin():
            remove_attributes(runner, self._made)
            raise GraphRefusedError(online.fallbacks["*"])
        return online

    # --- GraphSource, for the hook --------------------------------------------------------------------
    def _online(self) -> Online:
        if self.online is None:
            raise GraphRefusedError("the graphs of the bundle are not linked in this process")
        return self.online

    def usable(self, key: str) -> bool:
        return self._online().restorer.holds(key)

    def is_first(self, key: str) -> bool:
        return self._online().is_first(key)

    def defer(self, key: str, show: Callable[[], None]) -> None:
        self._online().defer(key, show)

    def replayable(self, key: str) -> Any:
        graph = self._online().restorer.graph_or_none(key)
        if graph is None:
            raise GraphRefusedError(self._online().fallbacks[key])
        return graph

    def output(self, key: str) -> Any:
        return outputs.view(self.extras["outputs"].get(key), self._tensor)

    def _tensor(self, like: outputs.Like) -> Any:
        region, base = self._online().restorer.region(like["symbol"])
        try:
            return self.framework.view(region, base, like["offset"], like)
        except (KeyError, AttributeError, RuntimeError) as error:
            raise AlteredTableError(f"invalid description of an output: {error}") from error

    def attributes(self) -> Mapping[str, Any]:
        return self._made
