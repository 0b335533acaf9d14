"""A client of a stream that another server continues receives each token once and each character completely."""

import json
from typing import Any

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.contract.handover import PARAMETER
from coldstart.host.live.continuation import CHAT, COMPLETIONS, Continuation, find_unsupported

PROMPT = [5, 6, 7]
ASKED = {"model": "m", "prompt": "p", "stream": True, "max_tokens": 9, "temperature": 0}
CHATTED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}
HEAD = {"id": "one", "object": "text_completion", "created": 1, "model": "m"}


def _event(choice: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({**HEAD, "choices": [choice] if choice else [], **more}).encode() + b"\n\n"


def _said(ids: list[int], text: str, first: bool = False, end: str | None = None) -> bytes:
    given = {"prompt_token_ids": PROMPT if first else None, "token_ids": ids}
    return _event({"index": 0, "text": text, "logprobs": None, "finish_reason": end, **given})


def _choices(passed: bytes) -> list[dict[str, Any]]:
    events = [one for one in passed.split(b"\n\n") if one.startswith(b"data: {")]
    return [json.loads(one[6:])["choices"][0] for one in events]


def _stream(**more: Any) -> Continuation:
    made = Continuation.create(COMPLETIONS, {**ASKED, **more}, Arguments())
    assert made is not None
    path, body = made.build_next_request(COMPLETIONS)
    assert path == COMPLETIONS and json.loads(body) == {**ASKED, **more, "return_token_ids": True}
    return made


def test_continuation_requests_the_rest_and_removes_extra_members() -> None:
    stream = _stream(stream_options={"include_usage": True})
    piece = _said([11], "a", first=True) + _said([12], "b") + _said([13], "c")[:-7]
    passed = stream.filter_chunk(piece)
    assert [one["text"] for one in _choices(passed)] == ["a", "b"]
    assert all(one["token_ids"] is None and one["prompt_token_ids"] is None for one in _choices(passed))
    # The third token was truncated, and the client did not receive it.
    path, body = stream.build_next_request(COMPLETIONS)
    asked = json.loads(body)
    assert path == COMPLETIONS and asked["prompt"] == [*PROMPT, 11, 12] and asked["max_tokens"] == 7
    passed = stream.filter_chunk(_said([13], "c", first=True) + _said([14], "d", end="length"))
    assert [one["text"] for one in _choices(passed)] == ["c", "d"] and stream.finished and not stream.ended
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    last = stream.filter_chunk(_event({}, usage=usage) + b"data: [DONE]\n\n")
    counted = json.loads(last.split(b"\n\n")[0][6:])["usage"]
    assert counted == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert stream.ended and not stream.error


def test_incomplete_character_is_generated_again() -> None:
    """A server that starts in the middle of a character would repeat its prompt."""
    stream = _stream(return_token_ids=True)
    stream.filter_chunk(_said([11], "a", first=True) + _said([200], "") + _said([201], ""))
    _, body = stream.build_next_request(COMPLETIONS)
    assert json.loads(body)["prompt"] == [*PROMPT, 11]
    passed = stream.filter_chunk(_said([200], "") + _said([201], "") + _said([202], "\N{GRINNING FACE}"))
    # The client does not receive its ids again.
    assert [(one["text"], one["token_ids"]) for one in _choices(passed)] == [("\N{GRINNING FACE}", [202])]
    assert stream.tokens == [11, 200, 201, 202]


@pytest.mark.parametrize("kv", [None, {"address": "here"}])
def test_warmup_computes_the_tokens_so_far_or_loads_their_kv(kv: dict[str, str] | None) -> None:
    stream = _stream()
    stream.filter_chunk(_said([11], "a", first=True))
    asked = json.loads(stream.build_warmup_request(kv))
    assert (asked["prompt"], asked["max_tokens"], asked.get(PARAMETER)) == ([*PROMPT, 11], 1, kv)


def test_text_before_half_a_character_is_not_repeated() -> None:
    stream = _stream()
    stream.filter_chunk(_said([11], "a", first=True) + _said([12, 200], "b"))
    assert stream.is_resumable
    _, body = stream.build_next_request(COMPLETIONS)
    assert json.loads(body)["prompt"] == [*PROMPT, 11]
    passed = stream.filter_chunk(_said([12], "b") + _said([200, 201], "\N{GRINNING FACE}") + _said([13], "c"))
    assert "".join(one["text"] for one in _choices(passed)) == "\N{GRINNING FACE}c"
    # The connection is lost again during the repeated tokens.
    _, body = stream.build_next_request(COMPLETIONS)
    assert json.loads(body)["prompt"] == [*PROMPT, 11, 12, 200, 201, 13]


def test_other_tokens_than_before_end_the_stream_with_an_error() -> None:
    stream = _stream()
    stream.filter_chunk(_said([11], "a", first=True) + _said([12, 200], "b"))
    stream.build_next_request(COMPLETIONS)
    assert stream.filter_chunk(_said([99], "x") + _said([12], "y")) == b""
    assert "different tokens" in stream.error and not stream.is_resumable


def test_sampled_stream_continues_only_from_the_position_of_the_client() -> None:
    stream = _stream(temperature=0.7)
    stream.filter_chunk(_said([11], "a", first=True) + _said([200], ""))
    assert stream.is_resumable
    stream.build_next_request(COMPLETIONS)
    assert stream.tokens == [11]
    assert _choices(stream.filter_chunk(_said([77], "z")))[0]["text"] == "z"
    stream.filter_chunk(_said([12, 200], "b"))
    assert not stream.is_resumable


def test_chat_continues_as_a_chat() -> None:
    stream = Continuation.create(CHAT, {**CHATTED, "min_tokens": 4, "max_completion_tokens": 8}, Arguments())
    assert stream is not None
    stream.build_next_request(CHAT)
    delta = {"role": "assistant", "content": ""}
    role = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    head = {"object": "chat.completion.chunk"}
    first = _event(role, prompt_token_ids=PROMPT, **head)
    said = _event({**role, "delta": {"content": "a"}, "token_ids": [11]}, **head)
    passed = stream.filter_chunk(first + said)
    assert [one["delta"]["content"] for one in _choices(passed)] == ["", "a"]
    assert b'"prompt_token_ids":null' in passed and b'"token_ids":null' in passed
    path, body = stream.build_next_request(CHAT)
    asked = json.loads(body)
    assert path == COMPLETIONS and "messages" not in asked and asked["prompt"] == [*PROMPT, 11]
    assert (asked["max_tokens"], asked["min_tokens"]) == (7, 3)
    passed = stream.filter_chunk(_said([12], "b", end="stop"))
    (choice,) = _choices(passed)
    assert choice["delta"] == {"content": "b"} and choice["finish_reason"] == "stop"
    assert json.loads(passed[6:])["object"] == "chat.completion.chunk"


def test_error_event_counts_as_a_broken_stream() -> None:
    stream = _stream()
    passed = stream.filter_chunk(
        _said([11], "a", first=True) + b'data: {"error": {"message": "dead"}}\n\ndata: [DONE]\n\n'
    )
    assert len(_choices(passed)) == 1 and "dead" in stream.error and stream.is_resumable
    assert b"error" not in passed and b"DONE" not in passed
    early = _stream()
    assert early.filter_chunk(_said([11], "a", first=True) + b"data: [DONE]\n\n").endswith(b"}\n\n")
    assert "before its last token" in early.error


def test_aborted_stream_is_no_complete_answer() -> None:
    """vLLM 0.32 ends its streams so when its process gets SIGTERM: a finish reason and [DONE], as after the last token."""
    stream = _stream()
    stream.filter_chunk(_said([11], "a", first=True))
    assert stream.filter_chunk(_said([], "", end="abort") + b"data: [DONE]\n\n") == b""
    assert "aborted" in stream.error and not (stream.finished or stream.is_over) and stream.is_resumable
    _, body = stream.build_next_request(COMPLETIONS)
    assert json.loads(body)["prompt"] == [*PROMPT, 11]
    passed = stream.filter_chunk(_said([12], "b", end="length") + b"data: [DONE]\n\n")
    assert [one["text"] for one in _choices(passed)] == ["b"] and stream.is_over


@pytest.mark.parametrize("event", [b'data: {"number": 1}', b"data: half of {", b"data: [1]"])
def test_other_events_are_passed_on_and_never_continued(event: bytes) -> None:
    stream = _stream()
    assert stream.filter_chunk(b": a comment\n\n" + event + b"\n\n") == b": a comment\n\n" + event + b"\n\n"
    assert not stream.is_resumable and not stream.error
    assert stream.filter_chunk(b"data: [DONE]\n\n") == b"data: [DONE]\n\n" and stream.ended


def test_a_stream_that_has_all_its_tokens_needs_no_server() -> None:
    stream = _stream(stream_options={"include_usage": True})
    stream.filter_chunk(_said([11], "a", first=True, end="stop"))
    assert stream.finished and stream.is_resumable
    last = stream.build_final_events()
    assert b'"completion_tokens":1' in last and last.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "given", "words", "named"),
    [
        (COMPLETIONS, {}, [], ""),
        (COMPLETIONS, {"prompt": [1, 2]}, [], ""),
        (COMPLETIONS, {"seed": 1}, [], ""),
        (COMPLETIONS, {"n": 1, "logprobs": None, "stop": [], "presence_penalty": 0.0}, [], ""),
        (COMPLETIONS, {"seed": 1, "temperature": 0.5}, [], "seed"),
        (COMPLETIONS, {"n": 2}, [], "n"),
        (COMPLETIONS, {"logprobs": 0}, [], "logprobs"),
        (COMPLETIONS, {"stop": ["x"]}, [], "stop"),
        (COMPLETIONS, {"frequency_penalty": 0.5}, [], "frequency_penalty"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, [], "response_format"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}}, [], "structured_outputs"),
        (COMPLETIONS, {"unheard_of": 1}, [], "unheard_of"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, [], "prompt"),
        ("/v1/responses", {}, [], "/v1/responses"),
        (CHAT, {}, [], ""),
        (CHAT, {"tools": [{"type": "function"}]}, [], "tools"),
        (CHAT, {}, ["--reasoning-parser", "x"], "a reasoning or tool-call parser of the server"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, [], "messages"),
    ],
)
def test_reason_against_a_continuation_is_named(
    path: str, given: dict[str, Any], words: list[str], named: str
) -> None:
    asked = {**(CHATTED if path == CHAT else ASKED), **given}
    assert find_unsupported(path, asked, Arguments(words)) == named
    assert (Continuation.create(path, asked, Arguments(words)) is None) == bool(named)
