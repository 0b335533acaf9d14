"""Requests to real servers: bursts, streams that continue elsewhere, replays of a trace, and counters of the scheduler."""

import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from support.processes import wait_until
from tools.machine import READY_S, Machine, Served

from coldstart.contract.arguments import Arguments
from coldstart.host.live.continuation import COMPLETIONS, Continuation

BLOCK_TOKENS = 32
BLOCK_BYTES = 2 * 8 * 2 * 64 * 4 * BLOCK_TOKENS
"""Keys and values of tiny-llama's 8 layers, 2 heads of 64 numbers, 4 bytes each."""

PROMPT_TOKENS, TOKENS = 40, 110
POOL_BYTES = 14 * BLOCK_BYTES
"""Fewer blocks than a batch of four needs at its end, so that some requests are evicted on any machine."""
ARGUMENTS = (
    # In bfloat16 an answer depends on the other requests of the batch, also with vLLM's scheduler.
    *("--dtype", "float32"),
    *("--max-model-len", "256", "--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "32"),
    "--kv-cache-memory-bytes",
)
"""Arguments of a server of these requests; the size of its KV pool follows."""
SWAPPING = ("--scheduler", "skip-join-mlfq", "--batch", "4", "--kv-host-memory", str(1 << 27))


def body(number: int, tokens: int = TOKENS, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """Return a greedy request with a unique prompt."""
    prompt = [10 + (7919 * (number + 1) + 31 * position) % 1900 for position in range(prompt_tokens)]
    wanted = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, **wanted}


def together(served: Served, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Send all requests at once and return the token ids of the answers."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda one: answer(served, one), bodies))
    assert [len(tokens) for tokens in answers] == [one["max_tokens"] for one in bodies]
    return answers


def answer(served: Served, given: dict[str, Any]) -> list[int]:
    with post(served, json.dumps({"model": "tiny-llama", **given}).encode()) as response:
        return list(json.load(response)["choices"][0]["token_ids"])


def count_overtaken(served: Served, sent: Sequence[dict[str, Any]], last: dict[str, Any]) -> int:
    """Send `last` once the engine has received all others; return how many of them end after it."""

    def end(given: dict[str, Any]) -> float:
        answer(served, given)
        return time.monotonic()

    with ThreadPoolExecutor(len(sent) + 1) as pool:
        others = [pool.submit(end, one) for one in sent]
        wait_until(lambda: sum(one.done() for one in others) + _count_live(served) >= len(sent))
        ended = pool.submit(end, last).result()
        return sum(other.result() > ended for other in others)


def _count_live(served: Served) -> float:
    """Return the number of requests that run or wait, as vLLM counts them."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics(served) if line.startswith(names))


def counters(served: Served) -> dict[str, float]:
    """Return the counters of our scheduler."""
    prefix = "coldstart_scheduler_"
    found = [line.removeprefix(prefix).rsplit(" ", 1) for line in metrics(served) if line.startswith(prefix)]
    return {name: float(value) for name, value in found if "{" not in name}


def metrics(served: Served) -> list[str]:
    with urllib.request.urlopen(f"{served.report['url']}/metrics", timeout=30) as response:
        lines: list[str] = response.read().decode().splitlines()
    return lines


LOCAL = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # The machine may have fewer cores than ranks, and waiting ranks spin.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Environment of servers whose ranks are processes of one machine."""


def post(served: Served, body: bytes, request: str = "") -> Any:
    """Send a completion request with the id `request`, and return the open response."""
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": request} if request else {})
    return urllib.request.urlopen(
        urllib.request.Request(f"{served.report['url']}{COMPLETIONS}", body, headers), timeout=READY_S
    )


def begin_stream(
    served: Served, model: str, prompt: Sequence[int], request: str, tokens: int, received: int
) -> tuple[Continuation, Any]:
    """Start a stream of `tokens` tokens; return it after the first `received`, with its open response."""
    document = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    document |= {"ignore_eos": True, "stream": True, "cache_salt": request}
    stream = Continuation.create(COMPLETIONS, document, Arguments())
    assert stream is not None
    response = post(served, stream.build_next_request(COMPLETIONS)[1], request)
    while len(stream.tokens) < received:
        stream.filter_chunk(response.readline())
    return stream, response


def finish_stream(stream: Continuation, response: Any) -> list[int]:
    """Read the stream to its end, and return its tokens."""
    while line := response.readline():
        stream.filter_chunk(line)
    assert stream.finished and not stream.error, stream.error
    return stream.tokens


def open_client(url: str) -> openai.OpenAI:
    """Return OpenAI's client of a gateway."""
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=READY_S)


def complete(client: openai.OpenAI, model: str, prompt: str) -> tuple[int, ...]:
    """Return the greedy tokens that follow the prompt."""
    made: Any = client.completions.create(
        model=model, prompt=prompt, max_tokens=16, temperature=0, extra_body={"return_token_ids": True}
    )
    return tuple(made.choices[0].token_ids)


def replay(machine: Machine, url: str, *options: str) -> dict[str, Any]:
    """Replay a trace of two requests on the server at `url`, and return the report."""
    rows = [{"timestamp": n * 99, "input_length": 9, "output_length": 4, "hash_ids": [n]} for n in range(2)]
    trace = machine.root / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--target", url, "--slo", "ttft=600", "--format", "json")
    found: dict[str, Any] = json.loads(machine.run("trace-replay", str(trace), *given, *options))
    assert (found["kind"], found["completed"], found["slo"]["attainment"]) == ("live", len(rows), 1.0)
    return found
