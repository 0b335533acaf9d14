"""Report the progress of vLLM's own loops and steps: shards of weights, CUDA graphs, the KV cache's profile.

vLLM shows its loops with tqdm, on its first rank only. A bar that vLLM disables is not counted. vLLM itself runs unchanged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from coldstart.system import start_progress, timeline
from coldstart.system.start_progress import Counter
from coldstart.vllm import compat, late

log = logging.getLogger("vllm.coldstart")
# Stage and unit of the progress bars of a module.
BARS = {
    "vllm.model_executor.model_loader.weight_utils": ("load weights", "shards"),
    "vllm.v1.worker.gpu_model_runner": ("capture graphs", "graphs"),
    "vllm.v1.worker.gpu.cudagraph_utils": ("capture graphs", "graphs"),
}
WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
STEPS = {
    "load_model": "load the model",
    "determine_available_memory": "compile the model or size the KV cache",  # its profile compiles
    "compile_or_warm_up_model": "compile or warm up",
}


@functools.cache
def install() -> None:
    """Hook vLLM's modules once they are imported. What this vLLM lacks is not reported."""
    if reason := compat.check("progress"):
        log.debug("the start is shown without figures: %s", reason)
        return
    for module, (stage, unit) in BARS.items():
        _hook(module, functools.partial(_count_bars, stage, unit))
    for module, kind in WORKERS.items():
        _hook(module, functools.partial(_name_steps, kind))


def _hook(name: str, work: Callable[[Any], None]) -> None:
    def guarded(module: Any) -> None:
        try:
            work(module)
        except Exception as error:  # noqa: BLE001 - vLLM's import must not fail because of figures
            log.debug("the start is shown without the figures of %s: %r", name, error)

    late.when_imported(name, guarded)


def _count_bars(stage: str, unit: str, module: Any) -> None:
    class CountedBar(module.tqdm):
        def __iter__(self) -> Iterator[Any]:
            counter, done = Counter(stage, None if self.disable else self.total, unit), 0
            counter.show(done)
            for item in super().__iter__():
                yield item
                done += 1
                counter.show(done)

    module.tqdm = CountedBar


def _name_steps(name: str, module: Any) -> None:
    kind = getattr(module, name)
    for method, stage in STEPS.items():
        if method in vars(kind):
            setattr(kind, method, _named(getattr(kind, method), stage))


def _named(original: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(worker: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(worker, "rank", 0):  # the figures of several ranks would alternate
            start_progress.end()
            return original(worker, *arguments, **keywords)
        with timeline.measure(stage, track="vllm"):
            return original(worker, *arguments, **keywords)

    return step
