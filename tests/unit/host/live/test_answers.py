"""Responses of the gateway: errors in vLLM's format, events, and timings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from coldstart.host.live import answers


def test_an_error_has_vllms_members() -> None:
    assert json.loads(answers.error(404, "gone")) == {
        "error": {"message": "gone", "type": "NotFoundError", "param": None, "code": 404}
    }


def test_an_event_holds_each_line_and_a_comment_is_passed_over() -> None:
    assert answers.event(b"a\nb") == b"data: a\ndata: b\n\n"
    assert answers.comment("waiting") == b": waiting\n\n"


def test_timings_omit_unknown_values() -> None:
    said = answers.timing([("queued", 0.5, None), ("start", None, "fresh"), ("first-token", 1.0, "x")])
    assert said == 'queued;dur=500.000, first-token;dur=1000.000;desc="x"'


def test_an_answer_of_json_carries_its_own_headers_too() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(answers.send_json(send, 503, b"{}", [(b"retry-after", b"2")]))
    asyncio.run(answers.send_json(send, 200, b"{}"))
    named = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    assert [message.get("headers") for message in sent[::2]] == [[*named, (b"retry-after", b"2")], named]
