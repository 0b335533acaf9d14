"""The host's decisions, event by event."""

import json
from typing import Any

import pytest

from coldstart.errors import UsageError
from coldstart.host import configuration
from coldstart.host.core import Core
from coldstart.host.events import (
    Action,
    ChangeTier,
    ConfigurationChanged,
    DispatchRequest,
    Event,
    MemoryMeasured,
    ModelFailed,
    ModelReady,
    RejectRequest,
    ReplaceServer,
    RequestArrived,
    RequestEnded,
    ServerOutdated,
    StartModel,
    Tick,
    TierChanged,
)
from coldstart.host.model_state import ModelState
from coldstart.host.specification import HostSettings, ModelSpec, Tier, stopped
from coldstart.host.status import estimate_progress


class Driver:
    """Host with two models of 10 bytes in 15 bytes by default; passes events at given times."""

    def __init__(self, *specs: ModelSpec, **settings: Any) -> None:
        specs = specs or (ModelSpec.with_two_tiers("a", 10, 5.0), ModelSpec.with_two_tiers("b", 10, 7.0))
        self.core = Core(specs, HostSettings(**{"memory": 15, "policy": "lru", **settings}))

    def __call__(self, now: float, *events: Event) -> list[Action]:
        return [action for event in events for action in self.core.handle(event, now)]

    def up(self, name: str, now: float) -> None:
        """Serve one request until now."""
        self(now, RequestArrived(f"up-{name}", name), ModelReady(name, 1.0), RequestEnded(f"up-{name}"))
        assert self.core.models[name].state is ModelState.READY


def _start(name: str, tier: str = "stopped") -> tuple[str, str, str]:
    return "start", name, tier


def _brief(actions: list[Action]) -> list[Any]:
    found: list[Any] = []
    for action in actions:
        match action:
            case StartModel(model, tier):
                found.append(_start(model, tier.name))
            case ChangeTier(model, tier):
                found.append(("leave", model, tier.name))
            case RejectRequest(request, status):
                found.append((status, request))
            case DispatchRequest(request, model):
                found.append((request, model))
            case _:
                found.append(action)
    return found


def _on(name: str, memory: int, *devices: int, **more: Any) -> ModelSpec:
    return ModelSpec.with_two_tiers(name, memory, 1.0, devices=devices, **more)


def test_a_model_on_two_devices_evicts_what_each_device_needs() -> None:
    host = Driver(
        _on("a", 4, 0), _on("b", 4, 1), _on("c", 9, 2), _on("d", 14, 0, 1), memory=60, device_memory=10
    )
    for name in "abc":
        host.up(name, 1.0)
    assert _brief(host(2.0, RequestArrived("r", "d"))) == [("leave", one, "stopped") for one in "ab"]
    assert _brief(host(3.0, TierChanged("a"))) == []
    assert _brief(host(4.0, TierChanged("b"))) == [_start("d")]


def test_pinned_models_reduce_what_their_device_has_for_others() -> None:
    host = Driver(_on("a", 6, 0, pinned=True), _on("b", 6, 0), _on("c", 6, 1), memory=100, device_memory=10)
    assert _brief(host(1.0, RequestArrived("r", "b"))) == [(507, "r"), _start("a")]
    with pytest.raises(UsageError, match="pinned models need"):
        Driver(_on("a", 6, 0, pinned=True), _on("b", 6, 0, pinned=True), memory=100, device_memory=10)


def test_measured_excess_of_busy_models_is_evicted_at_the_next_check() -> None:
    host = Driver(_on("a", 6, idle_s=20.0), _on("b", 6, idle_s=9.0))
    for name in "ab":
        host.up(name, 1.0)
        host(2.0, RequestArrived(name, name))
    assert host(4.0, MemoryMeasured("a", 14)) == []
    assert host(5.0, RequestEnded("a"), RequestEnded("b")) == []
    assert _brief(host(14.0, Tick())) == [("leave", "a", "stopped"), ("leave", "b", "stopped")]


@pytest.mark.parametrize("memory, others, replaced", [(9, "", True), (7, "", False), (20, "bc", False)])
def test_server_in_use_is_replaced_in_memory_that_is_free(memory: int, others: str, replaced: bool) -> None:
    host = Driver(*(_on(name, 4) for name in "abc"), memory=memory)
    host.up("a", 1.0)
    # One of the others starts, and the second one waits for its turn.
    host(2.0, RequestArrived("stream", "a"), *(RequestArrived(name, name) for name in others))
    orders = host(3.0, ServerOutdated("a", "changed", is_replaceable=True))
    assert orders == ([ReplaceServer("a", "changed")] if replaced else [])
    assert host.core.models["a"].state is (ModelState.READY if replaced else ModelState.DRAINING)


def test_a_failed_start_answers_its_own_requests_and_no_others() -> None:
    host = Driver(memory=30, loaders=2, backoff_s=4.0)
    host(0.0, RequestArrived("1", "a"), RequestArrived("2", "b"))
    (refused,) = host(1.0, ModelFailed("a", "out of memory"))
    assert isinstance(refused, RejectRequest) and (refused.request, refused.status) == ("1", 503)
    assert "out of memory" in refused.reason and refused.retry_after_s == 4.0
    assert _brief(host(2.0, RequestArrived("3", "a"))) == [(503, "3")], "no start during the back-off"
    assert _brief(host(3.0, ModelReady("b", 3.0))) == [("2", "b")]
    assert _brief(host(5.0, RequestArrived("4", "a"))) == [_start("a")]


def test_requests_wait_for_the_next_start_until_three_in_a_row_were_killed() -> None:
    host = Driver(backoff_s=2.0)
    assert _brief(host(0.0, RequestArrived("1", "a"))) == [_start("a")]
    assert host(1.0, ModelFailed("a", "killed", has_external_cause=True)) == []
    assert host(1.5, RequestArrived("2", "a")) == [] and host.core.deadline() == 3.0
    assert _brief(host(3.0, Tick())) == [_start("a")]
    assert host(4.0, ModelFailed("a", "killed", has_external_cause=True)) == []
    assert _brief(host(6.0, Tick())) == [_start("a")]
    assert _brief(host(7.0, ModelFailed("a", "killed", has_external_cause=True))) == [(503, "1"), (503, "2")]
    assert _brief(host(7.5, RequestArrived("3", "a"))) == [(503, "3")], "no start during the back-off"
    assert _brief(host(9.0, RequestArrived("4", "a"))) == [_start("a")]
    assert _brief(host(10.0, ModelReady("a", 1.0))) == [("4", "a")]
    assert _brief(
        host(
            11.0,
            RequestEnded("4"),
            ModelFailed("a", "killed", has_external_cause=True),
            RequestArrived("5", "a"),
        )
    ) == [_start("a")]
    assert host(12.0, ModelFailed("a", "killed", has_external_cause=True)) == [], (
        "a start has succeeded in between"
    )


def test_model_that_dies_while_stopping_has_stopped() -> None:
    host = Driver()
    host.up("a", 1.0)
    host(2.0, RequestArrived("r", "b"))
    assert _brief(host(3.0, ModelFailed("a", "killed"))) == [_start("b")]
    assert host.core.models["a"].state is ModelState.STOPPED
    assert host.core.models["a"].consecutive_failures == 0


def test_model_that_dies_while_it_goes_to_sleep_has_failed() -> None:
    host = Driver(ModelSpec("a", SLEEPER), ModelSpec.with_two_tiers("b", 10, 7.0), host_memory=50)
    host.up("a", 1.0)
    assert _brief(host(2.0, RequestArrived("r", "b"))) == [("leave", "a", "asleep-1")]
    assert _brief(host(3.0, ModelFailed("a", "crashed"))) == [_start("b")]
    assert host.core.models["a"].state is ModelState.FAILED and host.core.models["a"].error == "crashed"


def test_pending_request_is_refused_after_its_time_limit() -> None:
    host = Driver(hold_s=40.0)
    host(0.0, RequestArrived("1", "a"))
    assert _brief(host(40.0, Tick())) == [(504, "1")]


def test_idle_models_stop_after_their_time() -> None:
    specs = [ModelSpec.with_two_tiers(name, 5, 1.0, idle_s=60.0) for name in "ab"]
    host = Driver(*specs)
    for time, name in enumerate("ab"):
        host.up(name, float(time))
    assert host.core.deadline() == 60.0
    assert _brief(host(60.0, Tick())) == [("leave", "a", "stopped")]
    assert _brief(host(61.0, TierChanged("a"), Tick())) == [("leave", "b", "stopped")]
    assert host(200.0, TierChanged("b"), Tick()) == []


SLEEPER = (Tier("awake", 10, 0.0), Tier("asleep-1", 1, 0.5, host_memory=8), stopped(9.0))


def test_a_model_goes_to_sleep_where_host_memory_allows_and_stops_where_not() -> None:
    asleep = Tier("asleep-1", 0, 0.5, host_memory=8)
    tiers = SLEEPER[0], asleep, SLEEPER[2]
    host = Driver(*(ModelSpec(name, tiers) for name in "abc"), memory=12, host_memory=8)
    host.up("a", 1.0)
    assert _brief(host(2.0, RequestArrived("1", "b"))) == [("leave", "a", "asleep-1")]
    assert _brief(host(3.0, TierChanged("a"), ModelReady("b", 9.0), RequestEnded("1"))) == [
        _start("b"),
        ("1", "b"),
    ]
    assert host.core.residents.device.used == 10
    assert _brief(host(4.0, RequestArrived("2", "c"))) == [("leave", "b", "stopped")], "host memory is full"
    host(5.0, TierChanged("b"), ModelReady("c", 9.0), RequestEnded("2"))
    host(6.0, RequestArrived("3", "a"), TierChanged("c"))
    model = host.core.models["a"]
    assert (model.state, model.tier.name) == (ModelState.STARTING, "asleep-1")


def test_a_sleeping_model_that_fails_costs_what_a_running_one_costs() -> None:
    tiers = SLEEPER[0], Tier("asleep-2", 1, 0.5), SLEEPER[2]
    host = Driver(ModelSpec("a", tiers), ModelSpec.with_two_tiers("b", 10, 7.0))
    host.up("a", 1.0)
    running = host.core.residents.costs["a"]
    assert _brief(host(2.0, RequestArrived("1", "b"))) == [("leave", "a", "asleep-2")]
    host(3.0, TierChanged("a"), ModelFailed("a", "killed"))
    assert host.core.residents.costs["a"] == running


def test_reconfiguration_adds_and_removes_models_after_their_streams() -> None:
    host = Driver(ModelSpec.with_two_tiers("a", 10, 5.0, pinned=True))
    host.up("a", 1.0)
    host(2.0, RequestArrived("stream", "a"))
    host(
        3.0, ConfigurationChanged(tuple(ModelSpec.with_two_tiers(*one, 1.0) for one in (("c", 5), ("d", 10))))
    )
    arrived = (RequestArrived(request, model) for request, model in ("ra", "sc", "td"))
    assert _brief(host(4.0, *arrived)) == [(404, "r"), _start("c")], "d waits for the memory of a"
    assert _brief(host(5.0, RequestEnded("stream"))) == [("leave", "a", "stopped")]
    host(6.0, TierChanged("a"))
    assert set(host.core.models) == {"c", "d"}


def test_default_model_evicts_nothing_and_waits_for_requests() -> None:
    specs = [ModelSpec.with_two_tiers(*one) for one in (("a", 10, 5.0), ("b", 10, 7.0), ("c", 4, 1.0))]
    host = Driver(*specs, default_model="b")
    host.up("a", 1.0)
    assert _brief(host(3.0, RequestArrived("2", "c"))) == [_start("c")]
    host(4.0, ModelReady("c", 1.0))
    host(5.0, ServerOutdated("a"))
    assert host(6.0, TierChanged("a")) == []
    assert _brief(host(7.0, RequestEnded("2"))) == [_start("b")]


def test_default_model_does_not_return_when_it_is_no_longer_configured() -> None:
    host = Driver(default_model="a")
    host(0.0, Tick(), ModelReady("a", 1.0))
    assert _brief(host(1.0, ConfigurationChanged(()))) == [("leave", "a", "stopped")]
    assert host(2.0, TierChanged("a")) == [] and "a" not in host.core.models


def test_order_renews_the_idle_time_of_a_model_that_is_ready() -> None:
    host = Driver(ModelSpec.with_two_tiers("a", 10, 5.0, idle_s=100.0))
    host.up("a", 0.0)
    order = RequestArrived("order", "a", is_client_request=False)
    assert _brief(host(90.0, order, RequestEnded("order"))) == [("order", "a")] and host(150.0, Tick()) == []
    assert _brief(host(190.0, Tick())) == [("leave", "a", "stopped")]
    assert host.core.requests == 1


def test_request_without_a_model_goes_to_the_default_model() -> None:
    models = {name: {"memory": 1, "start_s": 1.0} for name in "ab"}
    table = {"memory": 15, "default_model": "b", "models": models}
    route = configuration.parse(table).catalogue.find_destination
    assert [getattr(route(name), "model", None) for name in (None, "", "c")] == ["b", "b", None]
    with pytest.raises(UsageError, match="default_model: unknown model 'c'"):
        configuration.parse({**table, "default_model": "c"})
    with pytest.raises(UsageError, match="default_model: expected `str`"):
        configuration.parse({**table, "default_model": 3})


def test_progress_follows_the_start_time_of_the_model() -> None:
    core = Core([ModelSpec.with_two_tiers("a", 10, 8.0)], HostSettings(memory=15, policy="lru"))
    model = core.models["a"]

    def progress(now: float) -> tuple[str, float | None, float | None]:
        found = json.loads(estimate_progress(model, now).encode())
        assert found["model"] == "a"
        return found["state"], found["fraction"], found["eta_s"]

    assert progress(99.0) == ("stopped", 0.0, None)
    core.handle(RequestArrived("1", "a"), 100.0)
    assert progress(100.0) == ("starting", 0.0, 8.0)
    assert progress(102.0) == ("starting", 0.25, 6.0)
    # A start that takes longer than any before has no estimate.
    assert progress(109.0) == ("starting", 0.99, None)
    core.handle(ModelReady("a", 11.0), 111.0)
    assert progress(111.0) == ("ready", 1.0, 0.0)
    core.handle(ServerOutdated("a"), 112.0)
    assert progress(112.0) == ("draining", 0.0, None)
