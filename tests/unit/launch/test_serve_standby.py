"""`serve --mode standby`: an engine that sleeps is woken where there is one, and refused where vLLM cannot sleep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from coldstart.artifacts.bundle import Bundle

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import UsageError
from coldstart.launch import ladder, modes, prepare_template, template_pool
from coldstart.launch.request import ServeRequest
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.paths import Cache

PLAN = LaunchPlan(Arguments(["serves", "--port", "7"]), canary={"prompt": [5], "tokens": [1]})
SLEEPY = LaunchPlan(Arguments(["m", "--enable-sleep-mode"]), key="sha256:" + "a" * 64)


@pytest.fixture
def request_for(publish: object, model: ResolvedModel, fake_engine: object) -> Iterator[object]:
    """request_for(mode): a look-up that has found a bundle."""
    fake_engine("serves")  # type: ignore[operator]
    bundle: Bundle = publish(kv={"bytes": 1})  # type: ignore[operator]
    found = Lookup(model, Arguments(), Cache.at(), bundle.key, bundle)
    started: list[ladder.StartedServer] = []

    def start(mode: str) -> ladder.StartedServer:
        started.append(ladder.start(ServeRequest(found, mode=mode, ready_timeout=20), PLAN))
        return started[-1]

    yield SimpleNamespace(start=start, key=bundle.key.digest)
    for one in started:
        one.running.process.signal(9)
        one.running.process.wait()


def test_where_vllm_cannot_sleep_it_is_refused_with_what_there_is_instead(
    request_for: SimpleNamespace,
) -> None:
    one = request_for.start("standby")
    assert one.mode == "fresh" and one.document()["fast_path"]["mode"] is False
    (step,) = one.account.fallbacks
    assert "CPU build" in step.reason and "--level engine" in str(step.hint)
    # Nobody asked for it here: it is no step down.
    one = request_for.start("auto")
    assert one.account.fallbacks == [] and one.account.unavailable[0].stage == "standby"
    with pytest.raises(UsageError, match="CPU build") as caught:
        prepare_template.start_template("asleep-1", SLEEPY, "m", 1.0)
    assert "--level engine" in str(caught.value.hint)


def test_what_a_gpu_engine_has_not_is_no_step_down(
    request_for: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    one = request_for.start("auto")
    assert one.account.fallbacks == [] and {step.stage for step in one.account.unavailable} == set(
        modes.names()
    ) - {"fresh"}
    assert one.document()["fast_path"]["mode"] is True


def test_an_engine_that_is_asleep_is_the_first_that_auto_takes(
    request_for: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    # The process is the fake template's, which forks: who is woken is the same to a client.
    warm = template_pool.start("asleep-2", replace(SLEEPY, key=request_for.key), "tiny", 20)
    try:
        assert warm.servers == ()
        (warm.directory / "serving").touch()
        assert next(template_pool.listed()).servers == (warm.pid,)
        (warm.directory / "serving").unlink()
        assert [request_for.start(mode).mode for mode in ("auto", "standby")] == ["standby"] * 2
    finally:
        template_pool.stop(warm, force=True)


def test_an_engine_without_sleep_mode_is_not_kept(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    with pytest.raises(UsageError, match="cannot sleep without --enable-sleep-mode") as caught:
        prepare_template.start_template("asleep-1", replace(SLEEPY, vllm_args=Arguments(["m"])), "m", 1.0)
    assert "--level asleep-1 -- --enable-sleep-mode" in str(caught.value.hint)
