"""Schedulers on real vLLM: answers, time to first token (TTFT) of a burst, and the CPU time of a scheduler's step.

`bursts`: five servers of tiny-llama on the CPU with few slots, and KV memory for a whole burst: first come, first served twice
(the second shows the noise), by deadline, and both forms of skip-join MLFQ. Each round has a burst of its own, which all of
them serve in an order that is drawn for the round. Each answer is compared with the first server's, token by token. A ratio is
the first server's time over the other's in one round, so above 1 is a gain.

`step`: vLLM's schedulers without a model, with a full batch and 2,000 waiting requests; a request that ends is replaced. They
take turns of some steps. A ratio is the CPU time of a turn over the first scheduler's, so below 1 is a gain. `deadline_us` is
the time in which the API server computes the deadline of one request.

Run: python -m benchmarks scheduling/live [--minutes M]
Time: 15 minutes
Result: scheduling-live-cpu.json
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import aiohttp

from benchmarks.common import about, finish, parser, spread
from coldstart.bench import facts
from coldstart.lab.live import VOCABULARY
from coldstart.lab.plan import generate_prompt
from coldstart.lab.traces import TraceRequest
from coldstart.launch import completions
from coldstart.scheduling.profile import FALLBACK_PROFILE
from coldstart.scheduling.settings import DEADLINE, FCFS, MLFQ, SchedulerSettings
from coldstart.validate.launch import HOST, run_server
from coldstart.validate.launchers import FRESH, ModelUnderTest, ServeLauncher, coldstart_command
from coldstart.vllm.scheduling.virtual_engine import EngineResources, VirtualEngine

RESULT, MODEL = "scheduling-live-cpu", "tiny-llama"
# In bfloat16 an answer depends on the other requests of the batch, also with vLLM's scheduler.
ARGS = (
    "--dtype",
    "float32",
    "--max-model-len",
    "2048",
    "--kv-cache-memory-bytes",
    "134217728",
    "--enforce-eager",
)
# All servers have equal threads: with KV on the host vLLM would leave one core out.
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
FIRST = "fcfs"
SCHEDULERS = {
    FIRST: SchedulerSettings(FCFS),
    "fcfs again": SchedulerSettings(FCFS),
    "deadline": SchedulerSettings(DEADLINE),
    "skip-join MLFQ, paper": SchedulerSettings(MLFQ, mlfq="paper"),
    "skip-join MLFQ, tempered": SchedulerSettings(MLFQ, mlfq="tempered"),
}
BATCH, REQUESTS = 8, 32
# Median, spread and most tokens of the log-normal lengths of prompts and of answers.
LENGTHS = ((90, 1.3, 1500), (30, 0.9, 200))
RUNNING, WAITING, STEPS = 64, 2000, 50
Burst = Sequence[tuple[Sequence[int], int]]
Row = dict[str, Any]


def draw(number: int) -> Burst:
    """Return the prompts of one round, and the tokens of each answer."""
    random = Random(number)
    sizes = [
        [min(most, 1 + round(random.lognormvariate(log(middle), sigma))) for middle, sigma, most in LENGTHS]
        for _ in range(REQUESTS)
    ]
    rows = [TraceRequest(0.0, prompt, output) for prompt, output in sizes]
    return [(generate_prompt(row, i, number, VOCABULARY), row.output_tokens) for i, row in enumerate(rows)]


async def ask(client: aiohttp.ClientSession, prompt: Sequence[int], output: int) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and the tokens."""
    body = completions.build_request(prompt, output, stream=True, token_ids=True)
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    async with client.post(completions.COMPLETIONS, json=body) as answer:
        async for line in answer.content:
            if (event := completions.parse_event(line)) is not None and event.token:
                first = first or time.perf_counter() - began
                tokens += event.token_ids
    assert len(tokens) == output, (answer.status, len(tokens), output)
    return first, tokens


async def serve(port: int, burst: Burst) -> tuple[dict[str, float], list[list[int]]]:
    """Send all requests at once; return the times in seconds, and the answers."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", connector=connector) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, *one) for one in burst))
        seconds = time.perf_counter() - began
    ttft = sorted(first for first, _ in answers)
    times = {"mean_ttft": fmean(ttft), "p95_ttft": ttft[int(0.95 * len(ttft))], "burst": seconds}
    return times, [tokens for _, tokens in answers]


def compare(runs: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> Row:
    """Return the times of a scheduler, and the first one's over them, round by round."""
    pairs = list(zip(runs[FIRST], runs[name], strict=True))
    return {
        key: {
            "s": spread([one[key] for _, one in pairs]),
            "ratio": spread([base[key] / one[key] for base, one in pairs]),
        }
        for key in pairs[0][0]
    }


def measure_bursts(seconds: float) -> Row:
    """Serve bursts for about `seconds`, in two rounds at least after one that warms up."""
    command = [*coldstart_command(), "materialize", MODEL, "-q", "--profile-seconds", "20", "--", *ARGS]
    subprocess.run(command, check=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        work, ports, fallbacks = Path(name), dict[str, int](), dict[str, Any]()
        for scheduler, of in SCHEDULERS.items():
            form = ("--mlfq", of.mlfq) if of.policy == MLFQ else ()
            flags = ("--scheduler", of.policy, "--batch", str(BATCH), *form)
            launcher = ServeLauncher(ModelUnderTest(MODEL, MODEL, ARGS, flags), FRESH, work / "run")
            server = stack.enter_context(run_server(launcher, work / str(len(ports))))
            client = completions.CompletionClient(HOST, server.files.port)
            client.await_first_token("a", deadline_s=time.monotonic() + 300, check=server.check_alive)
            ports[scheduler], fallbacks[scheduler] = client.port, server.read_readiness()["fallbacks"]
        runs: dict[str, list[dict[str, float]]] = {scheduler: [] for scheduler in SCHEDULERS}
        equal, end, number = dict.fromkeys(SCHEDULERS, 0), time.monotonic() + seconds, 0
        while number < 3 or time.monotonic() < end:
            burst, answers = draw(number), dict[str, list[list[int]]]()
            for scheduler in Random(number).sample(list(SCHEDULERS), len(SCHEDULERS)):
                times, answers[scheduler] = asyncio.run(serve(ports[scheduler], burst))
                runs[scheduler].append(times)
                print(number, scheduler, times, flush=True)
            for scheduler, tokens in answers.items():
                equal[scheduler] += sum(map(list.__eq__, tokens, answers[FIRST]))
            number += 1
    later = {scheduler: of[1:] for scheduler, of in runs.items()}
    rows = [
        {"scheduler": one, "equal": equal[one], "fallbacks": fallbacks[one], **compare(later, one)}
        for one in runs
    ]
    return {"requests": REQUESTS, "batch": BATCH, "answers": REQUESTS * number, "schedulers": rows}


class Stepper:
    """One scheduler with a full batch and waiting requests; `seconds` of CPU in its `calls` since the start."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.random, self.now, self.added, self.seconds, self.calls = Random(1), 0.0, 0, 0.0, 0
        self.engine = VirtualEngine(
            FALLBACK_PROFILE, replace(settings, batch=RUNNING), EngineResources(), self._emit
        )
        for _ in range(RUNNING + WAITING):
            self._emit("", 0, True)
        scheduler = self.engine.scheduler
        scheduler.schedule = self._timed(scheduler.schedule)
        scheduler.update_from_output = self._timed(scheduler.update_from_output)
        self.turn()

    def turn(self) -> float:
        """Run STEPS steps; return the CPU seconds of one."""
        before, end = self.seconds, self.calls + 2 * STEPS
        while self.calls < end:
            self.now = self.engine.step(self.now)
        return (self.seconds - before) / STEPS

    def _emit(self, name: str, tokens: int, ended: bool) -> None:
        if ended:
            row = TraceRequest(0.0, 64, self.random.randint(200, 400))
            prompt = generate_prompt(row, self.added, 1, VOCABULARY)
            self.engine.add(str(self.added), prompt, row.output_tokens)
            self.added += 1

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            began = time.thread_time()
            result = method(*given)
            self.seconds += time.thread_time() - began
            self.calls += 1
            return result

        return run


def measure_steps(turns: int) -> Row:
    """Return the CPU time of a step of each scheduler."""
    steppers = {name: Stepper(settings) for name, settings in SCHEDULERS.items()}
    found: dict[str, list[float]] = {name: [] for name in steppers}
    gc.freeze()
    gc.disable()
    for number in range(turns):
        gc.collect()
        for name in Random(number).sample(list(steppers), len(steppers)):
            found[name].append(steppers[name].turn())
    gc.enable()
    deadlines, began = SchedulerSettings(DEADLINE).deadlines(1 << 20), time.thread_time()
    for number in range(1000):
        deadlines.priority(number, range(number, number + 1000))
    rows = [
        {
            "scheduler": name,
            "us": 1e6 * median(times),
            "ratio": spread([one / base for one, base in zip(times, found[FIRST], strict=True)]),
        }
        for name, times in found.items()
    ]
    deadline_us = 1e3 * (time.thread_time() - began)
    sizes = {"running": RUNNING, "waiting": WAITING, "steps_of_a_turn": STEPS, "turns": turns}
    return {**sizes, "deadline_us": deadline_us, "schedulers": rows}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=10.0, help="about how long the bursts take")
    minutes = arguments.parse_args().minutes
    os.environ |= THREADS
    made = about() | {"kind": "measured", "model": MODEL, "args": ARGS, "versions": facts.list_versions()}
    step = measure_steps(max(2, round(12 * minutes)))
    print(step, flush=True)
    finish(RESULT, made | {"step": step, "bursts": measure_bursts(60 * minutes)})


if __name__ == "__main__":
    main()
