"""Calls of gateways: what the core receives for each request, and who has to attach first."""

from __future__ import annotations

import asyncio

import pytest

from coldstart.fleet import events
from coldstart.fleet.events import Event
from coldstart.fleet.live.gateway_calls import GatewayCalls
from coldstart.fleet.live.gateways import Gateways
from coldstart.fleet.live.messages import (
    Attach,
    MoveEnded,
    NotAttached,
    OpenRequest,
    Pull,
    Received,
    Report,
    RequestArrived,
    RequestEnded,
    RequestRouted,
    SendRequest,
)
from coldstart.host.live.log import Log


@pytest.fixture
def received_events() -> list[Event]:
    return []


@pytest.fixture
def calls(received_events: list[Event]) -> GatewayCalls:
    return GatewayCalls(Gateways(lambda: 0.0), received_events.append, Log(quiet=True))


def test_attach_reports_only_the_difference_when_a_gateway_attaches_again(
    calls: GatewayCalls, received_events: list[Event]
) -> None:
    calls.attach(Attach("g", (), (OpenRequest("g/1", "m", None), OpenRequest("g/2", "m", "m#1"))))
    assert received_events == [events.Arrived("g/1", "m"), events.Routed("g/2", "m", "m#1")]
    received_events.clear()
    calls.attach(Attach("g", (), (OpenRequest("g/2", "m", "m#1"), OpenRequest("g/3", "m", None))))
    assert received_events == [events.Ended("g/1"), events.Arrived("g/3", "m")]


def test_report_emits_every_event_in_order(calls: GatewayCalls, received_events: list[Event]) -> None:
    incarnation = calls.attach(Attach("g", (), ())).incarnation
    happened = (
        RequestArrived("g/1", "m"),
        RequestRouted("g/2", "m", "m#1"),
        MoveEnded("g/2", False),
        RequestEnded("g/2"),
    )
    assert calls.report(Report("g", incarnation, happened)) == Received()
    assert received_events == [
        events.Arrived("g/1", "m"),
        events.Routed("g/2", "m", "m#1"),
        events.Moved("g/2", False),
        events.Ended("g/2"),
    ]


def test_a_gateway_of_another_incarnation_has_to_attach(
    calls: GatewayCalls, received_events: list[Event]
) -> None:
    calls.attach(Attach("g", (), ()))
    assert calls.report(Report("g", "earlier", (RequestArrived("g/1", "m"),))) == NotAttached()
    assert asyncio.run(calls.pull(Pull("g", "earlier", 0))) == NotAttached()
    assert received_events == []


def test_order_returns_false_when_the_gateway_is_unknown(calls: GatewayCalls) -> None:
    calls.attach(Attach("g", (), ()))
    assert calls.order(SendRequest("g/1", "m#1"))
    assert not calls.order(SendRequest("h/1", "m#1"))
