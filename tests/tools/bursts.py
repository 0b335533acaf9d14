"""Bursts of requests to a server of tiny-llama, their answers, and the counters of its scheduler."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools.machine import READY_S, Served

BLOCK_TOKENS = 32
BLOCK_BYTES = 2 * 8 * 2 * 64 * 4 * BLOCK_TOKENS
"""Keys and values of tiny-llama's 8 layers, 2 heads of 64 numbers, 4 bytes each."""

PROMPT_TOKENS, TOKENS = 40, 110


def body(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Return a greedy request with a unique prompt."""
    prompt = [10 + (7919 * (number + 1) + 31 * position) % 1900 for position in range(PROMPT_TOKENS)]
    wanted = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, **wanted}


def together(served: Served, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Send all requests at once and return the token ids of the answers."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda one: answer(served, one), bodies))
    assert [len(tokens) for tokens in answers] == [one["max_tokens"] for one in bodies]
    return answers


def answer(served: Served, given: dict[str, Any]) -> list[int]:
    with urllib.request.urlopen(_request(served, given), timeout=READY_S) as response:
        return list(json.load(response)["choices"][0]["token_ids"])


def counters(served: Served) -> dict[str, float]:
    return {name: value for name, value in exported(served) if "{" not in name}


def exported(served: Served) -> list[tuple[str, float]]:
    with urllib.request.urlopen(f"{served.report['url']}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    prefix = "coldstart_scheduler_"
    found = [line.removeprefix(prefix).rsplit(" ", 1) for line in lines if line.startswith(prefix)]
    return [(name, float(value)) for name, value in found]


def _request(served: Served, given: dict[str, Any]) -> urllib.request.Request:
    data = json.dumps({"model": "tiny-llama", **given}).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{served.report['url']}/v1/completions", data, headers)
