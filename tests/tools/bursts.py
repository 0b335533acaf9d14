"""Bursts of requests to a server of tiny-llama, their answers, and the counters of its scheduler."""

import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools.machine import READY_S, Served

BLOCK_TOKENS = 32
BLOCK_BYTES = 2 * 8 * 2 * 64 * 4 * BLOCK_TOKENS
"""Keys and values of tiny-llama's 8 layers, 2 heads of 64 numbers, 4 bytes each."""

PROMPT_TOKENS, TOKENS = 40, 110


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


def answer(served: Served, given: dict[str, Any], headers: Mapping[str, str] | None = None) -> list[int]:
    with urllib.request.urlopen(_request(served, given, headers or {}), timeout=READY_S) as response:
        return list(json.load(response)["choices"][0]["token_ids"])


def count_overtaken(
    served: Served,
    sent: Sequence[dict[str, Any]],
    last: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> int:
    """Send `last` once the engine has all requests that were sent before; return how many of them end after it."""

    def end(given: dict[str, Any], headers: Mapping[str, str] | None = None) -> float:
        answer(served, given, headers)
        return time.monotonic()

    with ThreadPoolExecutor(len(sent) + 1) as pool:
        others = [pool.submit(end, one) for one in sent]
        deadline = time.monotonic() + 30
        while (live := _count_live(served)) < len(sent):
            assert time.monotonic() < deadline, f"{live} of {len(sent)} requests arrived"
        ended = pool.submit(end, last, headers).result()
        return sum(other.result() > ended for other in others)


def _count_live(served: Served) -> float:
    """Return the number of requests that run or wait, as vLLM counts them."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics(served) if line.startswith(names))


def counters(served: Served) -> dict[str, float]:
    return {name: value for name, value in exported(served) if "{" not in name}


def exported(served: Served) -> list[tuple[str, float]]:
    prefix = "coldstart_scheduler_"
    found = [line.removeprefix(prefix).rsplit(" ", 1) for line in metrics(served) if line.startswith(prefix)]
    return [(name, float(value)) for name, value in found]


def metrics(served: Served) -> list[str]:
    with urllib.request.urlopen(f"{served.report['url']}/metrics", timeout=30) as response:
        lines: list[str] = response.read().decode().splitlines()
    return lines


def _request(served: Served, given: dict[str, Any], headers: Mapping[str, str]) -> urllib.request.Request:
    data = json.dumps({"model": "tiny-llama", **given}).encode()
    headers = {"Content-Type": "application/json", **headers}
    return urllib.request.Request(f"{served.report['url']}/v1/completions", data, headers)
