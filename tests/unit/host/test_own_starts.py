"""Models that start without a request."""

from __future__ import annotations

from typing import Any

import pytest

from coldstart.errors import UsageError
from coldstart.host import configuration
from coldstart.host.core import Core
from coldstart.host.events import (
    Action,
    Arrived,
    Configured,
    Ended,
    Event,
    Leave,
    Left,
    Outdated,
    Start,
    Started,
    Tick,
)
from coldstart.host.specification import HostSettings, ModelSpec

A, B = ModelSpec.simple("a", 10, 5.0, idle_s=100.0), ModelSpec.simple("b", 10, 7.0)


class Host:
    """Host with the models a, which stops after 100 s, and b, in memory for one of them."""

    def __init__(self, *specs: ModelSpec, **settings: Any) -> None:
        self.core = Core(specs or (A, B), HostSettings(**{"memory": 15, "policy": "lru", **settings}))

    def __call__(self, now: float, *events: Event) -> list[str]:
        made: list[Action] = [action for event in events for action in self.core.handle(event, now)]
        return [f"{type(one).__name__} {one.model}" for one in made if isinstance(one, (Start, Leave))]

    def serve(self, name: str, now: float) -> list[str]:
        """Answer one request at `now`, of a model that is ready or may start."""
        begun = self(now, Arrived(f"r{now}", name))
        if begun:
            self(now, Started(name, 1.0))
        return self(now, Ended(f"r{now}"))


def test_default_model_evicts_nothing_and_waits_for_requests() -> None:
    host = Host(A, B, ModelSpec.simple("c", 4, 1.0), default_model="b")
    assert host(0.0, Arrived("1", "a")) == ["Start a"]
    host(1.0, Started("a", 1.0))
    assert host(2.0, Ended("1")) == []
    assert host(3.0, Arrived("2", "c")) == ["Start c"]
    host(4.0, Started("c", 1.0))
    host(5.0, Outdated("a"))
    assert host(6.0, Left("a")) == []
    assert host(7.0, Ended("2")) == ["Start b"]


def test_default_model_does_not_return_when_it_is_no_longer_configured() -> None:
    host = Host(default_model="a")
    host(0.0, Tick(), Started("a", 1.0))
    assert host(1.0, Configured(())) == ["Leave a"]
    assert host(2.0, Left("a")) == [] and "a" not in host.core.models


def test_order_renews_the_idle_time_of_a_model_that_is_ready() -> None:
    host = Host()
    host.serve("a", 0.0)
    assert (
        host(90.0, Arrived("order", "a", counted=False), Ended("order")) == [] and host(150.0, Tick()) == []
    )
    assert host(190.0, Tick()) == ["Leave a"]
    assert host.core.requests == 1


def test_request_without_a_model_goes_to_the_default_model() -> None:
    models = {name: {"memory": 1, "start_s": 1.0} for name in "ab"}
    table = {"memory": 15, "default_model": "b", "models": models}
    route = configuration.parse(table).catalogue.route
    assert (getattr(route(None), "model", None), route("")) == ("b", None)
    with pytest.raises(UsageError, match="default_model: no model is named 'c'"):
        configuration.parse({**table, "default_model": "c"})
    with pytest.raises(UsageError, match="default_model: expected `str`"):
        configuration.parse({**table, "default_model": 3})
