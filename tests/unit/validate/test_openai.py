"""Requests contain only the wanted members; a line of a stream is a token, a count, an error or nothing."""

from __future__ import annotations

import json

import pytest

from coldstart.validate import completions
from coldstart.validate.completions import ServerError, StreamEvent


def line(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\r\n"


@pytest.mark.parametrize("text", [b"", b"\n", b": a comment\n", b"event: x\n", b"data:\n", b"data: [DONE]\n"])
def test_parse_returns_none_for_other_lines(text: bytes) -> None:
    assert completions.parse_event(text) is None


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"choices": [{"text": "x", "token_ids": [7]}]}, StreamEvent(True, True, (7,), {})),
        ({"choices": [{"text": "", "token_ids": [7]}]}, StreamEvent(True, True, (7,), {})),
        ({"choices": [{"text": "", "token_ids": None}]}, StreamEvent(True, False, (), {})),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, StreamEvent(True, True, (), {})),
        (
            {"choices": [], "usage": {"completion_tokens": 2}},
            StreamEvent(False, False, (), {"completion_tokens": 2}),
        ),
        ({"choices": [{"text": "x"}], "usage": None}, StreamEvent(True, True, (), {})),
    ],
)
def test_an_event_says_whether_it_is_a_token(document: object, found: StreamEvent) -> None:
    assert completions.parse_event(line(document)) == found


def test_an_error_within_a_stream_is_raised() -> None:
    with pytest.raises(ServerError, match="out of memory"):
        completions.parse_event(line({"error": {"message": "out of memory"}}))
