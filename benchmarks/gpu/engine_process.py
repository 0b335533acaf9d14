"""One process of gpu/engine: import vLLM, wait for an instruction on standard input, then start an engine and measure it."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from threading import RLock
from typing import Any

from benchmarks.gpu import checkpoint
from benchmarks.gpu.engine_pool import PARK
from coldstart.contract.graphs import GRAPHS_REPORT
from coldstart.contract.plan import LaunchPlan
from coldstart.system import runtime
from coldstart.system.devices import nvml
from coldstart.system.proc.lifeline import die_as_a_group
from coldstart.vllm import compat, late
from coldstart.vllm.engine import offline, recorder
from coldstart.vllm.engine.offline import OfflineEngine
from coldstart.vllm.graphs import plugin

BATCHES = (1, 4, 6)
PROMPT_TOKENS, TOKENS = 40, 16  # a prompt and its answer fill several blocks of the KV cache
WORKERS = (plugin.WORKER, "vllm.v1.worker.cpu_worker")
PHASES = ("init_device", "load_model", "determine_available_memory", "initialize_from_config")


class Measured:
    """Results of this process; every change is written to `path`, so that a crash loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path, self.times, self._lock = path, dict[str, float](), RLock()
        self.found: dict[str, Any] = {"times": self.times}

    def note(self, **found: Any) -> None:
        """Add results and write all of them."""
        with self._lock:
            self.found |= found
            self._path.write_text(json.dumps(self.found))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function; its seconds are added to `times`, those of a call that failed under another name."""

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            start, kept = time.perf_counter(), f"{name}_until_failure"
            try:
                result = function(*arguments, **keywords)
                kept = name
                return result
            finally:
                with self._lock:  # graphs are built in another thread
                    self.times[kept] = round(self.times.get(kept, 0.0) + time.perf_counter() - start, 4)
                    self.note()

        return call

    def time_methods(self, kind: type, **names: str) -> None:
        """Measure methods that this class itself defines; `names` maps a method to the name of its seconds."""
        for method in names.keys() & vars(kind).keys():
            setattr(kind, method, self.timed(names[method], vars(kind)[method]))

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Note the result of `work`, or why it failed."""
        try:
            self.note(**{name: work()})
        except Exception:  # noqa: BLE001 - a figure that is missing must not lose the others
            self.note(**{name: None, f"{name}_error": traceback.format_exc()[-3000:]})


def watch_collections(measured: Measured) -> None:
    """Add up the seconds of full garbage collections."""
    begin, name = list[float](), "full_collections_s"

    def collected(phase: str, found: dict[str, int]) -> None:
        if phase == "start":
            begin[:] = [time.perf_counter()]
        elif begin and found["generation"] == 2:
            spent = time.perf_counter() - begin[0]
            measured.times[name] = round(measured.times.get(name, 0.0) + spent, 4)

    gc.callbacks.append(collected)


def watch_engine(measured: Measured) -> None:
    """Measure vLLM's own steps. Call this before the plug-in is loaded, which then wraps the measured functions."""
    from vllm.engine.arg_utils import EngineArgs

    measured.time_methods(EngineArgs, create_engine_config="config_s")
    for name in plugin.RUNNERS:
        late.when_imported(
            name, lambda m: measured.time_methods(m.GPUModelRunner, capture_model="vllm_capture_s")
        )
    for name in WORKERS:
        late.when_imported(name, lambda m: watch_worker(measured, m))
    late.when_imported("vllm.model_executor.model_loader.dummy_loader", spread_weights)


def watch_worker(measured: Measured, module: Any) -> None:
    kind = getattr(module, "CPUWorker", None) or module.Worker
    own = vars(kind)["compile_or_warm_up_model"]

    @functools.wraps(own)
    def warm_up(worker: Any, *arguments: Any, **keywords: Any) -> Any:
        runner = worker.model_runner
        # On the instance, so that it contains the work of the plug-in, which wraps the class.
        if hasattr(runner, "capture_model"):
            runner.capture_model = measured.timed("capture_s", runner.capture_model)
        return own(worker, *arguments, **keywords)

    kind.compile_or_warm_up_model = measured.timed("warm_up_and_capture_s", warm_up)
    measured.time_methods(kind, **{phase: f"{phase}_s" for phase in PHASES})


def spread_weights(module: Any) -> None:
    """Give dummy weights the scale of trained ones: with vLLM's own, attention changes no bit of an answer."""
    own = module.DummyModelLoader.load_weights

    @functools.wraps(own)
    def load_weights(loader: Any, model: Any, *arguments: Any, **keywords: Any) -> Any:
        import torch

        result = own(loader, model, *arguments, **keywords)
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.data.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            source = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=source)
        return result

    module.DummyModelLoader.load_weights = load_weights


def watch_restore(measured: Measured) -> list[Any]:
    """Measure the restore, and return the list to which a restorer adds itself when its graphs are built."""
    from coldstart.graphs.online import Online
    from coldstart.graphs.restore import Restorer

    made: list[Any] = []
    own = Restorer.start

    def start(restorer: Any, *arguments: Any, **keywords: Any) -> Any:
        made.append(restorer)
        return own(restorer, *arguments, **keywords)

    Restorer.start = start  # type: ignore[method-assign]
    measured.time_methods(Restorer, link="link_s", _background="rest_s")
    measured.time_methods(Online, begin="link_first_and_canary_s", _canaries="canary_s")
    return made


def run(plan: LaunchPlan, measured: Measured) -> None:
    """Do the work of the plan: record or prove as `materialize` does, or start an engine and generate tokens."""
    watch_collections(measured)
    measured.attempt("weights", lambda: watch_engine(measured) or "random, scaled by their columns")
    restorers = watch_restore(measured) if plan.engine.restore else []
    if plan.engine.record or plan.engine.prove:
        measured.timed("total_s", recorder.run)(plan)
        return
    offline.begin(plan)
    engine = measured.timed("engine_s", OfflineEngine)(plan.vllm_args)
    for restorer in restorers:
        measured.timed("wait_for_rest_s", restorer.wait)()
    measured.attempt("graphs", lambda: count_graphs(engine.worker.model_runner))
    if plan.engine.restore:
        measured.attempt("fallbacks", lambda: engine.engine.collective_rpc(GRAPHS_REPORT))
    measured.attempt("memory", memory)
    prompts = make_prompts(engine.config.model_config.get_vocab_size())
    answers: dict[str, Any] = {}
    for batch in BATCHES:
        answers[str(batch)] = answer(engine, prompts[:batch], f"batch-{batch}")
        measured.note(answers=answers)
    if PARK in plan.env:
        measured.attempt("park", lambda: park(engine, prompts))


def park(engine: OfflineEngine, prompts: list[list[int]]) -> dict[str, Any]:
    """Checkpoint this process's device memory, restore it, and compare the answers of before and after."""
    import torch

    gib, before = torch.cuda.memory_reserved() / 2**30, answer(engine, prompts, "before")["tokens"]
    steps = list(checkpoint.drive(os.getpid(), gib, None))
    after = answer(engine, prompts, "after")["tokens"]
    return {"gib": round(gib, 2), "steps": steps, "equal": after == before}


def count_graphs(runner: Any) -> dict[str, Any]:
    """Return which full graphs of the runner are restored and which are captured, by key."""
    from coldstart.graphs.restore import Replayable
    from coldstart.vllm.graphs.record import captured_graphs

    kinds = {key: isinstance(graph, Replayable) for key, (_, graph, _) in captured_graphs(runner).items()}
    return {
        "runner": type(runner).__module__,
        "restored": [key for key, restored in kinds.items() if restored],
        "captured": [key for key, restored in kinds.items() if not restored],
    }


def memory() -> dict[str, int]:
    """Return bytes of device memory: free, total, and reserved by torch."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"free": free, "total": total, "reserved": torch.cuda.memory_reserved()}


def make_prompts(vocabulary: int) -> list[list[int]]:
    """Return the same prompts in every process."""
    source = random.Random(5)
    return [[source.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(max(BATCHES))]


def answer(engine: OfflineEngine, prompts: Sequence[list[int]], name: str) -> dict[str, Any]:
    """Generate greedily for all prompts together; return tokens, their logprobs and the median of a decode step."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1)
    for number, prompt in enumerate(prompts):
        engine.engine.add_request(f"{name}-{number}", TokensPrompt(prompt_token_ids=prompt), params)
    seconds, finished = list[float](), list[Any]()
    while engine.engine.has_unfinished_requests():
        start = time.perf_counter()
        finished += [output for output in engine.engine.step() if output.finished]
        seconds.append(time.perf_counter() - start)
    rows = [output.outputs[0] for output in sorted(finished, key=lambda output: str(output.request_id))]
    return {
        "tokens": [list(row.token_ids) for row in rows],
        "logprobs": [
            [round(float(step[token].logprob), 6) for token, step in zip(row.token_ids, row.logprobs, strict=True)]
            for row in rows
        ],
        "decode_ms": round(1000 * statistics.median(seconds[1:] or seconds), 3),
    }  # fmt: skip


def describe() -> dict[str, Any]:
    """Return what decides whether this environment can restore graphs."""
    import torch

    points = metadata.entry_points(group="vllm.general_plugins")
    return {
        "python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
        "vllm": runtime.vllm_distribution(), "targets_cpu": runtime.targets_cpu(), "driver": nvml.driver(),
        "plugins": [f"{point.name} = {point.value}" for point in points],
        "graphs_refused": compat.check("graphs"), "cuda_initialized": torch.cuda.is_initialized(),
    }  # fmt: skip


def ready(path: Path) -> bool:
    """Import vLLM and write the seconds and the versions to `path`; return False if the import failed."""
    start, found = time.perf_counter(), dict[str, Any]()
    try:
        offline.require()
        found["import_s"] = round(time.perf_counter() - start, 3)
        found |= describe()
    except BaseException as error:  # noqa: BLE001 - SystemExit has the reason; the parent reports it
        found["error"] = f"cannot import vLLM: {error!r}"
        traceback.print_exc()
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)
    return "import_s" in found


def main(path: Path) -> int:
    """Import, wait, and do the work; the exit code is 0 if it succeeded."""
    faulthandler.enable()
    with contextlib.suppress(RuntimeError, ValueError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_as_a_group()
    if not ready(path) or not (line := sys.stdin.readline()):
        return 1
    instruction = json.loads(line)
    measured = Measured(Path(instruction["result"]))
    try:
        run(LaunchPlan.parse_document(instruction["plan"]), measured)
    except BaseException as error:  # noqa: BLE001 - SystemExit has a reason too
        traceback.print_exc()
        measured.note(error=f"{type(error).__name__}: {error}"[-3000:])
        return 1
    measured.note(done=True)
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's teardown takes seconds and may fail.
    os._exit(code)
