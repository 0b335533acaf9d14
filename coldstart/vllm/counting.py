"""Report the startup steps of vLLM's processes as phases, for progress output, charts and `coldstart bench`.

Invariant: the steps run unchanged; only their times are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from coldstart.system import start_progress, timeline
from coldstart.vllm import compat, late

_WORKER = {
    "load_model": "load the model",
    "determine_available_memory": "compile the model or size the KV cache",  # its profile compiles
    "initialize_from_config": "allocate the KV cache",
    "compile_or_warm_up_model": "compile or warm up",
}
STEPS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("vllm.v1.worker.gpu_worker", "Worker"): _WORKER,
    ("vllm.v1.worker.cpu_worker", "CPUWorker"): _WORKER,
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader"): {"create_model": "construct model"},
    ("vllm.tokenizers.registry", "_TokenizerRegistry"): {"load_tokenizer": "load the tokenizer"},
}
"""Names of phases, by vLLM module and class, then by the method that runs one phase."""


@functools.cache
def report_phases() -> None:
    """Hook vLLM's startup steps once their modules are imported. Steps that this vLLM version lacks are not reported."""
    if compat.find_unsupported_reason("progress") is None:
        for (module, kind), steps in STEPS.items():
            late.run_when_imported(module, functools.partial(_name_steps, kind, steps))


def _name_steps(name: str, steps: Mapping[str, str], module: Any) -> None:
    kind = getattr(module, name, object)
    for method, stage in steps.items():
        if method in vars(kind):
            setattr(kind, method, _named(getattr(kind, method), stage))


def _named(original: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(owner, "rank", 0):  # if several ranks reported phases, the phases would alternate
            start_progress.stop_reporting()
            return original(owner, *arguments, **keywords)
        with timeline.measure(stage, track="vllm"):
            return original(owner, *arguments, **keywords)

    return step
