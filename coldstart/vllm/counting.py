"""Report the steps of vLLM's own workers as phases of the start: load the model, profile and compile, warm up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from coldstart.system import start_progress, timeline
from coldstart.vllm import compat, late

WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
STEPS = {
    "load_model": "load the model",
    "determine_available_memory": "compile the model or size the KV cache",  # its profile compiles
    "compile_or_warm_up_model": "compile or warm up",
}


@functools.cache
def install() -> None:
    """Hook vLLM's workers once they are imported. A step that this vLLM lacks is not reported."""
    if compat.check("progress") is None:
        for module, kind in WORKERS.items():
            late.when_imported(module, functools.partial(_name_steps, kind))


def _name_steps(name: str, module: Any) -> None:
    kind = getattr(module, name, object)
    for method, stage in STEPS.items():
        if method in vars(kind):
            setattr(kind, method, _named(getattr(kind, method), stage))


def _named(original: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(worker: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(worker, "rank", 0):  # the stages of several ranks would alternate
            start_progress.end()
            return original(worker, *arguments, **keywords)
        with timeline.measure(stage, track="vllm"):
            return original(worker, *arguments, **keywords)

    return step
