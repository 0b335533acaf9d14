"""The completions protocol of OpenAI's and vLLM's servers: the body of a request, and one line of a streamed answer.

Two transports use it. `completions` blocks in a socket: while a server starts it connects every 4 ms and must not disturb the
measured server (15 µs of CPU per attempt, 46 with asyncio). The trace replay streams thousands of responses at once.
Requests are greedy and ignore the end token, so that every response has the requested length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
_DATA = b"data:"


class ServerError(Exception):
    """The server reported an error within a stream."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream: its part of the response, and the usage where the server reports it.

    `token` is true for an event that carries an output token. A token may decode to no text (half a character), so an event
    with a token id or with the end of the response counts as well.
    """

    choice: bool
    token: bool
    token_ids: tuple[int, ...]
    usage: Mapping[str, Any]


def build_request(
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    stream: bool,
    model: str | None = None,
    token_ids: bool = False,
    usage: bool = False,
) -> dict[str, Any]:
    """Build the body of a request. `token_ids` requests token ids (a field of vLLM), `usage` the number of tokens."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": stream,
    }
    if model is not None:
        body["model"] = model
    if token_ids:
        body["return_token_ids"] = True
    if usage:
        body |= {"min_tokens": max_tokens, "stream_options": {"include_usage": True}}
    return body


def parse_event(line: bytes) -> StreamEvent | None:
    """Parse one line of a stream; return None for a line without an event. Raises ServerError, ValueError."""
    data = line[len(_DATA) :].strip() if line.startswith(_DATA) else b""
    if data in (b"", b"[DONE]"):
        return None
    document = json.loads(data)
    if "error" in document:
        raise ServerError(str(document["error"])[:300])
    choices = document.get("choices") or [{}]
    ids = tuple(choices[0].get("token_ids") or ())
    token = bool(ids or choices[0].get("text") or choices[0].get("finish_reason"))
    return StreamEvent(bool(document.get("choices")), token, ids, document.get("usage") or {})
