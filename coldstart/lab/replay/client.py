"""Client that sends one request of a trace to an OpenAI-compatible server and times its tokens.

Invariant: the prompt depends only on the trace row and the seed; equal hash_ids give equal tokens, so that a replay
exercises prefix caching as the recorded service did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from typing import Protocol

from coldstart.lab.replay.http import Endpoint, HttpError, UnreachableError, post_lines
from coldstart.lab.replay.record import RequestRecord
from coldstart.lab.traces.request import TraceRequest
from coldstart.validate import openai

HASH_TOKENS = 512
"""Number of tokens for each hash id of a Mooncake trace."""

LOWEST_TOKEN = 10
"""Lowest token id in prompts; tokenizers have their special tokens below."""


class Digest(Protocol):
    """Running hash."""

    def update(self, data: bytes, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Target:
    """One server: its completions endpoint, model name and key.

    `token_ids` requests the answer's token ids (a vLLM extension) and records their digest. With `by_row` a request names the
    model of its row instead of `model`.
    """

    endpoint: Endpoint
    model: str
    name: str
    api_key: str | None = None
    token_ids: bool = False
    by_row: bool = False


def prompt_tokens(row: TraceRequest, number: int, seed: int, vocabulary: int) -> list[int]:
    """Return the row's number of token ids below `vocabulary`; a row without hash ids shares no prefix."""
    blocks = chain(
        row.hash_ids, (-1 - number * 7919 - i for i in range(row.prompt_tokens // HASH_TOKENS + 1))
    )
    return list(
        islice(chain.from_iterable(_block(block, seed, vocabulary) for block in blocks), row.prompt_tokens)
    )


def _block(block: int, seed: int, vocabulary: int) -> Iterator[int]:
    start, step = (block * 2654435761 + seed * 40503) & 0xFFFFFFFF, (block * 97 + 31) | 1
    span = vocabulary - LOWEST_TOKEN
    return (LOWEST_TOKEN + (start + i * step) % span for i in range(HASH_TOKENS))


async def send(
    target: Target, prompt: list[int], record: RequestRecord, clock: Callable[[], float], timeout_s: float
) -> bool:
    """Stream one completion into `record`; return whether the server accepted the connection.

    Errors are stored in record.error and not raised.
    """
    body = openai.build_request(
        prompt,
        record.wanted_tokens,
        stream=True,
        model=(record.model if target.by_row else None) or target.model,
        token_ids=target.token_ids,
        usage=True,
    )
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    record.target, record.sent_s = target.name, clock()
    answer, connected = sha256() if target.token_ids else None, True
    try:
        async with asyncio.timeout(timeout_s):
            async for line in post_lines(target.endpoint, body, headers):
                _event(line, record, clock, answer)
    except UnreachableError as problem:
        record.error, connected = str(problem), False
    except TimeoutError:
        record.error = f"the answer did not end within {timeout_s:g} s"
    except (OSError, HttpError, openai.ServerError, ValueError) as problem:
        record.error = f"{type(problem).__name__}: {problem}"
    if record.error is None and record.finished_s is None:
        record.error = "the answer ended without a token"
    record.answer = answer.hexdigest() if answer else None
    return connected


def _event(line: bytes, record: RequestRecord, clock: Callable[[], float], answer: Digest | None) -> None:
    """Record one server-sent event. The server's usage, if reported, replaces the count of chunks."""
    event = openai.parse_event(line)
    if event is None:
        return
    if event.choice:
        now = clock()
        record.first_token_s = now if record.first_token_s is None else record.first_token_s
        record.finished_s = now
        record.output_tokens += 1
        if answer is not None:
            answer.update(b"".join(b"%d," % token for token in event.token_ids))
    record.output_tokens = event.usage.get("completion_tokens", record.output_tokens)
    record.prompt_tokens = event.usage.get("prompt_tokens", record.prompt_tokens)
