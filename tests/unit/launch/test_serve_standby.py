"""`serve --mode standby`: a sleeping engine is woken; the mode is refused if vLLM cannot sleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import UsageError
from coldstart.launch import modes, preparation
from coldstart.launch.server import Server
from coldstart.models.inspection import Lookup
from coldstart.system import runtime

PLAN = LaunchPlan(Arguments(["serves", "--port", "7"]), canary={"prompt": [5], "tokens": [1]})
SLEEPY = LaunchPlan(Arguments(["m", "--enable-sleep-mode"]), key="sha256:" + "a" * 64)


@pytest.fixture
def starter(lookup: Lookup, start_server: Callable[..., Server]) -> SimpleNamespace:
    """Return a starter of servers from a published bundle."""
    return SimpleNamespace(start=lambda mode: start_server(PLAN, mode), key=lookup.key.digest)


def test_standby_is_refused_with_an_alternative_when_vllm_cannot_sleep(
    starter: SimpleNamespace,
) -> None:
    one = starter.start("standby")
    assert one.mode == "fresh" and one.document()["fast_path"]["mode"] is False
    (step,) = one.account.fallbacks
    assert "CPU build" in step.reason and "--level engine" in str(step.hint)
    # `auto` did not request this mode, so it is not a fallback.
    one = starter.start("auto")
    assert one.account.fallbacks == [] and one.account.unavailable[0].stage == "standby"
    with pytest.raises(UsageError, match="CPU build") as caught:
        preparation.start_template("asleep-1", SLEEPY, "m", 1.0)
    assert "--level engine" in str(caught.value.hint)


def test_modes_unavailable_on_a_gpu_are_not_fallbacks(
    starter: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    one = starter.start("auto")
    assert one.account.fallbacks == [] and {step.stage for step in one.account.unavailable} == set(
        modes.names()
    ) - {"fresh"}
    assert one.document()["fast_path"]["mode"] is True


def test_engine_without_sleep_mode_is_refused(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    with pytest.raises(UsageError, match="cannot sleep without --enable-sleep-mode") as caught:
        preparation.start_template("asleep-1", replace(SLEEPY, vllm_args=Arguments(["m"])), "m", 1.0)
    assert "--level asleep-1 -- --enable-sleep-mode" in str(caught.value.hint)
