"""Run the offline phase in a separate process: start a real engine, measure it, and write its state.

The engine runs inside this process (vLLM's in-process client), so one call of `step` is one iteration, and the compiled
modules are accessible. vLLM compiles as usual with an empty cache, so its tokens are the reference for all later starts.
The results are written to a directory; this module does not publish them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import VLLM_CACHE_ROOT
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.models.inspection import NOT_MADE
from coldstart.scheduling import profiling
from coldstart.system import runtime, start_progress, timeline
from coldstart.system.proc.lifeline import die_as_a_group
from coldstart.vllm import compat, package_scans
from coldstart.vllm.engine import collection, components, server
from coldstart.vllm.engine.readiness import report_failures, send_report, take_ready_pipe
from coldstart.vllm.graphs import kv_plan

CANARY_PROMPT_TOKENS = 8
CANARY_TOKENS = 16
SIZE, TASK = "size", "task"
LIVE_STEPS = 6
DECODE_STEPS = 3
DECODE_PROMPT = 8
MAX_PROFILED_BATCH = 64


class OfflineEngine:
    """vLLM engine that runs in this process during the offline phase."""

    def __init__(self, vllm_args: Sequence[str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        parsed, fallbacks = server.parse_args(vllm_args)
        components.log_fallbacks(fallbacks)
        args = AsyncEngineArgs.from_cli_args(parsed)
        self.config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        self.engine = LLMEngine.from_vllm_config(self.config, disable_log_stats=True)
        self.core = self.engine.engine_core.engine_core
        self.random = random.Random(0)
        self._ids = (f"offline-{number}" for number in count())

    def create_prompt(self, length: int) -> list[int]:
        """Return `length` random token IDs. Prompts share no prefix, so the prefix cache has no effect."""
        vocabulary = self.config.model_config.get_vocab_size()
        return [self.random.randrange(vocabulary) for _ in range(length)]

    def add_request(self, prompt: list[int], output_tokens: int) -> str:
        """Add a greedy request that generates exactly `output_tokens` tokens, and return its ID."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        name = next(self._ids)
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        return name

    def time_step(self) -> float:
        """Run one iteration, and return its wall time in seconds."""
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start

    def finish_requests(self) -> list[Any]:
        """Run iterations until all requests have finished, and return their outputs."""
        finished = []
        while self.engine.has_unfinished_requests():
            finished += [output for output in self.engine.step() if output.finished]
        return finished


def disable_async_scheduling(vllm_args: Arguments) -> Arguments:
    """Return `vllm_args` without async scheduling on a GPU, so that each step waits until its iteration is complete."""
    return vllm_args if runtime.targets_cpu() else vllm_args.append("--no-async-scheduling")


def generate_canary(engine: OfflineEngine) -> dict[str, list[int]]:
    """Return a prompt and its greedily generated tokens, which every start from the bundle must reproduce."""
    prompt = engine.create_prompt(CANARY_PROMPT_TOKENS)
    engine.add_request(prompt, CANARY_TOKENS)
    (output,) = engine.finish_requests()
    return {"prompt": prompt, "tokens": list(output.outputs[0].token_ids)}


def measure_iterations(engine: OfflineEngine, budget_s: float = profiling.BUDGET_S) -> dict[str, Any]:
    """Measure the time per iteration by prompt length and by batch size (the job profiler of FastServe, section 4.1).

    Returns:
        {"prefill": [[tokens, s]], "decode": [[batch, s]], ...} with the fastest of several measurements. The sizes are
        limited by the KV cache and by `budget_s` seconds of measurement.
    """
    held, block = describe_kv_cache(engine)["blocks"] - 1, describe_kv_cache(engine)["block_tokens"]
    scheduler, longest = engine.config.scheduler_config, engine.config.model_config.max_model_len - 2
    limit = min(scheduler.max_num_batched_tokens, longest, held * block - 2)
    each = -(-(DECODE_PROMPT + DECODE_STEPS + 2) // block)
    batches = min(scheduler.max_num_seqs, MAX_PROFILED_BATCH, held // each)
    sizes = {"prefill": [*_powers(max(1, limit))], "decode": [*_powers(max(1, batches))]}
    measure = {"prefill": _prefill, "decode": _decode}
    return profiling.IterationProfiler(lambda kind, size: measure[kind](engine, size), budget_s).run(sizes)


def _prefill(engine: OfflineEngine, length: int) -> float:
    engine.add_request(engine.create_prompt(length), 1)
    seconds = engine.time_step()
    engine.finish_requests()
    return seconds


def _decode(engine: OfflineEngine, batch: int) -> float:
    for _ in range(batch):
        engine.add_request(engine.create_prompt(DECODE_PROMPT), DECODE_STEPS + 2)
    engine.time_step()  # this step prefills every prompt
    seconds = [engine.time_step() for _ in range(DECODE_STEPS)]
    engine.finish_requests()
    return min(seconds)


def _powers(last: int) -> Iterator[int]:
    value = 1
    while value < last:
        yield value
        value *= 2
    yield last


def write_compiled(engine: OfflineEngine, directory: Path) -> str | None:
    """Save the compiled forward functions and kernels of all ranks. Return the reason if that failed, else None."""
    directory.mkdir()
    reasons: list[str | None] = engine.core.model_executor.collective_rpc(
        "save_compiled", args=(str(directory),)
    )
    if reason := next(filter(None, reasons), None):
        shutil.rmtree(directory)
        return reason
    return None


def measure_kv_cache(plan: LaunchPlan, out: Path) -> None:
    """Start the engine with the caches that an earlier start has filled, and overwrite the KV cache size in `out`."""
    prepare_process(plan)
    with timeline.measure("start engine, warm", track="offline"):
        _write(out / "kv.json", describe_kv_cache(OfflineEngine(disable_async_scheduling(plan.vllm_args))))


def run_task(plan: LaunchPlan) -> None:
    """Start the engine only to run a task of the graphs plug-in. If graphs are recorded, also run a few steps."""
    prepare_process(plan)
    engine = OfflineEngine(plan.vllm_args)
    if plan.engine.record and engine.config.model_config.runner_type == "generate":
        engine.add_request(engine.create_prompt(CANARY_PROMPT_TOKENS), LIVE_STEPS)
        engine.finish_requests()


def prepare_process(plan: LaunchPlan) -> None:
    """Prepare this process to run the engine. Raises SystemExit if the installed vLLM cannot run inside this process."""
    plan.install()
    start_progress.start_reporting()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if reason := compat.find_unsupported_reason(
        "start", server.import_runtime
    ) or compat.find_unsupported_reason("offline", _import_engine):
        raise SystemExit(f"coldstart: cannot materialize: {reason}")
    collection.postpone_in_process()


def run(plan: LaunchPlan, out: Path, profile_s: float = profiling.BUDGET_S) -> None:
    """Run the offline phase, and write its results to the existing directory `out`.

    Measure iteration times for at most `profile_s` seconds.

    Raises:
        SystemExit: The installed vLLM does not support the offline phase.
    """
    prepare_process(plan)
    with timeline.measure("start engine, compile", track="offline"):
        engine = OfflineEngine(disable_async_scheduling(plan.vllm_args))
    infos = Path(os.environ[VLLM_CACHE_ROOT]) / "modelinfos"
    info: dict[str, Any] = {
        "architectures": engine.config.model_config.architectures,
        # vLLM's descriptions of the model class by file name, which it creates in another process
        "vllm_modelinfos": {path.name: path.read_text() for path in sorted(infos.glob("*.json"))},
    }
    if engine.config.model_config.runner_type == "generate":
        with timeline.measure("reference tokens", track="offline"):
            info["canary"] = generate_canary(engine)
        with timeline.measure("iteration profile", track="offline"):
            _write(out / "iterations.json", measure_iterations(engine, profile_s))
    _write(out / "modelinfo.json", info)
    _write(out / "kv.json", describe_kv_cache(engine))
    if runtime.targets_cpu():  # on a GPU, the compilers' caches contain the compiled code
        with timeline.measure("save compiled forward", track="offline"):
            reason = explain_missing_forward(engine) or write_compiled(engine, out / "compile")
        if reason:
            components.log_fallbacks([Fallback("compile", reason)])
            _write(out / f"{NOT_MADE}.json", {"compile": reason})


def _import_engine() -> None:
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401


def explain_missing_forward(engine: OfflineEngine) -> str | None:
    """Return the reason why this engine has no compiled forward function to save, or None if it has one."""
    if engine.config.parallel_config.worker_cls != components.WORKER:
        return "only coldstart's worker can save compiled code; this engine uses another worker, which compiles at every start"
    return compat.find_unsupported_reason("compile")


def describe_kv_cache(engine: OfflineEngine) -> dict[str, Any]:
    """Return the KV cache size that vLLM's profiling found, in bytes, blocks and tokens per block (MEDUSA, section 6).

    `ranks` contains what each rank needs at least. On a GPU, the result also contains `plans`, one for each rank, which
    replace the profiling at a server start, unless the user has set the size and vLLM profiled nothing.
    """
    cache, notes = engine.config.cache_config, LaunchPlan.current().engine.kv_note
    sizing: dict[str, Any] = {
        "bytes": int(engine.core.available_gpu_memory_for_kv_cache),
        "blocks": int(cache.num_gpu_blocks),
        "block_tokens": int(cache.block_size),
        "ranks": engine.core.model_executor.collective_rpc(measure_rank),
    }
    if notes and any(notes.iterdir()):
        sizing["plans"] = msgspec.to_builtins(kv_plan.read_plans(notes))
    return sizing


def measure_rank(worker: Any) -> dict[str, int]:
    """Return the bytes of a rank's weights, and of the smallest KV cache with which vLLM starts.

    That KV cache stores one request of the maximum length, and one block that vLLM reserves. vLLM's CPU build does not
    measure the weights, so they are 0.
    """
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    runner = worker.model_runner
    cache, floor = runner.kv_cache_config, 0
    if cache.kv_cache_tensors:  # the tensors share one allocation
        requests = get_max_concurrency_for_kv_cache_config(runner.vllm_config, cache)
        floor = (round(cache.num_blocks / requests) + 1) * (
            cache.kv_cache_tensors[0].size // cache.num_blocks
        )
    return {"weights_bytes": int(getattr(runner, "model_memory_usage", 0)), "kv_floor_bytes": floor}


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, sort_keys=True))


if __name__ == "__main__":
    # vLLM starts subprocesses to inspect a model. If one outlived this process, it would write to a removed directory.
    die_as_a_group()
    package_scans.reuse_scans()
    launch_plan = LaunchPlan.parse(Path(sys.argv[1]).read_text(encoding="utf-8"))
    target, work = Path(sys.argv[2]), sys.argv[3]
    with report_failures():
        if work == SIZE:
            measure_kv_cache(launch_plan, target)
        elif work == TASK:
            run_task(launch_plan)
        else:
            run(launch_plan, target, profile_s=float(work))
    sys.stdout.flush()
    send_report(take_ready_pipe(), {})
    # No work is left, and vLLM's teardown takes seconds.
    os._exit(0)
