"""Models that start without a request."""

from __future__ import annotations

from typing import Any

import pytest

from coldstart.errors import UsageError
from coldstart.host import configuration
from coldstart.host.core import Core
from coldstart.host.events import (
    Action,
    ChangeTier,
    ConfigurationChanged,
    Event,
    ModelReady,
    RequestArrived,
    RequestEnded,
    ServerOutdated,
    StartModel,
    Tick,
    TierChanged,
)
from coldstart.host.specification import HostSettings, ModelSpec

A, B = ModelSpec.with_two_tiers("a", 10, 5.0, idle_s=100.0), ModelSpec.with_two_tiers("b", 10, 7.0)


class Host:
    """Host with the models a, which stops after 100 s, and b, in memory for one of them."""

    def __init__(self, *specs: ModelSpec, **settings: Any) -> None:
        self.core = Core(specs or (A, B), HostSettings(**{"memory": 15, "policy": "lru", **settings}))

    def __call__(self, now: float, *events: Event) -> list[str]:
        made: list[Action] = [action for event in events for action in self.core.handle(event, now)]
        return [
            f"{type(one).__name__} {one.model}" for one in made if isinstance(one, (StartModel, ChangeTier))
        ]

    def serve(self, name: str, now: float) -> list[str]:
        """Answer one request at `now`, of a model that is ready or may start."""
        begun = self(now, RequestArrived(f"r{now}", name))
        if begun:
            self(now, ModelReady(name, 1.0))
        return self(now, RequestEnded(f"r{now}"))


def test_default_model_evicts_nothing_and_waits_for_requests() -> None:
    host = Host(A, B, ModelSpec.with_two_tiers("c", 4, 1.0), default_model="b")
    assert host(0.0, RequestArrived("1", "a")) == ["StartModel a"]
    host(1.0, ModelReady("a", 1.0))
    assert host(2.0, RequestEnded("1")) == []
    assert host(3.0, RequestArrived("2", "c")) == ["StartModel c"]
    host(4.0, ModelReady("c", 1.0))
    host(5.0, ServerOutdated("a"))
    assert host(6.0, TierChanged("a")) == []
    assert host(7.0, RequestEnded("2")) == ["StartModel b"]


def test_default_model_does_not_return_when_it_is_no_longer_configured() -> None:
    host = Host(default_model="a")
    host(0.0, Tick(), ModelReady("a", 1.0))
    assert host(1.0, ConfigurationChanged(())) == ["ChangeTier a"]
    assert host(2.0, TierChanged("a")) == [] and "a" not in host.core.models


def test_order_renews_the_idle_time_of_a_model_that_is_ready() -> None:
    host = Host()
    host.serve("a", 0.0)
    assert (
        host(90.0, RequestArrived("order", "a", counted=False), RequestEnded("order")) == []
        and host(150.0, Tick()) == []
    )
    assert host(190.0, Tick()) == ["ChangeTier a"]
    assert host.core.requests == 1


def test_request_without_a_model_goes_to_the_default_model() -> None:
    models = {name: {"memory": 1, "start_s": 1.0} for name in "ab"}
    table = {"memory": 15, "default_model": "b", "models": models}
    route = configuration.parse(table).catalogue.find_destination
    assert (getattr(route(None), "model", None), route("")) == ("b", None)
    with pytest.raises(UsageError, match="default_model: unknown model 'c'"):
        configuration.parse({**table, "default_model": "c"})
    with pytest.raises(UsageError, match="default_model: expected `str`"):
        configuration.parse({**table, "default_model": 3})
