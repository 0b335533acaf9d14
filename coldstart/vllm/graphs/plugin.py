"""Plug-in behind `entry.register`: record and prove graphs offline, restore them online, size the KV cache.

If anything fails, vLLM's own capture runs. Offline, the reason is written for the process that started this one; online it is
part of the report that the server requests.
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
from coldstart.vllm.graphs.hooks import log

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
WORKER = "vllm.v1.worker.gpu_worker"
Run = Callable[[Any, Callable[[], Any]], Any]


def register(task: EngineTask) -> None:
    """Install the hooks for a task, in each of vLLM's processes."""
    if task.compiled:
        _lay_compiled(compiled.Aot(task.compiled))
    if task.kv_note or task.kv_plan:
        _size_kv(task)
    if task.record or task.prove or task.restore:
        _install(_create_session(task))
    elif task.deferred:
        _defer(deferred.Deferral())


def _create_session(task: EngineTask) -> Any:
    if task.record:
        from coldstart.vllm.graphs.record import GraphRecording

        return GraphRecording(task.record)
    from coldstart.vllm.graphs.restore import Proving, Restoring

    if task.prove:
        return Proving(task.prove)
    assert task.restore is not None
    return Restoring(task.restore)


def _defer(deferral: deferred.Deferral) -> None:
    late.when_imported(
        WORKER,
        lambda module: setattr(module.Worker, CAPTURE_NEXT, lambda worker, agreed: deferral.advance(agreed)),
    )
    _install(deferral, compat.check("deferred-capture"))


def _install(session: Any, reason: str | None = None) -> None:
    """Let a session run instead of `capture_model`, or report the reason why it does not.

    Its `fallbacks` are the reasons by graph, of which `*` is all graphs.
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

    compat.sources.append(
        lambda: [
            Fallback("graphs", f"{'all' if key == '*' else key}: {why}")
            for key, why in session.fallbacks.items()
        ]
    )
    if reason:
        fail(reason)
        return
    for name in RUNNERS:
        late.when_imported(name, hook, fail)


def _wrapped(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_model(self: Any, *arguments: Any, **keywords: Any) -> Any:
        own = functools.partial(original, self, *arguments, **keywords)
        return own() if keywords.get("profile_only") else run(self, own)

    return capture_model


def _lay_compiled(held: compiled.Aot) -> None:
    compat.sources.append(lambda: [Fallback("compile", reason) for reason in held.reasons])
    if reason := compat.check("aot"):
        log.warning("vLLM compiles: %s", reason)
        held.miss(reason)
    else:
        late.when_imported(compiled.DECORATORS, held.install, held.miss)


def _size_kv(task: EngineTask) -> None:
    if reason := compat.check("kv-plan"):
        compat.fall_back("kv", reason)
        return
    if task.kv_note:
        late.when_imported(WORKER, functools.partial(_note_kv, task.kv_note))
    if task.kv_plan:
        late.when_imported(
            WORKER, functools.partial(_apply_kv, task.kv_plan), functools.partial(compat.fall_back, "kv")
        )


def _note_kv(directory: Path, module: Any) -> None:
    """Write the results of this worker's profiling."""
    original = module.maybe_save_startup_plan

    @functools.wraps(original)
    def save(worker: Any, kv_cache_memory_bytes: int) -> None:
        kv_plan.note(directory, worker, kv_cache_memory_bytes)
        original(worker, kv_cache_memory_bytes)

    module.maybe_save_startup_plan = save


def _apply_kv(plans: list[dict[str, Any]], module: Any) -> None:
    """Set the size of the bundle's plan where vLLM applies its own start-up plan, unless the user gave one."""
    original = module.maybe_apply_startup_plan

    @functools.wraps(original)
    def apply(worker: Any) -> None:
        if worker.cache_config.kv_cache_memory_bytes is None:
            try:
                worker.cache_config.kv_cache_memory_bytes = kv_plan.fit_worker(worker, plans)
            except GraphError as error:
                compat.fall_back("kv", str(error))
        original(worker)

    module.maybe_apply_startup_plan = apply
