"""Plug-in that `entry.register` installs to record and verify graphs offline, restore them online, and size the KV cache.

If a step fails, vLLM's own capture runs. The reason is written to the work directory (offline) or the report (online).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import CAPTURE_NEXT, EngineTask
from coldstart.graphs.errors import GraphError
from coldstart.vllm import compat, late
from coldstart.vllm.engine import compiled
from coldstart.vllm.graphs import deferred, kv_plan

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
WORKER = "vllm.v1.worker.gpu_worker"
Run = Callable[[Any, Callable[[], Any]], Any]


def register(task: EngineTask) -> None:
    """Install the hooks for a task in this vLLM process."""
    if task.compiled:
        compiled.install_artifacts(task.compiled)
    if task.kv_note or task.kv_plan:
        _size_kv(task)
    if task.record or task.prove or task.restore:
        _install(_create_session(task))
    elif task.deferred:
        _defer(deferred.DeferredCapture())


def _create_session(task: EngineTask) -> Any:
    if task.record:
        from coldstart.vllm.graphs.record import RecordingSession

        return RecordingSession(task.record)
    from coldstart.vllm.graphs.restore import ProvingSession, RestoringSession

    if task.prove:
        return ProvingSession(task.prove)
    assert task.restore is not None
    return RestoringSession(task.restore)


def _defer(deferral: deferred.DeferredCapture) -> None:
    late.run_when_imported(
        WORKER,
        lambda module: setattr(module.Worker, CAPTURE_NEXT, lambda _, agreed: deferral.capture_next(agreed)),
    )
    _install(deferral, compat.find_unsupported_reason("deferred-capture"))


def _install(session: Any, reason: str | None = None) -> None:
    """Run `session.run` instead of `capture_model`. If a `reason` is given, only report it as a fallback.

    The session's `fallbacks` are reasons by graph key; the key `*` means all graphs.
    """

    def hook(module: Any) -> None:
        kind = module.GPUModelRunner
        kind.capture_model = _wrapped(kind.capture_model, session.run)
        if hasattr(session, "prepare_load"):
            load = kind.load_model

            @functools.wraps(load)
            def load_model(*arguments: Any, **keywords: Any) -> Any:
                session.prepare_load()
                return load(*arguments, **keywords)

            kind.load_model = load_model

    def fail(reason: str) -> None:
        session.fallbacks["*"] = reason

    compat.fallback_sources.append(
        lambda: [
            Fallback("graphs", f"{'all' if key == '*' else key}: {why}")
            for key, why in session.fallbacks.items()
        ]
    )
    if reason:
        fail(reason)
        return
    for name in RUNNERS:
        late.run_when_imported(name, hook, fail)


def _wrapped(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_model(self: Any, *arguments: Any, **keywords: Any) -> Any:
        own = functools.partial(original, self, *arguments, **keywords)
        return own() if keywords.get("profile_only") else run(self, own)

    return capture_model


def _size_kv(task: EngineTask) -> None:
    if reason := compat.find_unsupported_reason("kv-plan"):
        compat.record_fallback("kv", reason)
        return
    if task.kv_note:
        late.run_when_imported(WORKER, functools.partial(_note_kv, task.kv_note))
    if task.kv_plan:
        apply, fail = (
            functools.partial(_apply_kv, task.kv_plan),
            functools.partial(compat.record_fallback, "kv"),
        )
        late.run_when_imported(WORKER, apply, fail)


def _note_kv(directory: Path, module: Any) -> None:
    """Make vLLM's worker write its profiling result to `directory`.

    vLLM's own plan is smaller than the KV cache that it allocates: it subtracts the memory of graphs as estimated and as
    measured, and 150 MiB more.
    """
    original = module.maybe_save_startup_plan

    @functools.wraps(original)
    def save(worker: Any, kv_cache_memory_bytes: int) -> None:
        kv_plan.write_plan(directory, worker, worker.available_kv_cache_memory_bytes)
        original(worker, kv_cache_memory_bytes)

    module.maybe_save_startup_plan = save


def _apply_kv(plans: list[dict[str, Any]], module: Any) -> None:
    """Set the KV cache size from the bundle's plan where vLLM applies its start-up plan, unless the user has set a size."""
    original = module.maybe_apply_startup_plan

    @functools.wraps(original)
    def apply(worker: Any) -> None:
        if worker.cache_config.kv_cache_memory_bytes is None:
            try:
                worker.cache_config.kv_cache_memory_bytes = kv_plan.compute_kv_bytes(worker, plans)
            except GraphError as error:
                compat.record_fallback("kv", str(error))
        original(worker)

    module.maybe_apply_startup_plan = apply
