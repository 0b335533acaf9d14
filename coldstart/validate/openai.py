"""The completions protocol as OpenAI's and vLLM's servers speak it: one request, and one line of a streamed answer.

Two transports carry it. The bench blocks in a socket: while a server starts it tries every 4 ms, and must not disturb what
it measures (15 us of CPU an attempt, 46 with asyncio). The replay streams thousands of answers at once.
Requests are greedy and ignore the end token, so that every answer has its length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
_DATA = b"data:"


class ServerError(Exception):
    """The server says within a stream that it failed."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream: what it adds to the answer, and the usage where the server reports it.

    `token` is whether it stands for an output token: one may decode to no text (half a character), so the end of an answer
    and an id of a token count as well.
    """

    choice: bool
    token: bool
    token_ids: tuple[int, ...]
    usage: Mapping[str, Any]


def request(
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    stream: bool,
    model: str | None = None,
    token_ids: bool = False,
    usage: bool = False,
) -> dict[str, Any]:
    """The body of a request. `token_ids` asks for the answer's (vLLM's own field), `usage` for the count of its tokens."""
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


def event(line: bytes) -> StreamEvent | None:
    """What one line of a stream says; None for a line that is no event. Raises ServerError, ValueError."""
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
