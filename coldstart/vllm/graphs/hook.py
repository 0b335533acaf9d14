"""Hook vLLM's graph capture from a `vllm.general_plugins` entry point.

With a source bound, a model runner gets restored full graphs and skips the warm-up and capture of exactly those
batch descriptors. All other descriptors and managers are captured as usual. A graph that is still being
built is hidden from vLLM's dispatch, which then runs such a batch without a full graph; once built it is shown. vLLM
only calls .replay() on the stored graphs. The vLLM integration points are checked first; if one is missing, nothing is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from coldstart.graphs.errors import GraphRefusedError
from coldstart.vllm import compat
from coldstart.vllm.graphs import manager, wrapper
from coldstart.vllm.graphs.graph_source import GraphSource, Log


def require() -> None:
    """Raise GraphRefusedError if graphs were not checked for this vLLM; imports nothing of vLLM."""
    if reason := compat.check("graphs"):
        raise GraphRefusedError(reason)


def install(runner: Any, source: GraphSource, log: Log) -> Callable[[], None]:
    """Patch both runner classes for this runner, and return the undo. Raises GraphRefusedError, having patched nothing."""
    require()
    return _patched(
        manager=lambda original: manager.restoring(original, runner, source, log),
        runner=lambda original: wrapper.restoring(original, runner, source, log),
    )


def watch(runner: Any, seen: Callable[[str], None]) -> Callable[[], None]:
    """Call `seen` with a full graph's key when its inputs are ready. Return the undo. Raises GraphRefusedError."""
    require()
    return _patched(
        manager=lambda original: manager.watched_capture(original, runner, seen),
        runner=lambda original: wrapper.watched_capture(original, runner, seen),
    )


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _patched(**wraps: Wrap) -> Callable[[], None]:
    try:
        places = _places()
        saved = {name: getattr(*place) for name, place in places.items()}
    except AttributeError as error:
        raise GraphRefusedError(f"vLLM lacks an integration point of graphs: {error}") from error
    for name, place in places.items():
        setattr(*place, wraps[name](saved[name]))

    def undo() -> None:
        for name, original in saved.items():
            setattr(*places[name], original)

    return undo


def _places() -> dict[str, tuple[type, str]]:
    """Return the attributes to patch, for the imported runner modules. A runner that is not imported needs no patch."""
    places: dict[str, tuple[type, str]] = {}
    if module := sys.modules.get("vllm.v1.worker.gpu.cudagraph_utils"):
        places["manager"] = (module.CudaGraphManager, "capture")
    if module := sys.modules.get("vllm.v1.worker.gpu_model_runner"):
        places["runner"] = (module.GPUModelRunner, "_warmup_and_capture")
    return places
