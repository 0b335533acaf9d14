"""Streams of real servers on this machine that continue at another server."""

import urllib.request
from collections.abc import Sequence
from typing import Any

from tools.machine import READY_S, Served

from coldstart.contract.arguments import Arguments
from coldstart.host.live.continuation import COMPLETIONS, Continuation

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
