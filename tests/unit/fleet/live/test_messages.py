"""Messages between a gateway and the controller as JSON documents, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.fleet.live import messages
from coldstart.fleet.live.messages import (
    AdminOrder,
    Attach,
    Call,
    GetStatus,
    GroupReleased,
    GroupRoute,
    MoveEnded,
    MoveRequest,
    News,
    NotAttached,
    NumberedOrder,
    OpenRequest,
    Pull,
    RefuseRequest,
    Report,
    RequestArrived,
    RequestEnded,
    RequestRouted,
    SendRequest,
)
from coldstart.host.launches import Launch

EVENTS = (
    RequestArrived("g/1", "m"),
    RequestRouted("g/2", "m", "m#1"),
    MoveEnded("g/2", True),
    RequestEnded("g/2"),
    GroupReleased("m#1"),
)
ORDERS = (SendRequest("g/1", "m#1"), RefuseRequest("g/2", 429, "too many", None), MoveRequest("g/3", "m#2"))
LAUNCH = Launch("m", "/models/m", Arguments(["--max-model-len", "64"]), ("alias",))
CALLS = (
    Attach("g", ("m#1",), (OpenRequest("g/1", "m", None), OpenRequest("g/2", "m", "m#1"))),
    Pull("g", "x", 7),
    Report("g", "x", EVENTS),
    GetStatus(),
    AdminOrder("scale", ("m", 1, 2)),
)
NEWS = News(
    tuple(NumberedOrder(number, order) for number, order in enumerate(ORDERS)),
    (GroupRoute("m#1", "m", "http://h:1", 4, "fresh", 1.5),),
    (LAUNCH,),
)


def _sent(message: Any) -> Any:
    return json.loads(json.dumps(messages.document(message)))


@pytest.mark.parametrize("call", CALLS, ids=lambda one: type(one).__name__)
def test_read_returns_the_call_that_was_written(call: Call) -> None:
    assert messages.read(_sent(call), Call) == call


def test_read_returns_news_with_launches_and_their_arguments() -> None:
    found = messages.read(_sent(NEWS), News | NotAttached)
    assert found == NEWS and isinstance(found.launches[0].args, Arguments)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"type": "Popen"}, "Popen"),
        ({"gateway": "g"}, "type"),
        (_sent(Pull("g", "x", 7)) | {"after": "7"}, r"int.*\$\.after"),
        (_sent(Report("g", "x", EVENTS)) | {"events": [{"type": "Stop"}]}, r"Stop.*\$\.events\[0\]"),
        ({"type": "AdminOrder", "method": "tell", "args": []}, "tell"),
    ],
)
def test_read_names_the_fault_of_an_invalid_call(given: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        messages.read(given, Call)


def test_read_refuses_a_launch_that_the_host_would_refuse() -> None:
    document = _sent(NEWS)
    document["launches"][0]["mode"] = "sideways"
    with pytest.raises(UsageError, match="sideways"):
        messages.read(document, News)
