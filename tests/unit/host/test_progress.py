"""Progress of a start, as a waiting client reads it."""

from __future__ import annotations

import json

from coldstart.host.core import Core
from coldstart.host.events import Arrived, Ended, Left, Outdated, Started
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import estimate_progress


def test_progress_follows_the_start_time_of_the_model() -> None:
    core = Core([ModelSpec.simple("a", 10, 8.0)], HostSettings(memory=15, policy="lru"))
    model = core.models["a"]

    def progress(now: float) -> tuple[str, float | None, float | None]:
        found = json.loads(estimate_progress(model, now).encode())
        assert found["model"] == "a"
        return found["stage"], found["fraction"], found["eta_s"]

    assert progress(99.0) == ("stopped", 0.0, None)
    core.handle(Arrived("1", "a"), 100.0)
    assert progress(100.0) == ("starting", 0.0, 8.0)
    assert progress(102.0) == ("starting", 0.25, 6.0)
    # A start that takes longer than any before has no estimate.
    assert progress(109.0) == ("starting", 0.99, None)
    core.handle(Started("a", 11.0), 111.0)
    assert progress(111.0) == ("ready", 1.0, 0.0)
    core.handle(Outdated("a"), 112.0)
    assert progress(112.0) == ("draining", 0.0, None)


def test_next_estimate_is_corrected_by_the_measured_start() -> None:
    core = Core([ModelSpec.simple("a", 10, 8.0)], HostSettings(memory=15, policy="lru"))
    core.handle(Arrived("1", "a"), 0.0)
    core.handle(Started("a", 11.0), 11.0)
    core.handle(Ended("1"), 11.5)
    core.handle(Outdated("a"), 12.0)
    core.handle(Left("a"), 13.0)
    core.handle(Arrived("2", "a"), 20.0)
    assert estimate_progress(core.models["a"], 20.0).eta_s == 9.0
