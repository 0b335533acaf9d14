"""States of one model: every transition of the table is possible and no other one is."""

from __future__ import annotations

import pytest

from coldstart.errors import UsageError
from coldstart.host.model_state import IllegalTransitionError, Model, State
from coldstart.host.specification import ModelSpec, Tier, stopped

ASLEEP = Tier("asleep-1", 2, 1.0, host_memory=10)
SPEC = ModelSpec("m", (Tier("awake", 10, 0.0), ASLEEP, stopped(8.0)))


def _ready() -> Model:
    model = Model(SPEC)
    model.start(0.0)
    model.ready(8.0, 8.0, None)
    return model


def test_model_starts_serves_sleeps_and_wakes() -> None:
    model = _ready()
    assert model.state is State.READY and model.tier.name == "awake"
    model.drain(ASLEEP, 20.0)
    assert model.leave() and not model.leave(), "the order is given once"
    model.complete_leave(21.0)
    assert model.state is State.ASLEEP and model.tier is ASLEEP
    model.start(30.0)
    assert model.tier is ASLEEP, "it starts from where it was"
    model.ready(31.0, 1.0, None)
    assert model.state is State.READY


def test_a_model_in_use_drains_and_leaves_only_then() -> None:
    model = _ready()
    model.in_flight.add("r")
    model.drain(SPEC.tiers[-1], 10.0)
    assert not model.leave()
    with pytest.raises(IllegalTransitionError, match="1 requests in flight"):
        model.complete_leave(11.0)
    model.end_request("r", 12.0)
    assert model.leave()
    model.complete_leave(13.0)
    assert model.state is State.STOPPED


def test_failures_double_the_wait_up_to_a_limit_and_a_start_forgets_them() -> None:
    model, now = Model(SPEC), 0.0
    for waits in (1.0, 2.0, 4.0, 5.0, 5.0):
        model.start(now)
        model.fail("no", now, 1.0, 5.0)
        assert model.retry_at == now + waits
        with pytest.raises(IllegalTransitionError, match="may not start before"):
            model.start(now)
        now = model.retry_at
    model.start(now)
    model.ready(now + 1, 1.0, None)
    assert (model.failures, model.error, model.retry_at) == (0, "", 0.0)


def test_wait_does_not_grow_when_the_cause_is_not_the_model() -> None:
    model, now = Model(SPEC), 0.0
    for _ in range(5):
        model.start(now)
        model.fail("killed", now, 1.0, 5.0, external=True)
        assert model.retry_at == now + 1.0
        now = model.retry_at
    model.start(now)
    model.ready(now + 1, 1.0, None)
    model.fail("killed", now + 2, 1.0, 5.0, external=True)
    assert (model.failures, model.retry_at) == (0, now + 2), "a killed server starts again at once"
    model.start(now + 2)


WRONG = {
    "stopped": ("ready", "drain", "fail", "left", "leave"),
    "starting": ("start", "drain", "left", "leave"),
    "ready": ("start", "ready", "left", "leave"),
}


@pytest.mark.parametrize(("state", "event"), [(s, e) for s, events in WRONG.items() for e in events])
def test_other_transitions_are_refused(state: str, event: str) -> None:
    model = Model(SPEC)
    if state == "starting":
        model.start(0.0)
    model = _ready() if state == "ready" else model
    calls = {
        "start": lambda: model.start(50.0),
        "ready": lambda: model.ready(50.0, 1.0, None),
        "drain": lambda: model.drain(SPEC.tiers[-1], 50.0),
        "left": lambda: model.complete_leave(50.0),
        "leave": model.leave,
        "fail": lambda: model.fail("x", 50.0, 1.0, 1.0),
    }
    with pytest.raises(IllegalTransitionError, match=f"event {event} is invalid for m in state {state}"):
        calls[event]()
    assert model.state == state


def test_observed_memory_corrects_the_profile() -> None:
    model = Model(SPEC)
    model.start(0.0)
    model.ready(20.0, 20.0, 14)
    assert model.observed.memory == 14
    assert model.observed.penalty_s(SPEC.tiers[-1]) == pytest.approx(8.0 + 12.0 / 3)


@pytest.mark.parametrize(
    "tiers",
    [
        (Tier("awake", 10, 0.0),),
        (Tier("awake", 10, 0.0), Tier("asleep-1", 11, 1.0), stopped(2.0)),
        (Tier("awake", 10, 0.0), Tier("asleep-1", 1, 3.0), stopped(2.0)),
        (Tier("awake", 0, 0.0), stopped(2.0)),
        (stopped(2.0), Tier("awake", 10, 0.0)),
    ],
)
def test_invalid_tiers_are_refused(tiers: tuple[Tier, ...]) -> None:
    with pytest.raises(UsageError, match=r"models\.m\.tiers"):
        ModelSpec("m", tiers)
