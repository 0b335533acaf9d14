"""Postpone the garbage collections of an engine that starts, until it is warm.

vLLM collects all garbage about ten times while an engine starts, and each collection scans all objects of the process, of
which nearly none is garbage. Here one collection runs when the engine is warm, and the survivors are frozen as vLLM does it.
While vLLM profiles the device's memory its collections run, because garbage can hold memory of the device.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from coldstart.vllm import late

CORE, WORKER = "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"
_OWN = {name: getattr(gc, name) for name in ("collect", "freeze", "unfreeze")}


def postpone_in_children() -> None:
    """Postpone the collections of the engines that this process forks while its own garbage collector is off."""
    os.register_at_fork(after_in_child=_postpone_if_starting if _hook_core() else gc.enable)


def postpone_in_process() -> None:
    """Postpone the collections of an engine that will start inside this process."""
    if _hook_core():
        gc.freeze()
        postpone()


def postpone() -> None:
    """Run no collection in this process until `resume`, not even a requested one."""
    gc.disable()
    for name in _OWN:
        setattr(gc, name, _skip)


def _postpone_if_starting() -> None:
    # The hook cannot be removed: what a warm server or engine forks later collects as usual.
    if not gc.isenabled():
        postpone()


def resume() -> None:
    """Collect once, freeze the survivors and enable the garbage collector, if collections are postponed."""
    if _is_postponed():
        _restore()
        gc.collect()
        gc.freeze()
        gc.enable()


def _hook_core() -> bool:
    """Let vLLM's engine resume when it is warm; return False if this vLLM does not say when that is."""
    core = import_module(CORE)
    if (freeze := getattr(core, "freeze_gc_heap", None)) is None:
        return False
    core.freeze_gc_heap = _resuming(freeze)  # type: ignore[attr-defined]
    late.when_imported(WORKER, _hook_worker, lambda _: resume())
    return True


def _hook_worker(module: Any) -> None:
    # With several ranks, each worker is a process of its own.
    module.freeze_gc_heap = _resuming(module.freeze_gc_heap)
    module.memory_profiling = _collecting(module.memory_profiling)


def _resuming(freeze: Callable[[], None]) -> Callable[[], None]:
    def resume_or_freeze() -> None:
        if _is_postponed():
            resume()
        else:
            freeze()

    return resume_or_freeze


def _collecting(profile: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def profile_with_collections(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        postponed = _is_postponed()
        _restore()
        try:
            with profile(*arguments, **keywords) as result:
                yield result
        finally:
            if postponed:
                postpone()

    return profile_with_collections


def _is_postponed() -> bool:
    return gc.collect is _skip


def _restore() -> None:
    for name, own in _OWN.items():
        setattr(gc, name, own)


def _skip(*_: object) -> int:
    return 0
