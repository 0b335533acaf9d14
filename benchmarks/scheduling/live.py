"""Schedulers on real vLLM: time to first token in bursts, and whether the answers are equal.

benchmarks/SCHEDULING.md describes the servers, the rounds and the ratios.

Run: python -m benchmarks scheduling/live [--minutes M]
Time: 15 minutes
Result: scheduling-live-cpu.json
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from math import log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import aiohttp
from pandas import DataFrame

from benchmarks.common import about, finish, parser, run_coldstart, spread
from coldstart.bench import facts
from coldstart.lab.live import VOCABULARY
from coldstart.lab.plan import generate_prompt
from coldstart.lab.traces import TraceRequest
from coldstart.launch import completions
from coldstart.validate.launch import HOST, run_server
from coldstart.validate.launchers import FRESH, ModelUnderTest, ServeLauncher

RESULT, MODEL = "scheduling-live-cpu", "tiny-llama"
KV = ("--kv-cache-memory-bytes", str(128 << 20))
# In bfloat16 an answer depends on the other requests of the batch, also with vLLM's scheduler.
ARGS = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", *KV)
# All servers have equal threads: with KV on the host vLLM would leave one core out.
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
FIRST = "fcfs"
SCHEDULERS = {
    FIRST: ("fcfs",),
    "fcfs again": ("fcfs",),
    "deadline": ("deadline",),
    "skip-join MLFQ, paper": ("skip-join-mlfq", "--mlfq", "paper"),
    "skip-join MLFQ, tempered": ("skip-join-mlfq", "--mlfq", "tempered"),
}
BATCH, REQUESTS = 8, 32
# Median, spread and most tokens of the log-normal lengths of prompts and of answers.
LENGTHS = ((90, 1.3, 1500), (30, 0.9, 200))
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
            if (event := completions.parse_event(line)) is not None and event.has_token:
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


def measure_bursts(seconds: float) -> Row:
    """Serve bursts for about `seconds`, in two rounds at least after one that warms up."""
    run_coldstart("materialize", MODEL, "-q", "--profile-seconds", "20", "--", *ARGS)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        work, ports, fallbacks = Path(name), dict[str, int](), dict[str, Any]()
        for scheduler, words in SCHEDULERS.items():
            flags = ("--batch", str(BATCH), "--scheduler", *words)
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
    later, rows = {scheduler: DataFrame(of[1:]) for scheduler, of in runs.items()}, list[Row]()
    for name, of in later.items():
        # The first scheduler's times over those of this one, round by round.
        ratios = {key: {"s": spread(of[key]), "ratio": spread(later[FIRST][key] / of[key])} for key in of}
        rows.append({"scheduler": name, "equal": equal[name], "fallbacks": fallbacks[name], **ratios})
    return {"requests": REQUESTS, "batch": BATCH, "answers": REQUESTS * number, "schedulers": rows}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=10.0, help="about how long the bursts take")
    minutes = arguments.parse_args().minutes
    os.environ |= THREADS
    made = about() | {"kind": "measured", "model": MODEL, "args": ARGS, "versions": facts.list_versions()}
    finish(RESULT, made | {"bursts": measure_bursts(60 * minutes)})


if __name__ == "__main__":
    main()
