"""The offline phase, run once in a process of its own: a real engine is started, measured, and its state written out.

The engine runs inside this process (vLLM's in-process client), so that one call to `step` is one iteration and the
compiled modules are at hand. It compiles vLLM's ordinary way, in an empty cache; what it answers is therefore the reference
that every later start must reproduce. Results go to a directory; nothing is published from here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import TORCHINDUCTOR_CACHE_DIR, VLLM_CACHE_ROOT
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import CANARY_BATCH, LaunchPlan
from coldstart.models.inspection import NOT_MADE
from coldstart.scheduling import profiling
from coldstart.system import runtime, timeline
from coldstart.system.proc.lifeline import die_as_a_group
from coldstart.vllm import compat
from coldstart.vllm.compat.report import check_compatibility
from coldstart.vllm.engine import compiled, server, stepdowns
from coldstart.vllm.graphs import kv_plan

CANARY_PROMPT_TOKENS = 8
CANARY_TOKENS = 16
SIZE = "size"
DECODE_STEPS = 3
DECODE_PROMPT = 8
MAX_PROFILED_BATCH = 64
_KEPT_SUFFIXES = {".so", ".cpp", ".py"}


class OfflineEngine:
    """vLLM's engine in this process; `step_seconds` is the wall time of one iteration."""

    def __init__(self, vllm_args: Sequence[str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        parsed, fallbacks = server.parse_args(vllm_args)
        stepdowns.say(fallbacks)
        args = AsyncEngineArgs.from_cli_args(parsed)
        self.config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        self.engine = LLMEngine.from_vllm_config(self.config, disable_log_stats=True)
        self.core = self.engine.engine_core.engine_core
        self.random = random.Random(0)
        self._ids = (f"offline-{number}" for number in count())

    @property
    def worker(self) -> Any:
        """The worker inside the executor."""
        return self.core.model_executor.driver_worker.worker

    @property
    def compiles(self) -> bool:
        """Whether vLLM compiles any part of this model."""
        return any(True for _ in compiled.compiled_modules(self.worker.model_runner.model))

    def prompt(self, length: int) -> list[int]:
        """`length` token ids that no earlier prompt shares, so that the prefix cache never helps."""
        vocabulary = self.config.model_config.get_vocab_size()
        return [self.random.randrange(vocabulary) for _ in range(length)]

    def add(self, prompt: list[int], tokens: int) -> str:
        """Queue one greedy request for exactly `tokens` tokens."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        name = next(self._ids)
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        return name

    def step_seconds(self) -> float:
        """Run one iteration; its seconds."""
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start

    def drain(self) -> list[Any]:
        """Run until every request has finished; the finished outputs."""
        finished = []
        while self.engine.has_unfinished_requests():
            finished += [output for output in self.engine.step() if output.finished]
        return finished


def synchronous(vllm_args: Arguments) -> Arguments:
    """Arguments with which `step` returns when its iteration is done: on a GPU it would be when it is launched."""
    return vllm_args if runtime.targets_cpu() else vllm_args.append("--no-async-scheduling")


def canary(engine: OfflineEngine) -> dict[str, list[int]]:
    """A prompt and the greedy tokens that follow it: what every start from the bundle must answer.

    `batch` are the tokens that several such requests at once are all answered with, where they are.
    """
    prompt = engine.prompt(CANARY_PROMPT_TOKENS)
    engine.add(prompt, CANARY_TOKENS)
    (output,) = engine.drain()
    known = {"prompt": prompt, "tokens": list(output.outputs[0].token_ids)}
    for _ in range(CANARY_BATCH):
        engine.add(prompt, CANARY_TOKENS)
    answers = [list(output.outputs[0].token_ids) for output in engine.drain()]
    return known | ({"batch": answers[0]} if all(answer == answers[0] for answer in answers) else {})


def iteration_profile(engine: OfflineEngine, budget_s: float = profiling.BUDGET_S) -> dict[str, Any]:
    """Seconds per iteration: {"prefill": [[tokens, s]], "decode": [[batch, s]], ...}, each the fastest of several.

    This is the job profiler that skip-join needs (FastServe section 4.1): a prompt's first iteration by its length, a later
    one by the batch it runs in, as far as the KV cache holds them, and as `budget_s` goes.
    """
    held, block = kv_sizing(engine)["blocks"] - 1, kv_sizing(engine)["block_tokens"]
    scheduler, longest = engine.config.scheduler_config, engine.config.model_config.max_model_len - 2
    limit = min(scheduler.max_num_batched_tokens, longest, held * block - 2)
    each = -(-(DECODE_PROMPT + DECODE_STEPS + 2) // block)
    batches = min(scheduler.max_num_seqs, MAX_PROFILED_BATCH, held // each)
    sizes = {"prefill": [*_powers(1, max(1, limit))], "decode": [*_powers(1, max(1, batches))]}
    measure = {"prefill": _prefill, "decode": _decode}
    return profiling.Profiler(lambda kind, size: measure[kind](engine, size), budget_s).run(sizes)


def _prefill(engine: OfflineEngine, length: int) -> float:
    engine.add(engine.prompt(length), 1)
    seconds = engine.step_seconds()
    engine.drain()
    return seconds


def _decode(engine: OfflineEngine, batch: int) -> float:
    for _ in range(batch):
        engine.add(engine.prompt(DECODE_PROMPT), DECODE_STEPS + 2)
    engine.step_seconds()  # every prompt is prefilled in this one
    seconds = [engine.step_seconds() for _ in range(DECODE_STEPS)]
    engine.drain()
    return min(seconds)


def _powers(first: int, last: int) -> Iterator[int]:
    value = first
    while value < last:
        yield value
        value *= 2
    yield last


def write_compiled(engine: OfflineEngine, directory: Path) -> str | None:
    """The compiled forward functions and the kernels they load; None, or why they cannot be kept (nothing is left then)."""
    directory.mkdir()
    try:
        compiled.save(engine.worker.model_runner.model, directory)
    except compiled.NotSavedError as error:
        shutil.rmtree(directory)
        return str(error)
    source = Path(os.environ[TORCHINDUCTOR_CACHE_DIR])
    for file in source.rglob("*"):
        if file.is_file() and file.suffix in _KEPT_SUFFIXES:
            target = directory / compiled.INDUCTOR_DIR / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
    return None


def modelinfos() -> dict[str, str]:
    """What vLLM found out about the model class by importing itself in another process, by file name."""
    directory = Path(os.environ[VLLM_CACHE_ROOT]) / "modelinfos"
    return {path.name: path.read_text() for path in sorted(directory.glob("*.json"))}


def size(plan: LaunchPlan, out: Path) -> None:
    """Measure the KV cache alone, in caches that a start before has filled, over what that start has measured."""
    begin(plan)
    with timeline.measure("start engine, warm", track="offline"):
        _write(out / "kv.json", kv_sizing(OfflineEngine(synchronous(plan.vllm_args))))


def begin(plan: LaunchPlan) -> None:
    """Make this process one in which the engine runs. Raises SystemExit where this vLLM has no way for it."""
    plan.install()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    require()


def run(plan: LaunchPlan, out: Path, profile_s: float = profiling.BUDGET_S) -> None:
    """Do the whole offline phase into the existing directory `out`, `profile_s` at most for the iteration profile.

    Raises SystemExit where this vLLM has no way for it.
    """
    begin(plan)
    with timeline.measure("start engine, compile", track="offline"):
        engine = OfflineEngine(synchronous(plan.vllm_args))
    info: dict[str, Any] = {
        "architectures": engine.config.model_config.architectures,
        "vllm_modelinfos": modelinfos(),
    }
    if engine.config.model_config.runner_type == "generate":
        with timeline.measure("reference tokens", track="offline"):
            info["canary"] = canary(engine)
        with timeline.measure("iteration profile", track="offline"):
            _write(out / "iterations.json", iteration_profile(engine, profile_s))
    _write(out / "modelinfo.json", info)
    _write(out / "kv.json", kv_sizing(engine))
    if runtime.targets_cpu():  # a GPU's compiled code is in its compilers' caches
        with timeline.measure("save compiled forward", track="offline"):
            reason = not_compiled(engine) or write_compiled(engine, out / "compile")
        if reason:
            stepdowns.say([Fallback("compile", reason)])
            _write(out / f"{NOT_MADE}.json", {"compile": reason})
    # Last: its imports would be in what is measured.
    report_compatibility(out)


def require() -> None:
    """Import the runtime. Raises SystemExit with the reason where this vLLM cannot run inside this process."""
    if reason := compat.check("start", server.import_runtime) or compat.check("offline", _import_engine):
        raise SystemExit(f"coldstart: nothing can be materialized: {reason}")


def _import_engine() -> None:
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401


def report_compatibility(out: Path) -> None:
    """Compare the installed vLLM with every integration point, and write and log what differs."""
    with timeline.measure("check vLLM compatibility", track="offline"):
        reasons = check_compatibility()
    if reasons:
        stepdowns.say([Fallback(feature, reason) for feature, reason in reasons.items()])
        _write(out / "compatibility.json", reasons)


def not_compiled(engine: OfflineEngine) -> str | None:
    """Why there is no compiled forward of ours to keep; None where there is one."""
    if engine.config.parallel_config.worker_cls != stepdowns.WORKER:
        # Several ranks are processes of their own, whose models cannot be looked at from here.
        return "only coldstart's own worker restores compiled code, and this engine has another: it compiles as always"
    if not engine.compiles:
        return "vLLM compiles no part of this model as it is started here: there is nothing to keep"
    return compat.check("compile")


def kv_sizing(engine: OfflineEngine) -> dict[str, Any]:
    """The KV cache that profiling arrived at: bytes, blocks, tokens per block (MEDUSA section 6).

    On a GPU also `plans`, by rank: what vLLM's own start-up plan needs to arrive there without profiling.
    """
    cache, notes = engine.config.cache_config, LaunchPlan.current().engine.kv_note
    sizing: dict[str, Any] = {
        "bytes": int(engine.core.available_gpu_memory_for_kv_cache),
        "blocks": int(cache.num_gpu_blocks),
        "block_tokens": int(cache.block_size),
    }
    return sizing | ({"plans": [asdict(p) for p in kv_plan.collect(notes)]} if notes else {})


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, sort_keys=True))


if __name__ == "__main__":
    # vLLM asks subprocesses of its own about a model: one that went on would write into a directory that is gone.
    die_as_a_group()
    given, target = LaunchPlan.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    if sys.argv[3] == SIZE:
        size(given, target)
    else:
        run(given, target, profile_s=float(sys.argv[3]))
    sys.stdout.flush()
    # Nothing is left to do, and vLLM's teardown takes seconds.
    os._exit(0)
