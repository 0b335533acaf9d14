"""The host's status: every documented member, with the figures of the state."""

from __future__ import annotations

import json

from coldstart.host import status
from coldstart.host.core import Core
from coldstart.host.events import ModelReady, RequestArrived, ServerOutdated
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import HostFacts, estimate_progress


def _host() -> tuple[Core, HostFacts]:
    core = Core(
        [ModelSpec.with_two_tiers("a", 10, 5.0, idle_s=60.0), ModelSpec.with_two_tiers("b", 10, 7.0)],
        HostSettings(memory=15, policy="lru"),
    )
    facts = HostFacts(url="http://127.0.0.1:8000", pid=7, began=1.0)
    facts.get_model("a").aliases = ("alpha",)
    return core, facts


def test_a_request_that_waits_and_a_model_that_starts() -> None:
    core, facts = _host()
    core.handle(RequestArrived("1", "a"), 2.0)
    said = status.build_status(core, facts, 4.0, 1e9)
    assert said["requests"] == {
        "total": 1, "hits": 0, "hit_ratio": 0.0, "held": 1, "in_flight": 0, "refused": {}
    }  # fmt: skip
    a, b = said["models"]
    assert (a["state"], a["held"], a["in_flight"], a["held_bytes"], a["since_s"]) == (
        "starting",
        1,
        0,
        10,
        2.0,
    )
    assert (a["aliases"], a["idle_s"], a["hit_ratio"]) == (("alpha",), 60.0, None)
    assert (b["state"], b["tier"], b["penalty_s"]) == ("stopped", "stopped", {"awake": 0.0, "stopped": 7.0})
    assert said["host"]["memory_used_bytes"] == 10
    assert a["progress"] is None


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
