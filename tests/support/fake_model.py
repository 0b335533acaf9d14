"""Model without weights whose events are those of vLLM's /v1/completions and, as far as clients read them, of its chat.

Each token depends on all tokens before it, so that a continued stream differs from a restarted one.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def next_token(ids: Sequence[int]) -> int:
    """Return the token that follows `ids`."""
    return (31 * sum(ids) + 7 * len(ids)) % 997


def generated(prompt: str, count: int) -> list[int]:
    """Return the tokens of an uninterrupted stream."""
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt.encode()) :]


def events(body: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield one event per token of a streamed completion, and an event with the usage if the request includes it."""
    prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    begun, left, shown = len(ids), int(body["max_tokens"]), bool(body.get("return_token_ids"))
    head = {"id": name, "object": "text_completion", "created": 1, "model": body["model"]}
    for number in range(left):
        ids.append(next_token(ids))
        text = f" {ids[-1]}"
        choice = {
            "index": 0,
            **({"delta": {"content": text}} if "messages" in body else {"text": text}),
            "logprobs": None,
            "finish_reason": "length" if number == left - 1 else None,
            "stop_reason": None,
            "prompt_token_ids": ids[:begun] if shown and not number else None,
            "token_ids": [ids[-1]] if shown else None,
        }
        yield {**head, "choices": [choice]}
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": begun, "total_tokens": len(ids), "completion_tokens": left}
        yield {**head, "choices": [], "usage": usage}


def pair_tokens(events: Iterator[dict[str, Any]], pairs: int) -> Iterator[dict[str, Any]]:
    """Yield the first event, `pairs` events with the tokens of two, and the others."""
    yield next(events)
    for first, second in itertools.islice(zip(events, events, strict=False), pairs):
        (one,), (other,) = first["choices"], second["choices"]
        other.update({name: one[name] + other[name] for name in ("text", "token_ids")})
        yield second
    yield from events
