"""Postpone Python garbage collections while an engine starts.

vLLM collects garbage about ten times while an engine starts, and when it ends. Each collection scans all objects in the
process, and finds almost no garbage. With this module, one collection runs when the engine is warm, and then the surviving
objects are frozen, as in vLLM. One more runs before vLLM profiles GPU memory, because garbage can occupy GPU memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from coldstart.vllm import late

CORE, WORKER = "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"
_OWN = {name: getattr(gc, name) for name in ("collect", "freeze", "unfreeze")}


def postpone_in_children() -> None:
    """Postpone garbage collections in engines that this process forks while its own garbage collector is disabled."""
    os.register_at_fork(after_in_child=_postpone_if_starting if _hook_core() else gc.enable)


def postpone_in_process() -> None:
    """Postpone garbage collections for an engine that will start in this process."""
    if _hook_core():
        gc.freeze()
        postpone_collections()


def postpone_collections() -> None:
    """Disable all garbage collections in this process, including explicit ones, until `resume_collections`."""
    gc.disable()
    for name in _OWN:
        setattr(gc, name, _skip)


def _postpone_if_starting() -> None:
    # The hook cannot be removed, but processes that a warm server or engine forks later collect as usual.
    if not gc.isenabled():
        postpone_collections()


def resume_collections() -> None:
    """If garbage collections are postponed, collect once, freeze the surviving objects, and enable the garbage collector."""
    if _is_postponed():
        _restore()
        gc.collect()
        gc.freeze()
        gc.enable()


@contextmanager
def skip_collections() -> Iterator[None]:
    """Skip all garbage collections, and leave frozen objects frozen, while this block runs in a warm engine."""
    was_enabled = gc.isenabled()
    postpone_collections()
    try:
        yield
    finally:
        _restore()
        if was_enabled:
            gc.enable()


def _hook_core() -> bool:
    """Make vLLM's engine resume collections when it is warm. Return False if the installed vLLM has no hook for that."""
    core = import_module(CORE)
    if (freeze := getattr(core, "freeze_gc_heap", None)) is None:
        return False
    core.freeze_gc_heap = _resuming(freeze)  # type: ignore[attr-defined]
    _hook_end(core.EngineCoreProc)
    late.run_when_imported(WORKER, _hook_worker, lambda _: resume_collections())
    return True


def _hook_end(process: Any) -> None:
    # A collection writes to all objects, so a process that ends would copy every page that it shares with its template.
    shut_down = process.shutdown

    def shut_down_without_collection(engine: Any) -> None:
        postpone_collections()
        shut_down(engine)

    process.shutdown = shut_down_without_collection


def _hook_worker(module: Any) -> None:
    # With several ranks, each worker has its own process.
    module.freeze_gc_heap = _resuming(module.freeze_gc_heap)
    module.memory_profiling = _collecting(module.memory_profiling)
    _hook_end(module.Worker)


def _resuming(freeze: Callable[[], None]) -> Callable[[], None]:
    def resume_or_freeze() -> None:
        if _is_postponed():
            resume_collections()
        else:
            freeze()

    return resume_or_freeze


def _collecting(profile: Callable[..., Any]) -> Callable[..., Any]:
    def collect_and_profile(*arguments: Any, **keywords: Any) -> Any:
        """Collect once before the profile, although vLLM also collects after it.

        Garbage of the profiled run is part of the run's peak, which vLLM subtracts anyway. The weights are loaded by now:
        frozen, they are not scanned again. Without a profile nothing is frozen before the engine is warm, because garbage
        that is frozen keeps its GPU memory.
        """
        if _is_postponed():
            _OWN["collect"]()
            _OWN["freeze"]()
        return profile(*arguments, **keywords)

    return collect_and_profile


def _is_postponed() -> bool:
    return gc.collect is _skip


def _restore() -> None:
    for name, own in _OWN.items():
        setattr(gc, name, own)


def _skip(*_: object) -> int:
    return 0
