"""OpenAI completions protocol, and a blocking client that waits for a starting server without slowing it down.

Requests are greedy and ignore the end token, so that every response has the requested length. While a server starts, the
client tries to connect every POLL_S seconds, which takes tens of microseconds. Once connected, it blocks until bytes
arrive. Times are in seconds on CLOCK_MONOTONIC.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from coldstart.contract.environment import VLLM_API_KEY

POLL_S = 0.004
STARTING = (404, 502, 503)
COMPLETIONS = "/v1/completions"
_DATA = b"data:"


class CompletionFailedError(Exception):
    """Error for a request that the server did not complete. The message states the reason."""


class RequestRejectedError(CompletionFailedError):
    """Error for a request that a ready server rejects, for example because the prompt is too long."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Times in seconds at which the server accepted the connection and sent its first token."""

    connected_at_s: float
    first_token_at_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """Response to one prompt: token IDs (empty if the server does not report them), text, and duration in seconds."""

    tokens: tuple[int, ...]
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CompletionClient:
    """Client of the server at `host` and `port`. A request fails after `timeout_s` seconds without data."""

    host: str
    port: int
    timeout_s: float = 600.0

    def await_first_token(self, prompt: str, *, deadline_s: float, check: Callable[[], None]) -> FirstToken:
        """Send a streaming request every POLL_S seconds until a token arrives, and return the times of connection and token.

        `check` is called before each attempt, and raises if the server has exited. Raises CompletionFailedError after
        `deadline_s` (seconds on CLOCK_MONOTONIC), or immediately if the server rejects the request.
        """
        reason = "the server accepted no connection"
        while (left_s := deadline_s - time.monotonic()) > 0:
            check()
            try:
                return self._stream_one(prompt, left_s)
            except ConnectionRefusedError:
                pass
            except (OSError, http.client.HTTPException, _StillStartingError) as error:
                reason = f"{type(error).__name__}: {error}"
            time.sleep(POLL_S)
        raise CompletionFailedError(f"the server generated no token in time; last attempt: {reason}")

    def complete(self, prompt: str | Sequence[int], max_tokens: int) -> Completion:
        """Return the response of `max_tokens` tokens to a prompt. Raises CompletionFailedError if the request fails."""
        began_s = time.monotonic()
        try:
            with closing(
                http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
            ) as connection:
                _post(connection, prompt, max_tokens, stream=False)
                response = connection.getresponse()
                body = response.read()
            if response.status != 200:
                raise _build_error(response.status, body)
            choice = json.loads(body)["choices"][0]
            tokens, text = tuple(choice.get("token_ids") or ()), choice["text"]
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise CompletionFailedError(f"the request failed: {type(error).__name__}: {error}") from error
        return Completion(tokens, text, time.monotonic() - began_s)

    def complete_all(self, prompts: Sequence[str], max_tokens: int, concurrency: int) -> list[Completion]:
        """Return the response to each prompt, with `concurrency` requests in flight. Raises CompletionFailedError."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))

    def _stream_one(self, prompt: str, left_s: float) -> FirstToken:
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=left_s)) as connection:
            connection.connect()
            connected_at_s = time.monotonic()
            _post(connection, prompt, 1, stream=True)
            return FirstToken(connected_at_s, _first_event_s(connection.getresponse()))


class _StillStartingError(Exception):
    """The server responded, but is not ready yet."""


def _build_error(status: int, body: bytes) -> CompletionFailedError:
    kind = RequestRejectedError if 400 <= status < 500 else CompletionFailedError
    return kind(f"HTTP status {status}: {body[:300].decode(errors='replace')}")


def _post(
    connection: http.client.HTTPConnection, prompt: str | Sequence[int], max_tokens: int, *, stream: bool
) -> None:
    body = json.dumps(build_request(prompt, max_tokens, stream=stream, token_ids=True)).encode()
    headers = {"Content-Type": "application/json"}
    if key := VLLM_API_KEY.read():  # the server has the same variable
        headers["Authorization"] = f"Bearer {key}"
    connection.request("POST", COMPLETIONS, body, headers)


def _first_event_s(response: http.client.HTTPResponse) -> float:
    if response.status in STARTING:
        raise _StillStartingError(f"HTTP status {response.status}")
    if response.status != 200:
        raise _build_error(response.status, response.read(300))
    while line := response.readline():
        arrived_s = time.monotonic()
        try:
            event = parse_event(line)
        except ServerError as error:
            raise CompletionFailedError(f"the server reported an error: {error}") from error
        if event is not None and event.has_token:
            return arrived_s
    raise _StillStartingError("the stream ended without a token")


class ServerError(Exception):
    """Error event in the response stream of a server."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Server-sent event: a chunk of the response, or the token usage.

    `has_choice` is True if the event has a choice, and `has_token` if it contains an output token. A token can decode to empty
    text (part of a character), so an event with a token ID or a finish reason also counts.
    """

    has_choice: bool
    has_token: bool
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
    """Build a completion request. `token_ids` requests token IDs (a vLLM extension), and `usage` requests token counts."""
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
    """Parse a line of the stream. Return None if it contains no event.

    Raises ServerError if it contains an error, and ValueError if it is not valid JSON.
    """
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
